"""`npu-runner verify` finds what is wrong in an engine, and no fault in a right one. The network is broken for real."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from npu_runner.batch.check import reference as reference_room
from npu_runner.batch.check import verify as verify_room
from npu_runner.batch.check.reference import Reference
from npu_runner.batch.job.row_server import CheckpointSide
from npu_runner.cli.main import main
from npu_runner.layers.attention import PagedAttention
from npu_runner.layers.rotary import RotaryTable
from npu_runner.platforms.cpu.attention import CpuAttention
from scripts.quantised.writing import quantise
from tests.batch.scripted import completion_row, row, write_rows
from tests.full_set import only_full
from tests.oracle.reference import random_image

Make = Callable[..., Path]
Break = Callable[[nn.Module, pytest.MonkeyPatch], None]
SETTINGS = ["--platform", "cpu", "--max-model-len", "256", "--preprocessing-workers", "1"]


def questions(count: int) -> list[dict[str, Any]]:
    return [row(f"r{n}", f"question {n}: what is {n * 7} and why?", max_tokens=12, temperature=1, top_k=2,
                repetition_penalty=1.3) for n in range(count)]  # fmt: skip


def verified(folder: Path, model: Path, rows: list[Any], *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what --json writes."""
    path, found = write_rows(folder / "rows.jsonl", rows), folder / "found.json"
    found.unlink(missing_ok=True)
    status = main(["verify", "--model", str(model), "--rows", str(path), "--json", str(found), *SETTINGS, *options])
    return status, json.loads(found.read_text()) if found.exists() else {}


def zero_a_row(network: nn.Module, patch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        next(weight for name, weight in network.named_parameters() if "o_proj" in name)[3] = 0


def turn_otherwise(network: nn.Module, patch: pytest.MonkeyPatch) -> None:
    (table,) = (module for module in network.modules() if isinstance(module, RotaryTable))
    with torch.inference_mode():
        table.sin_PH.neg_()


def write_beside(network: nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Of decode steps: a prefill writes all slots anew."""
    write = CpuAttention.write_kv

    def shifted(self: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, slots_T: torch.Tensor) -> None:
        write(self, k, v, k_cache, v_cache, slots_T + 1 if len(slots_T) < 12 else slots_T)

    patch.setattr(CpuAttention, "write_kv", shifted)


def scale_otherwise(network: nn.Module, patch: pytest.MonkeyPatch) -> None:
    for module in network.modules():
        if isinstance(module, PagedAttention):
            module.scale *= 1.1


FAULTS: dict[str, Break] = {"a zeroed row": zero_a_row, "a wrong rotation": turn_otherwise,
                            "a slot off by one": write_beside, "a wrong scale": scale_otherwise}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Break], None]:
    """Have the next engine broken once it has loaded."""
    def prepare(break_it: Break) -> None:
        class Broken(CheckpointSide):
            @contextmanager
            def load(self, *arguments: Any) -> Iterator[Any]:
                with super().load(*arguments) as engine:
                    break_it(engine._executor._runner.model, monkeypatch)
                    yield engine

        monkeypatch.setattr(verify_room, "CheckpointSide", Broken)

    return prepare


@pytest.mark.parametrize("dtype", ["float32", *only_full("a second start; float32 stays", "bfloat16")])
def test_right_rows_are_no_faults(checkpoint: Make, tmp_path: Path, dtype: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*questions(30), row("bad", max_tokens=0), completion_row("raw", "some words")]
    status, found = verified(tmp_path, checkpoint("qwen3"), rows, "--dtype", dtype, "--num", "32")
    assert status == 0
    assert (found["dtype"], found["num_faults"], len(found["rows"])) == (dtype, 0, 31)
    assert list(found["left_out"]) == ["bad"]
    assert all(0 < each["median"] <= found["bounds"]["median"] for each in found["rows"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "reference transformers in float32, from the files"
    assert shown[-1] == "rows      31 compared, 0 faults, 1 left out"
    assert sum(line.startswith("right") for line in shown) == 31


@pytest.mark.parametrize("fault", ["a slot off by one", *only_full(
    "each is a start of its own", *(name for name in FAULTS if name != "a slot off by one"))])
def test_a_fault_is_found_in_every_row(checkpoint: Make, tmp_path: Path, broken: Callable[[Break], None],
                                       fault: str) -> None:
    broken(FAULTS[fault])
    status, found = verified(tmp_path, checkpoint("qwen3"), questions(4), "--dtype", "float32")
    assert (status, found["num_faults"]) == (1, 4)


def test_a_wrong_token_is_a_fault_though_the_median_is_right(checkpoint: Make, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler chooses another token in one step."""
    answer = verify_room._answer

    def with_another(*arguments: Any) -> dict[str, Any]:
        outputs = answer(*arguments)
        token_ids = outputs["r1"].completions[0].token_ids
        token_ids[-1] = token_ids[-1] + 1
        return outputs

    monkeypatch.setattr(verify_room, "_answer", with_another)
    status, found = verified(tmp_path, checkpoint("qwen3"), questions(3), "--dtype", "float32")
    assert status == 1
    assert [(each["is_fault"], each["num_other"], each["median"] < 1e-5) for each in found["rows"]] == [
        (False, 0, True), (True, 1, True), (False, 0, True)]  # fmt: skip


def test_quantised_weights_are_compared_with_our_dequantised_copy(checkpoint: Make, tmp_path: Path) -> None:
    folder = tmp_path / "w4a16"
    quantise(checkpoint("qwen3"), folder, "w4a16", group_size=32)
    status, found = verified(tmp_path, folder, questions(3), "--dtype", "float32")
    assert (status, found["num_faults"], len(found["rows"])) == (0, 0, 3)
    assert found["reference"] == "transformers in float32, from our dequantised copy (compressed-tensors)"


def with_image(name: str, width: int, height: int) -> dict[str, Any]:
    file = io.BytesIO()
    random_image(np.random.default_rng(1), width, height).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    shown = row(name, max_tokens=8)
    shown["body"]["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": url}},
                                               {"type": "text", "text": "what is it?"}]  # fmt: skip
    return shown


def test_images_are_compared_and_what_the_reference_resizes_is_left_out(checkpoint: Make, tmp_path: Path) -> None:
    rows = [with_image("image", 90, 60), with_image("large", 400, 300), *questions(1)]
    more = ["--dtype", "float32", "--image-max-pixels", "131072"]
    status, found = verified(tmp_path, checkpoint("qwen3_vl"), rows, *more)
    assert (status, [each["name"] for each in found["rows"]]) == (0, ["image", "r0"])
    assert found["rows"][0]["median"] < 1e-5
    assert "transformers resizes the row's images again" in found["left_out"]["large"]


def test_why_no_row_can_be_compared_is_a_sentence(checkpoint: Make, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(tmp_path, checkpoint("qwen3"), [row("bad", max_tokens=0)])[0] == 2
    assert "verify: no row can be compared; 'bad' is left out: max_tokens" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused_before_a_model_loads(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint("qwen3")
    need = Reference(path, None).num_bytes
    assert need == 4 * sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())

    class Full:
        class memory:
            @staticmethod
            def free_bytes() -> int:
                return need - 1

    monkeypatch.setattr(CheckpointSide, "load", None)
    assert verified(tmp_path, path, questions(1), "--load-format", "dummy")[0] == 2
    assert "random weights" in capsys.readouterr().err
    monkeypatch.setattr(reference_room, "reference_platform", lambda: Full)
    assert verified(tmp_path, path, questions(1))[0] == 2
    assert f"needs {need} bytes" in (said := capsys.readouterr().err)
    assert f"{need - 1} (" in said
    for option in ("--num", "--max-tokens"):
        assert verified(tmp_path, path, questions(1), option, "0")[0] == 2
        assert f"{option}: 0 is not a positive number" in capsys.readouterr().err
