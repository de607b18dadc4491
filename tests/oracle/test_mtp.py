"""Drafts of a model's own head: its logits are those of a float64 forward at every place, and answers those of plain
steps. The forward is in mtp_reference.py."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from npu_runner import LLM, SamplingParams
from npu_runner.config import RunnerConfig
from npu_runner.engine.bounds import known_limits
from npu_runner.errors import ConfigError, ModelError
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.graphs import DecodeForward, GraphResourceError
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.runner.mtp_step import HeadStep
from npu_runner.strategies import open_checkpoint
from scripts.shapes.drawing import TEST_SEEDS, draw_example, draw_json_example
from tests.oracle.family_prompts import prompts_of
from tests.oracle.image_prompts import make_prompts
from tests.oracle.kept_graphs import KeptGraphs
from tests.oracle.mixed_requests import SETTINGS as FEATURES
from tests.oracle.mixed_requests import few_blocks
from tests.oracle.mtp_drafts import (
    GREEDY,
    LONG,
    QUIET,
    TOLERANCE,
    Expected,
    assert_drafts_are_the_heads,
    assert_ranks_draft_as_one,
    mtp,
    recorded_drafts,
    run,
)
from tests.oracle.mtp_reference import with_head
from tests.oracle.running import SMALL, UncompiledGraphs, need_devices, runner_of
from tests.runner.drafted_answers import assert_same, knows, requests
from tests.runner.ringed_cpu import turn_on

ROUNDS: list[dict[str, list[int]]] = [
    {"a-0": [7], "b-1": LONG[20:85], "c-2": LONG},  # one that is cut leaves a snapshot behind 128 tokens
    {"parts behind 100-3": LONG[:100] + LONG[:60]},  # takes one behind 64
    {"parts behind 70-4": LONG[:70] + LONG[20:50], "again-5": LONG},
    {"parts behind 64-6": LONG[:64] + LONG[:40]},  # the pair at the end of the prefix is another one
    {"once more-7": LONG[:90]},
]


@pytest.fixture
def where(request: pytest.FixtureRequest, platform_name: str) -> dict[str, Any]:
    """On a platform that captures by default a test runs twice, with graphs and without."""
    return {"platform": platform_name, "graph_mode": getattr(request, "param", "auto")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "where" in metafunc.fixturenames and metafunc.config.getoption("--platform") != "cpu":
        metafunc.parametrize("where", ["auto", "eager"], indirect=True)


def test_drafts_of_prompts_and_answers_are_those_of_the_definition(checkpoint: Any, tmp_path: Path,
                                                                   where: dict[str, Any]) -> None:
    """Of rows together, whose prompts are cut into chunks; then behind prefixes that the cache has, where others go on
    with other tokens. Of the drafts of a step, which are given here, some are kept. A head that read the state before
    the last norm would give other logits."""
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    prompts = {name: PromptInputs(tokens) for names in ROUNDS for name, tokens in names.items()}
    with LLM(path, **where, max_num_batched_tokens=64, **SMALL) as llm:
        plain = run(llm, prompts)
    with LLM(path, **where, max_num_batched_tokens=64, **mtp(3), **SMALL) as llm:
        knows(llm, [plain[name] for name in sorted(plain, key=lambda name: int(name.rpartition("-")[2]))], 3, 0.3)
        outputs: dict[str, RequestOutput] = {}
        with recorded_drafts(llm) as drafts:
            for names in ROUNDS:
                outputs |= run(llm, {name: prompts[name] for name in names})
        stats = llm.stats()
    assert {name: output.token_ids for name, output in outputs.items()} == {
        name: output.token_ids for name, output in plain.items()}
    assert {name: output.num_cached_tokens for name, output in outputs.items() if output.num_cached_tokens} == {
        "parts behind 70-4": 64, "again-5": 128, "once more-7": 64}
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 10
    assert {draft.number for draft in drafts} == {0, 1, 2}
    assert_drafts_are_the_heads(path, drafts, outputs, {name: (prompt, []) for name, prompt in prompts.items()})
    tokens = [*prompts["b-1"].token_ids, *outputs["b-1"].token_ids]
    raw_V, normed_V = (Expected(path, tokens, [], is_raw=is_raw).logits(20, 0) for is_raw in (True, False))
    assert (raw_V - normed_V).abs().max() > 100 * TOLERANCE * normed_V.abs().max()


def test_a_head_that_agrees_has_its_drafts_kept(checkpoint: Any, tmp_path: Path, where: dict[str, Any]) -> None:
    """Greedy and drawn, with a schema and without; answers are those of plain steps, in fewer of them."""
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head", quiet=QUIET)
    params = [GREEDY.replace(max_tokens=30), GREEDY.replace(temperature=0.7, seed=3, max_tokens=20),
              GREEDY.replace(structured_outputs={"regex": "[a-z]{9,12}(,[0-9]{3})*"}, max_tokens=20, ignore_eos=False),
              GREEDY.replace(repetition_penalty=1.2, max_tokens=20)]
    prompts, found = [PromptInputs(LONG[start : start + 5]) for start in range(len(params))], []
    for settings in ({}, mtp(3)):
        with LLM(path, **where, **settings, **SMALL, block_size=16) as llm:  # where one ends there are fewer drafts
            found.append([output.token_ids for output in llm.generate(prompts, params)])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.num_mtp_drafted > stats.num_mtp_accepted > 20
    assert stats.num_draft_tokens == stats.num_mtp_drafted + stats.num_forced_drafted


@pytest.mark.full("rings that the cpu platform has not; plain steps in them stay (tests/runner/test_rings.py)")
def test_drafts_of_the_head_go_into_rings(checkpoint: Any, tmp_path: Path, platform_name: str,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of drafts lie beside those of slots then."""
    if platform_name != "cpu":
        pytest.skip("a device that has rings has its own")
    turn_on(monkeypatch)
    # Draws are recorded over what is in the buffers of plain graphs: every slot there is one of the pool.
    monkeypatch.setattr(UncompiledGraphs, "recorder", lambda self: lambda run: run)
    where = {"platform": "cpu", "graph_mode": "reduce-overhead"}
    test_a_head_that_agrees_has_its_drafts_kept(checkpoint, tmp_path, where)
    with LLM(tmp_path / "head", **where, **mtp(1), **SMALL) as llm:  # no pass ahead fills the buffers anew
        assert llm.engine.info.graphs != "none"


def test_pictures_are_in_what_the_head_reads(checkpoint: Any, tmp_path: Path, where: dict[str, Any]) -> None:
    """Chunks begin and end inside one, and a prompt ends with one."""
    path = with_head(checkpoint("qwen3_5"), tmp_path / "head")
    with LLM(path, **where, max_num_batched_tokens=64, **mtp(2), **SMALL) as llm:
        (whole, short), images = make_prompts(llm, ["t4t", "t1"])
        end = short.spans[-1].start + short.spans[-1].num_tokens
        positions = short.positions_3T[:, :end]
        cut = replace(short, token_ids=short.token_ids[:end], positions_3T=positions,
                      position_delta=int(positions.max()) + 1 - end)
        with recorded_drafts(llm) as drafts:
            outputs = run(llm, {"whole": whole, "cut": cut})
    first, last = whole.spans[0].start, whole.spans[0].start + whole.spans[0].num_tokens
    assert first < 64 < last
    assert_drafts_are_the_heads(path, drafts, outputs, {"whole": (whole, images[0]), "cut": (cut, images[1])})


def test_plain_steps_and_passes_that_go_on_run_in_graphs(checkpoint: Any, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows, then two, padded to four. Graphs that were kept are compared with eager steps, the head's too."""
    made = KeptGraphs()
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: made)
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    prompts = {f"r-{row}": PromptInputs(LONG[10 * row : 10 * row + 5]) for row in range(3)}
    with LLM(path, platform="cpu", graph_mode="reduce-overhead", graph_batch_sizes=[4, 8], **mtp(3), **SMALL) as llm:
        bucket = runner_of(llm).steps.buckets.find(3)  # type: ignore[union-attr]
        assert bucket is not None
        behind, rows = bucket.behind, list[int]()
        bucket.behind = lambda inputs: (rows.append(len(inputs.positions)), behind(inputs))[1]  # type: ignore[misc]
        with recorded_drafts(llm) as drafts:
            outputs = run(llm, prompts)
        assert set(rows) == {4}
        assert len(rows) > 2 * 3, "pairs of plain steps, and two passes behind those of each step"
    assert made.discarded == []
    assert {draft.number for draft in drafts} == {0, 1, 2}
    assert_drafts_are_the_heads(path, drafts, outputs, {name: (prompt, []) for name, prompt in prompts.items()})


class WrongHeads(KeptGraphs):
    """Those of the head give something else."""

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        graph = super().compile(forward, batch_size)
        is_head = isinstance(forward.__self__, HeadStep)  # type: ignore[attr-defined]
        return (lambda *inputs: graph(*inputs) * 1.1) if is_head else graph


def test_a_kept_graph_of_the_head_that_differs_is_discarded(checkpoint: Any, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    made = WrongHeads()
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: made)
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    with LLM(path, platform="cpu", graph_mode="reduce-overhead", graph_batch_sizes=[4, 8], **mtp(1), **SMALL):
        assert made.discarded == [8, 4]


class NoSmallHeads(KeptGraphs):
    """There is no room for a graph of the head below eight rows."""

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        def refuse(*_: Any) -> Tensor:
            raise GraphResourceError("no room for the head")

        is_head = isinstance(forward.__self__, HeadStep)  # type: ignore[attr-defined]
        return refuse if is_head and batch_size < 8 else super().compile(forward, batch_size)


@pytest.mark.full("two engines; decode graphs without room stay (test_hybrid_models.py)")
def test_a_size_without_room_for_the_heads_graph_has_none(checkpoint: Any, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: NoSmallHeads())
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head", quiet=QUIET)
    prompts = [PromptInputs(LONG[row : row + 5]) for row in range(3)]
    found = []
    for settings in ({"graph_mode": "eager"}, {"graph_mode": "reduce-overhead", "graph_batch_sizes": [4, 8], **mtp(2)}):
        with LLM(path, platform="cpu", **settings, **SMALL) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, GREEDY)])
            graphs = llm.engine.info.graphs
    assert found[0] == found[1]
    assert graphs.startswith("8 (")
    assert "no room for the head" in graphs


@pytest.mark.full("pauses of drafts; drafts of every place stay, and pauses without a head (test_several_tokens.py)")
@pytest.mark.parametrize("ahead", [True, False])
def test_what_no_step_takes_is_not_read_out_and_pairs_stay_whole(ahead: bool, checkpoint: Any, tmp_path: Path,
                                                                 where: dict[str, Any]) -> None:
    """Steps of two rows have no drafts. A row whose drafts are refused has none for 16 tokens; those of later places
    are the head's again. Both kinds of steps run ahead, if they may."""
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    prompts = {"short": PromptInputs(LONG[:5]), "long": PromptInputs(LONG[30:40])}
    settings, num_ahead = {**mtp(1), "async_scheduling": ahead}, 0
    settings["speculative_config"]["num_speculative_tokens_per_batch_size"] = [[2, 8, 0]]
    with LLM(path, **where, **settings, **SMALL) as llm, recorded_drafts(llm) as drafts:
        for name, length in (("short", 6), ("long", 52)):
            llm.engine.add_request(name, prompts[name], GREEDY.replace(max_tokens=length))
        outputs: dict[str, RequestOutput] = {}
        while llm.engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in llm.engine.step()})
            num_ahead += len(llm.engine._under_way)
        assert llm.stats().num_mtp_drafted >= 24
    assert num_ahead > 12 if ahead else not num_ahead
    places = sorted(draft.place for draft in drafts if draft.request_id == "long")
    gaps = [later - place for place, later in pairwise(places)]
    assert places[0] == 9
    assert gaps[0] >= 5, "while there are two rows"
    assert max(gaps[1:]) > 12, "while it pauses"
    assert len(places) > 24 + 2, "also behind the pause"
    assert_drafts_are_the_heads(path, drafts, outputs, {name: (prompt, []) for name, prompt in prompts.items()})


@pytest.mark.full("pictures, experts and Qwen3-Next; text alone stays, and pictures in what the head reads")
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe_text", "qwen3_next"])
def test_drafts_of_other_families_are_those_of_the_definition(model_type: str, checkpoint: Any, tmp_path: Path,
                                                              where: dict[str, Any]) -> None:
    path = with_head(checkpoint(model_type), tmp_path / "head")
    with LLM(path, **where, max_num_batched_tokens=64, **mtp(2), **SMALL) as llm:
        found, images = prompts_of(llm, model_type)
        prompts = {f"r-{index}": prompt for index, prompt in enumerate(found)}
        with recorded_drafts(llm) as drafts:
            outputs = run(llm, prompts)
    assert_drafts_are_the_heads(path, drafts, outputs, {
        name: (prompt, shown) for (name, prompt), shown in zip(prompts.items(), images, strict=True)})


@pytest.mark.full("every field of a request; some fields stay")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5", "qwen3_next"])
def test_every_feature_answers_as_without(model_type: str, checkpoint: Any, tmp_path: Path,
                                          where: dict[str, Any]) -> None:
    """In few blocks: prompts are cut, sequences are preempted, and drafts end where blocks do."""
    path = with_head(checkpoint(model_type), tmp_path / "head", quiet=QUIET)
    few = few_blocks(path, where["platform"])
    settings, found = {**FEATURES, **few}, []
    # Blocks of one layer that attends, then of two.
    for more in ({}, {**mtp(3), **({"kv_cache_bytes": 2 * few["kv_cache_bytes"]} if few else {})}):
        with LLM(path, **where, **{**settings, **more}) as llm:
            pairs = requests(llm, model_type)
            found.append(llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs]))
            stats = llm.stats()
    assert_same(found[1], found[0])
    assert stats.num_mtp_accepted > 0
    assert stats.kv_blocks_used == 0


def test_preempted_and_aborted_sequences_leave_the_head_as_defined(checkpoint: Any, tmp_path: Path,
                                                                   where: dict[str, Any]) -> None:
    """Five rows grow to more blocks than there are; one is aborted on the way."""
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    per_block = 2 * 2 * 16 * 2 * 32 * 4  # k and v, layers that attend and the head's, block, kv heads, head dim, bytes
    prompts = {f"r-{index}": PromptInputs(LONG[index : index + 12]) for index in range(5)}
    params = GREEDY.replace(max_tokens=40)
    with LLM(path, **where, **SMALL) as llm:
        plain = run(llm, prompts, params)
    settings = {**SMALL, "max_model_len": 96, "block_size": 16, "kv_cache_bytes": 14 * per_block}
    with LLM(path, **where, **mtp(3), **settings) as llm:
        assert llm.engine.info.num_blocks == 14
        knows(llm, [plain[name] for name in prompts], 3, 0.2)
        with recorded_drafts(llm) as drafts:
            llm.engine.add_request("r-9", PromptInputs(LONG[:30]), params)
            llm.engine.step()
            llm.engine.step()
            llm.engine.abort_request("r-9")
            outputs = run(llm, prompts, params)
        stats = llm.stats()
    assert {name: output.token_ids for name, output in outputs.items() if name != "r-9"} == {
        name: output.token_ids for name, output in plain.items()}
    assert (stats.num_preemptions > 0, stats.num_accepted_tokens > 20, stats.kv_blocks_used) == (True, True, 0)
    assert_drafts_are_the_heads(path, drafts, outputs, {name: (prompt, []) for name, prompt in prompts.items()})


@pytest.mark.full("two ranks start; one rank stays")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.ranks
def test_two_ranks_draft_as_one(model_type: str, checkpoint: Any, tmp_path: Path, platform_name: str) -> None:
    need_devices(platform_name)
    path = with_head(checkpoint(model_type), tmp_path / "head", quiet=QUIET)
    assert_ranks_draft_as_one(path, platform=platform_name, tensor_parallel_size=2)


def test_what_has_no_head_is_refused_by_name_before_weights_are_read(checkpoint: Any, tmp_path: Path) -> None:
    """A family without one, a checkpoint that was saved without, one of several layers."""
    def opened(path: Path, **settings: Any) -> Any:
        config = RunnerConfig.from_keywords(path, **{"platform": "cpu", **mtp(1), **settings})
        return known_limits(open_checkpoint(config))

    with pytest.raises(ConfigError, match="method mtp: qwen3_vl has no head for multi-token prediction"):
        opened(checkpoint("qwen3_vl"))
    with pytest.raises(ModelError, match=r"has no tensors mtp\.\*: it was saved without"):
        opened(checkpoint("qwen3_5_text"))
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    assert opened(path).speculative.method == "mtp"
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="prediction of 2 layers, or with embeddings of its own, is not served"):
        opened(path)


def test_the_head_is_in_the_ledger_and_is_left_out_without_the_method(checkpoint: Any, tmp_path: Path) -> None:
    path, sizes = with_head(checkpoint("qwen3_5_text"), tmp_path / "head"), []
    for settings in ({}, mtp(2)):
        with LLM(path, platform="cpu", **SMALL, **settings) as llm:
            runner = runner_of(llm)
            assert runner.states is not None
            sizes.append((runner.k_cache.shape[0], runner.states.plan.bytes_per_slot, hasattr(runner.model.mtp, "fc")))
            manifest = llm.engine.describe()
    assert [sizes[1][0] - sizes[0][0], sizes[1][1] - sizes[0][1]] == [1, 64 * 4], "a layer, and a hidden state a slot"
    assert [size[2] for size in sizes] == [False, True]
    assert json.loads(manifest["speculative_config"]) == {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.full("the embedded model draws for seconds; tiny heads stay, whose drafts are those of the definition")
def test_the_head_of_the_embedded_model_keeps_what_it_was_trained_to(platform_name: str) -> None:
    """Short answers and JSON, about drawings that no training saw: 271 of 335 drafts. A head that is read wrong costs
    drafts, and no answer."""
    examples = [draw(seed) for seed in TEST_SEEDS[:12] for draw in (draw_example, draw_json_example)]
    params = SamplingParams(temperature=0.0, max_tokens=80)
    found = []
    for settings in ({}, mtp(2)):
        with LLM("shapes-hybrid", platform=platform_name, dtype="float32", preprocessing_workers=0, **settings) as llm:
            outputs = llm.chat([example.conversation() for example in examples], params)
            found.append([output.token_ids for output in outputs])
            stats = llm.stats()
    assert found[0] == found[1]
    assert 0.78 < stats.num_mtp_accepted / stats.num_mtp_drafted < 0.84
    assert 2.45 < stats.mean_acceptance_length < 2.65
