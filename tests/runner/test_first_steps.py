"""What somebody meets who comes from vLLM or works in a notebook: imports, remedies, short texts, a bar."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import npu_runner
from npu_runner import LLM, SamplingParams, inputs, outputs, sampling_params
from npu_runner.errors import EngineDeadError, RequestError
from npu_runner.request.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from tests.oracle.running import SMALL, greedy

ASKED = [{"type": "image_url", "image_url": {"url": "empty.png"}}, {"type": "text", "text": "what colour?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "empty.png").touch()
    Image.new("RGB", (64, 64), "red").save(folder / "red.png")
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Any, folder: Path, platform_name: str) -> Iterator[LLM]:
    with LLM(checkpoint("qwen3_vl"), platform=platform_name, allowed_local_media_path=str(folder),
             preprocessing_workers=0, kv_cache_bytes="64M", max_media_bytes=2000, **SMALL) as llm:
        yield llm


def test_names_are_where_vllm_has_them(llm: LLM) -> None:
    assert sampling_params.SamplingParams is SamplingParams
    assert outputs.RequestOutput is RequestOutput
    for prompt in (inputs.TextPrompt(prompt="a red circle"), inputs.TokensPrompt(prompt_token_ids=[5, 6])):
        (output,) = llm.generate(prompt, greedy(1))
        assert isinstance(output.outputs[0], outputs.CompletionOutput)


@pytest.mark.parametrize(("name", "remedy"), [
    ("best_of", "n answers are generated"), ("use_beam_search", "there is no beam search"),
    ("guided_decoding", "StructuredOutputsParams"), ("logits_processors", "logit_bias"),
    ("output_kind", "stream_results"),
])
def test_a_field_of_vllm_that_is_not_served_names_what_to_do(name: str, remedy: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: .*{remedy}"):
        SamplingParams(**{name: 3})
    with pytest.raises(TypeError):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


def test_a_field_of_params_given_to_a_call_says_where_it_belongs(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"give SamplingParams\(temperature=\.\.\.\)"):
        llm.generate(["a"], temperature=0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"give PoolingParams\(dimensions=\.\.\.\)"):
        llm.chat([{"role": "user", "content": "a"}], dimensions=8)  # type: ignore[call-overload]


def test_the_folder_of_images_is_a_setting_and_a_call_may_name_another(llm: LLM, folder: Path, tmp_path: Path) -> None:
    red = [{"role": "user", "content": [{"type": "image", "image": "red.png"}, ASKED[1]]}]
    assert llm.chat(red, greedy(2))[0].token_ids == llm.chat(red, greedy(2), allowed_media_dir=folder)[0].token_ids
    with pytest.raises(RequestError, match="no such file below"):
        llm.chat(red, greedy(2), allowed_media_dir=tmp_path)


def test_an_error_about_an_image_names_its_file(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]\.image_url: 'empty\.png': the image has zero"):
        llm.chat([{"role": "user", "content": ASKED}], greedy(1))
    Image.effect_noise((64, 64), 90).save(folder / "large.png")
    large = [{"type": "image_url", "image_url": {"url": "large.png"}}, ASKED[1]]
    with pytest.raises(RequestError, match=r"'large\.png' is larger than 2000 bytes"):
        llm.chat([{"role": "user", "content": large}], greedy(1))


def test_what_a_notebook_prints_is_a_line(llm: LLM) -> None:
    (output,) = llm.generate("a red circle " * 20, greedy(4))
    text = output.text if len(output.text) <= 60 else output.text[:57] + "..."
    assert repr(output) == (f"RequestOutput(request_id={output.request_id!r}, text={text!r}, finish_reason='length', "
                            f"num_prompt_tokens={output.num_prompt_tokens}, num_outputs=1)")
    refused = RequestOutput("request-7", [CompletionOutput(0, "", [], "error", error="why")])
    failed = EmbeddingRequestOutput.from_output(refused)
    assert repr(failed) == "EmbeddingRequestOutput(request_id='request-7', error='why', num_prompt_tokens=0)"
    assert repr(llm) == f"LLM({llm.config.model!r}, platform={llm.config.platform!r})"


def test_a_call_of_a_closed_model_says_how_it_came_to_be_closed(checkpoint: Any, platform_name: str) -> None:
    with LLM(checkpoint("qwen3"), platform=platform_name, kv_cache_bytes="64M", **SMALL) as llm:
        pass
    with pytest.raises(EngineDeadError, match=r"by close\(\), at the end of a with block"):
        llm.generate("a", greedy(1))


NOTEBOOK = """
import sys
from npu_runner.serving.loading_line import on_terminal, shows_progress
with on_terminal() as progress:
    progress("loading weights")
print(shows_progress(sys.stderr), shows_progress(None))
"""


@pytest.mark.full("a kernel of Jupyter starts; without one a bar is shown on a terminal alone (test_before_loading.py)")
def test_a_kernel_of_jupyter_shows_the_loading_line() -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        shown: list[dict[str, Any]] = []
        reply = client.execute_interactive(NOTEBOOK, timeout=120, output_hook=lambda message: shown.append(message))
        assert reply["content"]["status"] == "ok"
        written = {name: "".join(message["content"]["text"] for message in shown
                                 if message["msg_type"] == "stream" and message["content"]["name"] == name)
                   for name in ("stdout", "stderr")}
        assert written["stdout"] == "True False\n"
        assert "loading weights" in written["stderr"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


PROGRAM = """
from npu_runner import LLM, SamplingParams
from npu_runner.outputs import RequestOutput

def answer(llm: LLM) -> list[RequestOutput]:
    return llm.generate("a", SamplingParams(temperature=0))

reveal_type(answer)
SamplingParams(temprature=0)
"""


def test_an_editable_installation_is_a_plain_path() -> None:
    """Type checkers and editors follow no import hook."""
    (path,) = Path(sysconfig.get_path("purelib")).glob("__editable__*npu_runner*.pth")
    assert path.read_text().split() == [str(Path(npu_runner.__file__).parents[1])]


@pytest.mark.full("mypy reads the whole package, for 40 seconds; that the installation is a plain path stays")
def test_a_type_checker_finds_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "program.py"],
        cwd=tmp_path, capture_output=True, text=True)
    assert "Cannot find implementation" not in checked.stdout
    assert "def (llm: npu_runner.llm.LLM) -> list[npu_runner.request.outputs.RequestOutput]" in checked.stdout
    assert 'Unexpected keyword argument "temprature"' in checked.stdout
