"""What a start with quantised weights says, refuses and puts into a manifest; what the commands say that only look."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.batch.files.fingerprint import fingerprint_model
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.cli.main import main
from npu_runner.engine.bounds import settings_before_loading
from npu_runner.errors import ConfigError, OutOfMemoryError, WeightsError
from npu_runner.platforms import pick_platform
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.runner.memory import weights_bytes
from npu_runner.strategies import open_checkpoint
from scripts.quantised.writing import quantise
from tests.oracle.running import SMALL, greedy, runner_of

SAYS = "fp8, dequantised at load, inputs not quantised"
ANYWHERE = (f"{SAYS}; on cuda: fp8, fp8 with 8-bit inputs multiplied as fp8, inputs rounded by row or by groups of "
            "128; other weights dequantised at load, inputs not quantised")


@pytest.fixture
def quantised(checkpoint: Any, tmp_path: Path) -> Path:
    quantise(checkpoint("qwen3"), tmp_path / "quantised", "fp8-block", group_size=32)
    return tmp_path / "quantised"


def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read", "read_block"):
        monkeypatch.setattr(CheckpointReader, name, lambda *_: pytest.fail("a weight is read"))


def test_a_start_without_memory_for_dequantised_weights_is_refused(quantised: Path, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    no_weights(monkeypatch)
    memory = pick_platform("cpu").memory
    with LLM(quantised, platform="cpu", load_format="dummy", **SMALL) as llm:
        need = sum(tensor.nbytes for tensor in llm.engine._executor._runner.model.parameters())  # type: ignore[attr-defined]
    monkeypatch.setattr(type(memory), "free_bytes", lambda self: need // 2)
    with pytest.raises(OutOfMemoryError, match=r"quantised \(fp8\) and take .* in float32, .* forms only: none of"):
        LLM(quantised, platform="cpu", **SMALL)


def test_int8_that_a_platform_cannot_multiply_is_refused(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_weights(monkeypatch)
    monkeypatch.setattr(CpuPlatform, "rounds_weights", False)
    with pytest.raises(ConfigError, match="quantization 'int8': platform cpu has no matmuls for such weights with "
                                          "inputs of float32"):
        LLM(quantised, platform="cpu", quantization="int8", **SMALL)
    with pytest.raises(ConfigError, match="quantization: 'int4' is not one of auto, int8, fp8"):
        LLM(quantised, platform="cpu", quantization="int4", **SMALL)


def with_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu platform as one that multiplies int8, whatever the dtype."""
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: ("int8",))


def test_a_start_that_would_fit_as_int8_says_so(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_products(monkeypatch)
    with LLM(quantised, platform="cpu", quantization="int8", **SMALL) as llm:
        need = weights_bytes(runner_of(llm).model)
    no_weights(monkeypatch)
    monkeypatch.setattr(type(pick_platform("cpu").memory), "free_bytes", lambda self: need)
    with pytest.raises(OutOfMemoryError, match="To load it, set quantization to int8, raise tensor_parallel_size"):
        LLM(quantised, platform="cpu", **SMALL)
    monkeypatch.setattr(type(pick_platform("cpu").memory), "free_bytes", lambda self: need - 1)
    with pytest.raises(OutOfMemoryError, match="To load it, raise tensor_parallel_size"):
        LLM(quantised, platform="cpu", **SMALL)


def test_int8_bytes_are_counted_before_and_after_loading(checkpoint: Any, tmp_path: Path, capsys: Any,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 twin less what its int8 linears save: three bytes a value, and a scale of four a row."""
    plain = checkpoint("qwen3")
    quantise(plain, tmp_path / "w8a8", "w8a8", group_size=8)
    with CheckpointReader(tmp_path / "w8a8") as reader:
        shapes = [reader.shape(name) for name in reader.names if reader.dtype(name) == "I8"]
    saved = sum(rows * (columns - 4) for rows, columns in shapes)
    asked = ["doctor", "--device-memory", "64G", "--platform", "npu", "--max-model-len", "1024", "--dtype", "bfloat16",
             "--json", "--fits"]
    found = []
    for arguments in ([str(plain)], [str(tmp_path / "w8a8")], [str(plain), "--quantization", "int8"]):
        assert main([*asked, *arguments]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["weights_bytes"] - saved == found[1]["weights_bytes"] == found[2]["weights_bytes"]
    assert found[1]["quantization"].startswith("compressed-tensors, int8 with dynamic and static inputs multiplied")
    with_products(monkeypatch)
    with LLM(plain, platform="cpu", **SMALL) as llm:
        whole = weights_bytes(runner_of(llm).model)
    saved = sum(rows * (3 * columns - 4) for rows, columns in shapes)
    for model, settings in ((tmp_path / "w8a8", {}), (plain, {"quantization": "int8"}),
                            (plain, {"quantization": "int8", "load_format": "dummy"})):
        with LLM(model, platform="cpu", **SMALL, **settings) as llm:
            assert weights_bytes(runner_of(llm).model) == whole - saved
            assert llm.generate(["which"], greedy(2))[0].token_ids


def test_a_format_that_is_not_the_checkpoints_is_refused(quantised: Path, checkpoint: Any,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's `quantization` names what the files say, or nothing is loaded."""
    no_weights(monkeypatch)
    with pytest.raises(ConfigError, match=r"quantization='awq' is not served: the .* weights are quantised as fp8"):
        LLM(quantised, platform="cpu", quantization="awq", **SMALL)
    with pytest.raises(ConfigError, match=r"quantization='ascend' is not served: the .* weights are not quantised"):
        LLM(checkpoint("qwen3"), platform="cpu", quantization="ascend", **SMALL)


def test_a_start_says_what_is_dequantised_and_an_output_in_which_arithmetic(
        quantised: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), LLM(quantised, platform="cpu", **SMALL) as llm:
        assert llm.engine.describe()["quantization"] == SAYS
    (line,) = [each for each in caplog.messages if each.startswith("quantised weights")]
    assert line.startswith("quantised weights (fp8): 21 as fp8 by block of 32 x 32; ")
    assert "of float32 while loading, and inputs are not quantised" in line


def test_a_shard_that_is_cut_is_named(quantised: Path, tmp_path: Path) -> None:
    path: Path = shutil.copytree(quantised, tmp_path / "cut")
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="cannot be read"):
        LLM(path, platform="cpu", **SMALL)


def test_the_commands_that_only_look_say_how_it_is_served(
        quantised: Path, checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(quantised)]) == 0
    said = f"; quantised weights (21 as fp8 by block of 32 x 32): {SAYS}\n"
    assert capsys.readouterr().out.endswith(said), "no product takes blocks of 32 x 32"
    assert main(["models", str(quantised / "config.json")]) == 0
    assert capsys.readouterr().out.endswith(f"; quantised weights: {ANYWHERE}\n")
    asked = ["doctor", "--device-memory", "64G", "--platform", "npu", "--max-model-len", "1024", "--fits"]
    assert main([*asked, str(quantised)]) == 0
    assert f"  weights are {SAYS}\n" in capsys.readouterr().out
    assert main([*asked, str(quantised), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*asked, str(checkpoint("qwen3")), "--json"]) == 0
    assert found == json.loads(capsys.readouterr().out) | {"quantization": SAYS}, "as its twin that is not quantised"


def test_what_is_said_is_made_of_the_weights_and_not_of_the_format(
    checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 128 x 128 have a product and those of 32 x 32 have none; int8 by row has no integers of 4 bits."""
    for name, form, size in (("small", "fp8-block", 32), ("large", "fp8-block", 128), ("rows", "w8a8", 8)):
        quantise(checkpoint("qwen3"), tmp_path / name, form, group_size=size)
        assert main(["models", str(tmp_path / name)]) == 0
    small, large, rows = capsys.readouterr().out.splitlines()
    assert "multiplied as fp8" not in small
    assert "on cuda: fp8, fp8 with 8-bit inputs multiplied as fp8" in large
    assert "on npu: compressed-tensors, int8 with dynamic inputs multiplied as int8; other weights" in rows
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: ("int8", "fp8", "fp8_blocks", "grouped"))
    for name, said in (("small", SAYS), ("rows", "compressed-tensors, int8 with dynamic inputs multiplied as int8; "
                                                 "other weights dequantised at load, inputs not quantised")):
        with LLM(tmp_path / name, platform="cpu", **SMALL) as llm:
            assert llm.engine.describe()["quantization"] == said
            assert settings_before_loading(open_checkpoint(llm.config))["quantization"] == said


@pytest.mark.parametrize("name", ["quant_model_description.json", "quantize_config.json"])
def test_another_description_of_the_weights_is_another_model(name: str, quantised: Path) -> None:
    (quantised / name).write_text("{}")
    before = fingerprint_model(quantised)
    (quantised / name).write_text('{"group_size": 64}')
    after = fingerprint_model(quantised)
    assert {each for each in before if before[each] != after[each]} == {name}


def test_random_weights_of_a_format_whose_tensors_say_their_form_are_refused(checkpoint: Any, tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be held in 16 bits, and a benchmark of them would say nothing."""
    quantise(checkpoint("qwen3"), tmp_path / "packed", "w4a16", group_size=32)
    with LLM(tmp_path / "packed", platform="cpu", load_format="dummy", **SMALL) as llm:
        assert llm.generate(["a"], greedy(2))[0].token_ids
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: ("grouped",))
    with pytest.raises(ConfigError, match="load_format 'dummy': which weights of compressed-tensors are held how"):
        LLM(tmp_path / "packed", platform="cpu", load_format="dummy", **SMALL)
