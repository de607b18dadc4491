"""Ray Data's rows answer as LLM.chat does, and what is wrong with one stands in its column. Two tests need Ray."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM, PoolingParams, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import ConfigError
from npu_runner.ray_data import ERROR_COLUMN, LLMPredictor
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.faults.poisoned_strategy import install, poisoned_copy
from tests.oracle.classifiers import make_classifier
from tests.replicas.ray_nodes import Node, need_ray, nodes, wait_for_resource
from tests.videos import moving_frames, video_of

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "enforce_eager": True}
EXAMPLES = [draw_example(seed) for seed in TEST_SEEDS[:5]]
GREEDY = {"temperature": 0, "max_tokens": 6}
COLUMNS = ["generated_text", "generated_tokens", "num_input_tokens", "num_generated_tokens", "finish_reason",
           "stop_reason", "reasoning_content", ERROR_COLUMN]  # fmt: skip


@pytest.fixture(scope="module")
def predictor(platform_name: str) -> Iterator[LLMPredictor]:
    predictor = LLMPredictor(str(SHAPES_VL), platform=platform_name, sampling_params={"temperature": 0}, **SETTINGS)
    yield predictor
    predictor._llm.close()


@pytest.fixture(scope="module")
def expected(platform_name: str) -> list[Any]:
    with LLM(SHAPES_VL, platform=platform_name, **SETTINGS) as llm:
        return llm.chat([example.conversation() for example in EXAMPLES], SamplingParams(**GREEDY))


def png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def messages_as_arrow_gives_them() -> list[Any]:
    """Lists have become arrays, and every object has the fields of all."""
    found = []
    for example in EXAMPLES:
        messages = []
        for message in example.conversation():
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            parts = [{"type": part["type"], "text": part.get("text"),
                      "image": png(part["image"]) if "image" in part else None} for part in content]
            messages.append({"role": message["role"], "name": None, "content": np.array(parts, dtype=object)})
        found.append(np.array(messages, dtype=object))
    return found


def column(values: list[Any]) -> np.ndarray:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def test_a_batch_answers_as_chat_does(predictor: LLMPredictor, expected: list[Any]) -> None:
    # A field that some rows lack is None in these, and whole numbers are floats then.
    params = [{"max_tokens": 6.0, "top_k": None, "stop": None}, {"max_tokens": 6, "top_k": float("nan")},
              {"max_tokens": np.float64(6)}, {"max_tokens": np.int64(6), "temperature": np.float32(0)}, GREEDY]
    batch = {"id": np.arange(5), "messages": column(messages_as_arrow_gives_them()), "sampling_params": column(params)}
    out = predictor(batch)
    assert list(out) == ["id", "messages", "sampling_params", *COLUMNS]
    assert all(out[name] is batch[name] for name in batch)
    assert out["generated_tokens"] == [output.token_ids for output in expected]
    assert out["generated_text"] == [output.text for output in expected]
    assert out["num_input_tokens"] == [output.num_prompt_tokens for output in expected]
    assert out["num_generated_tokens"] == [len(output.token_ids) for output in expected]
    assert out["finish_reason"] == [output.finish_reason for output in expected]
    assert out[ERROR_COLUMN] == [""] * 5


def test_raw_prompts_have_a_column_of_their_own(predictor: LLMPredictor) -> None:
    out = predictor({"prompt": ["which", "what colour"], "sampling_params": [{"max_tokens": 3}, {"max_tokens": 2}]})
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (3, 2)]
    found = predictor._llm.generate(["which", "what colour"], params)
    assert out["generated_tokens"] == [output.token_ids for output in found]


def test_a_row_that_repeats_itself_says_so(predictor: LLMPredictor) -> None:
    """Arrow gives the objects of all rows the fields of all, and turns lists into arrays."""
    nothing = {"repetition_detection": None, "no_repeat_ngram_size": float("nan"), "no_repeat_ngram_exempt_ids": None}
    detection = {"max_pattern_size": 20, "min_pattern_size": None, "min_count": 3}
    params = [{**nothing, "max_tokens": 40, "ignore_eos": True, **asked} for asked in (
        {}, {"repetition_detection": detection},
        {"no_repeat_ngram_size": 2.0, "no_repeat_ngram_exempt_ids": np.array([5, 6])})]
    out = predictor({"prompt": ["circle"] * 3, "sampling_params": params})
    assert out[ERROR_COLUMN] == [""] * 3
    assert out["finish_reason"] == ["length"] * 3
    assert out["stop_reason"] == [None, "repetition_detected", None]
    free, ended, banned = out["generated_tokens"]
    assert len(ended) < len(free) == len(banned) == 40
    assert ended == free[: len(ended)]
    pairs = [pair for pair in itertools.pairwise(banned) if pair[1] not in (5, 6)]
    assert len(pairs) == len(set(pairs))


# -- numbers in the place of text ------------------------------------------------------------------------------------


@contextlib.contextmanager
def loaded(model: Path, platform_name: str, **settings: Any) -> Iterator[LLMPredictor]:
    predictor = LLMPredictor(str(model), platform=platform_name, **{**SETTINGS, **settings})
    try:
        yield predictor
    finally:
        predictor._llm.close()


def assert_numbers(found: list[list[float]], expected: list[Any]) -> None:
    """To rounding: the second time prefixes come from the cache."""
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, list)
        assert ours == pytest.approx(list(theirs), abs=1e-5)


def test_vectors_are_those_of_embed(platform_name: str) -> None:
    params = {"dimensions": 5}
    with loaded(SHAPES_VL, platform_name, runner="pooling", pooling_params=params) as predictor:
        out = predictor({"id": np.arange(3), "prompt": ["a red circle", "", "two squares"]})
        expected = predictor._llm.embed(["a red circle", "two squares"], PoolingParams(**params))
        chats = predictor({"messages": column(messages_as_arrow_gives_them()[:2])})
        found = predictor._llm.embed([example.conversation() for example in EXAMPLES[:2]], PoolingParams(**params))
    assert list(out) == ["id", "prompt", "embeddings", "num_input_tokens", ERROR_COLUMN]
    assert_numbers(out["embeddings"], [expected[0].embedding, [], expected[1].embedding])
    assert out["num_input_tokens"] == [expected[0].num_prompt_tokens, 0, expected[1].num_prompt_tokens]
    assert [error.partition(":")[0] for error in out[ERROR_COLUMN]] == ["", "empty_prompt", ""]
    assert_numbers(chats["embeddings"], [vector.embedding for vector in found])


@pytest.mark.parametrize("params", [None, {"use_activation": False}])
def test_classes_are_those_of_classify(params: Any, checkpoint: Any, tmp_path: Path, platform_name: str) -> None:
    path = make_classifier(checkpoint("qwen3"), tmp_path)
    with loaded(path, platform_name, pooling_params=params, max_model_len=64) as predictor:
        out = predictor({"prompt": ["a red circle", "", "two squares"]})
        expected = predictor._llm.classify(["a red circle", "two squares"], PoolingParams(**(params or {})))
    assert out["label"] == [expected[0].label, None, expected[1].label]
    assert_numbers(out["probs"], [expected[0].probs, [], expected[1].probs])
    assert [error.partition(":")[0] for error in out[ERROR_COLUMN]] == ["", "empty_prompt", ""]


def test_scores_are_those_of_score(platform_name: str) -> None:
    query, documents = "which?", ["a red circle", "", "x " * 5000]
    with loaded(SHAPES_VL, platform_name, task="score") as predictor:
        out = predictor({"query": [query] * 3, "document": documents})
        expected = predictor._llm.score(query, documents[:2])
        with pytest.raises(ConfigError, match="a score needs query and document"):
            predictor({"prompt": ["a"]})
    assert out["score"][2] is None
    assert out["score"][:2] == pytest.approx([one.score for one in expected], abs=1e-5)
    assert [error.partition(":")[0] for error in out[ERROR_COLUMN]] == ["", "", "prompt_too_long"]


def test_params_of_another_task_are_refused_by_name(platform_name: str) -> None:
    for name, given, settings in (("pooling_params", {"dimensions": 2}, {}),
                                  ("sampling_params", {"max_tokens": 2}, {"runner": "pooling"})):
        with pytest.raises(ConfigError, match=f"{name}: the model is loaded for"):
            LLMPredictor(str(SHAPES_VL), platform=platform_name, **{name: given}, **settings, **SETTINGS)
    for given in ({"dimension": 2}, {"task": "token_embed"}, {"dimensions": 0}):
        with pytest.raises(ConfigError, match="pooling_params of all rows"):
            LLMPredictor("nowhere", pooling_params=given)
    with loaded(SHAPES_VL, platform_name, runner="pooling") as vectors:
        for name in ("sampling_params", "pooling_params"):
            with pytest.raises(ConfigError, match=f"there is a column {name}, .* loaded for task embed"):
                vectors({"prompt": ["a"], name: [{}]})


@pytest.mark.full("loads a model of its own; who says a setting of videos stays (prompts/test_videos.py)")
def test_settings_of_videos_are_for_raw_prompts_too_unless_they_bring_their_own(checkpoint: Any) -> None:
    data, text = video_of(moving_frames(30)), "<|vision_start|><|video_pad|><|vision_end|>"
    own, few, many = {"fps": 5}, {"num_frames": 2}, {"num_frames": 8}
    rows = [{"prompt": text, "videos": [data]}, {"prompt": text, "videos": [data], "mm_processor_kwargs": own}, "which"]
    predictor = LLMPredictor(str(checkpoint("qwen3_vl")), platform="cpu", dtype="float32", max_num_seqs=4,
                             max_model_len=1024, mm_processor_kwargs=few, sampling_params={"max_tokens": 1})
    out = predictor({"prompt": rows})
    assert out[ERROR_COLUMN] == [""] * 3
    llm = predictor._llm
    asked = [{**rows[0], "mm_processor_kwargs": kwargs} for kwargs in (few, own, many)]  # type: ignore[dict-item]
    as_few, as_own, as_many = [output.num_prompt_tokens for output in llm.generate(asked, SamplingParams(max_tokens=1))]
    llm.close()
    assert out["num_input_tokens"][:2] == [as_few, as_own]
    assert len({as_few, as_own, as_many}) == 3


def test_columns_that_are_dropped_are_not_carried_on(predictor: LLMPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "_dropped", ("messages",))
    found = predictor({"id": [7], "messages": column([[{"role": "user", "content": "x"}]]),
                       "sampling_params": column([{"max_tokens": 1}])})
    assert list(found) == ["id", "sampling_params", *COLUMNS]
    with pytest.raises(ConfigError, match="drop_columns: there is no column messages; the rows have id, prompt"):
        predictor({"id": [7], "prompt": ["x"]})


def test_an_empty_batch_has_every_column(predictor: LLMPredictor) -> None:
    assert predictor({"prompt": []}) == {"prompt": [], **{name: [] for name in COLUMNS}}


def test_what_is_wrong_with_a_row_stands_in_its_column(predictor: LLMPredictor, expected: list[Any]) -> None:
    fine = messages_as_arrow_gives_them()
    junk = [{"role": "user", "content": [{"type": "image", "image": b"junk"}, {"type": "text", "text": "x"}]}]
    rows = [(fine[0], GREEDY), (junk, GREEDY), (fine[1], {**GREEDY, "n": 2}), (fine[1], {**GREEDY, "logprobs": 3}),
            (fine[1], {**GREEDY, "tempersture": 1}), (fine[1], {**GREEDY, "top_p": 7.0}), (fine[1], "hot"),
            (None, GREEDY), (fine[1], {**GREEDY, "return_hidden_states": True}), (fine[1], GREEDY)]
    out = predictor({"messages": column([row[0] for row in rows]), "sampling_params": column([row[1] for row in rows])})
    errors = out[ERROR_COLUMN]
    assert errors[0] == errors[9] == ""
    assert [out["generated_tokens"][index] for index in (0, 9)] == [expected[0].token_ids, expected[1].token_ids]
    wanted = ["image_not_recognised: messages[0].content[0]: not an image", "n 2", "npu-runner batch writes them",
              "'tempersture': there is no such field", "top_p: 7.0 is outside", "an object is needed",
              "invalid_type: messages", "LLM.generate and LLM.chat return them"]
    for index, text in enumerate(wanted, 1):
        assert text in errors[index], errors[index]
        assert (out["finish_reason"][index], out["generated_text"][index]) == ("error", "")


def test_what_is_wrong_with_the_pipeline_is_an_error(predictor: LLMPredictor) -> None:
    for batch in ({"text": ["x"]}, {"messages": [[]], "prompt": ["x"]}):
        with pytest.raises(ConfigError, match="exactly one of them has to be messages or prompt"):
            predictor(batch)
    with pytest.raises(ConfigError, match="batch_format"):
        predictor([{"prompt": "x"}])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sampling_params of all rows: .*'tempersture'"):
        LLMPredictor(str(SHAPES_VL), sampling_params={"tempersture": 1})
    with pytest.raises(ConfigError, match="unknown setting 'max_num_sequences'"):
        LLMPredictor(str(SHAPES_VL), max_num_sequences=1)


def test_who_writes_the_pipeline_imports_neither_ray_nor_torch() -> None:
    code = "import sys, npu_runner.ray_data; print(sorted({'ray', 'torch', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


POISONED = """
import json, sys
from npu_runner.ray_data import LLMPredictor
if __name__ == "__main__":
    predictor = LLMPredictor(sys.argv[1], platform="cpu", tensor_parallel_size=2, max_num_seqs=8, max_model_len=256,
                             kv_cache_bytes=1 << 20)
    vocabulary = predictor._llm.engine.processor.tokenizer
    ban = {str(vocabulary.token_to_id(token)): -100 for token in "ZQXKJ"}  # nobody else generates the poison
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logit_bias": ban}
    for poison in ("b", "Z"):
        out = predictor({"prompt": [f"which {poison if n == 3 else 'b'} colour {n}" for n in range(6)],
                         "sampling_params": [params] * 6})
        print(json.dumps([out["generated_tokens"], out["__inference_error__"]]))
    predictor._llm.close()
"""


@pytest.mark.full("loads an engine of two ranks three times; a poisoned row of a job stays (test_poisoned_rows)")
@pytest.mark.slow
def test_a_row_that_ends_the_engine_of_two_ranks_is_given_up_alone(checkpoint: Any, tmp_path: Path) -> None:
    install(tmp_path / "site")
    model = poisoned_copy(checkpoint("qwen3"), tmp_path / "model")
    (tmp_path / "program.py").write_text(POISONED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, str(tmp_path / "program.py"), str(model)], env=environment,
                          capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (expected, none), (found, errors) = map(json.loads, done.stdout.splitlines())
    assert none == [""] * 6
    assert [tokens for index, tokens in enumerate(found) if index != 3] == [
        tokens for index, tokens in enumerate(expected) if index != 3]
    assert "request_failed: alone in its step, this request ended the engine" in errors[3]
    assert [error for index, error in enumerate(errors) if index != 3] == [""] * 5


def example_in_the_docs() -> str:
    (code,) = re.findall(r"```python\n(from pathlib import Path\nimport ray\n.*?)```",
                         (ROOT / "docs" / "python.md").read_text(), flags=re.DOTALL)
    return str(code)


def run_with_ray(program: str, folder: Path, **environment: str) -> str:
    need_ray()
    (folder / "program.py").write_text(program)
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **environment}
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, env=given, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full("starts Ray, whose processes take half a minute on two cores; the class itself stays, without it")
@pytest.mark.slow
def test_the_example_in_the_docs_runs_on_a_standing_cluster(tmp_path: Path) -> None:
    """Its workers' directory is none of the program's."""
    need_ray()
    (tmp_path / "images").mkdir()
    for number, example in enumerate(EXAMPLES[:4]):
        example.images[0].save(tmp_path / "images" / f"{number}.png")
    program = example_in_the_docs()
    assert len([line for line in program.splitlines() if line]) <= 15
    with nodes() as made:
        made.append(Node(num_cpus=2))
        wait_for_resource(made[0].address, "CPU", 2)
        shown = run_with_ray(f"{program}print(sorted(answers.columns()))", tmp_path, RAY_ADDRESS=made[0].address)
    lines = shown.splitlines()
    with LLM(SHAPES_VL, platform="cpu") as llm:
        asked = [[{"role": "user", "content": [
            {"type": "image", "image": tmp_path / "images" / f"{number}.png"},
            {"type": "text", "text": "List all objects from left to right."}]}] for number in range(4)]
        answers = llm.chat(asked, SamplingParams(temperature=0, max_tokens=64))
    expected = [f"{tmp_path}/images/{number}.png {output.text}" for number, output in enumerate(answers)]
    assert sorted(lines[:-1]) == sorted("\n".join(expected).splitlines())
    assert lines[-1] == str(sorted([*COLUMNS, "path"]))


KILLED = '''
import os, signal
import ray
from npu_runner.ray_data import LLMPredictor

class Mortal(LLMPredictor):
    """Its first life ends in its second batch."""
    def __call__(self, batch):
        if not os.path.exists("died") and os.path.exists("begun"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        open("begun", "w").close()
        return super().__call__(batch)

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
rows = [{"id": n, "prompt": f"colour {n}"} for n in range(24)]
settings = {"model": "shapes-vl", "platform": "cpu", "sampling_params": {"temperature": 0, "max_tokens": 4}}
out = ray.data.from_items(rows).map_batches(Mortal, fn_constructor_kwargs=settings, batch_size=8, num_cpus=1,
                                            compute=ray.data.ActorPoolStrategy(size=1)).take_all()
errors = {row["__inference_error__"] for row in out}
print(sorted(row["id"] for row in out) == list(range(24)), os.path.exists("died"), errors)
'''


@pytest.mark.full("starts Ray, whose processes take half a minute on two cores; the class itself stays, without it")
@pytest.mark.slow
def test_an_actor_that_is_killed_costs_no_row(tmp_path: Path) -> None:
    # The raylet's word about the death stands before it or behind it.
    assert "True True {''}" in run_with_ray(KILLED, tmp_path).splitlines()
