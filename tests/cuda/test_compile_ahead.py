"""A start compiles its kernels side by side, all that it needs, and hides nothing that goes wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="compiles nothing: triton is not installed, or interprets")

# Prefills and decode steps, graphs among them, of other sizes than the one that was gone through ahead.
_PROGRAM = """
import json, sys
import npu_runner.runner.model_runner as model_runner
from npu_runner import LLM
from npu_runner.platforms.cuda import compile_ahead
settings = json.loads(sys.argv[2])
with LLM(sys.argv[1], platform="cuda", attention_backend="triton", **settings) as llm:
    runner = llm.engine._executor._runner
    for batch_size in (1, 3, 8):
        runner.dummy_run(200, batch_size, expected_decode_len=3)
    print(json.dumps([sum(compile_ahead._num_variants().values()), runner._compiled_late()]))
"""


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_vl", "qwen3_5_moe"])
def test_a_small_step_meets_every_variant_that_a_start_needs(
        model_type: str, settings: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path,
        platform_name: str) -> None:
    if platform_name != "cuda":
        pytest.skip("needs a GPU (--platform cuda)")
    settings = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512, **settings}
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(checkpoint(model_type)), json.dumps(settings)],
                          env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    num_variants, late = json.loads(done.stdout.splitlines()[-1])
    assert num_variants > 5
    assert late == []


class Compiler:
    """Stands in for triton's: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.error: Exception | None = None

    def run(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        self.asked.append((kernel.fn.__name__, warmup))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(run=print)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    from triton.runtime.jit import JITFunction

    found = Compiler()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *arguments, **rest: found.run(kernel, *arguments, **rest))
    return found


def _activate(num_tokens: int, dtype: torch.dtype, width: int = 32) -> torch.Tensor:
    from npu_runner.platforms.cuda.ops import TritonOps

    return TritonOps().silu_and_mul(torch.ones((num_tokens, 2 * width), dtype=dtype))


def test_what_is_met_is_compiled_once_a_variant_and_not_launched(compiler: Compiler) -> None:
    from npu_runner.platforms.cuda.compile_ahead import compile_ahead

    left = []

    def run() -> None:
        left.extend(_activate(num_tokens, dtype) for dtype in (torch.float32, torch.bfloat16) for num_tokens in (3, 5))
        _activate(3, torch.float32, width=24)  # a width that 16 does not divide

    entered = []
    late = compile_ahead(run, lambda: entered.append(1))
    assert compiler.asked == 3 * [("_silu_and_mul", True)]
    assert entered
    assert all(not tensor.any() for tensor in left)
    assert late() == []


def test_constants_are_told_apart_however_they_are_given(compiler: Compiler) -> None:
    import triton

    from npu_runner.platforms.cuda.compile_ahead import compile_ahead

    kernel = triton.jit(_constant)
    kernel.module = "npu_runner.platforms.cuda.a_kernel"

    def run() -> None:
        for constant in (16, 32, 32):
            kernel[(1,)](7, constant)
            kernel[(1,)](9, constant, num_warps=8)

    compile_ahead(run, lambda: None)
    assert compiler.asked == 4 * [("_constant", True)]


def test_launches_go_on_as_before_afterwards(compiler: Compiler) -> None:
    from npu_runner.platforms.cuda.compile_ahead import compile_ahead

    compile_ahead(lambda: _activate(3, torch.float32), lambda: None)
    _activate(3, torch.float32)
    assert compiler.asked == [("_silu_and_mul", True), ("_silu_and_mul", False)]


def test_who_serves_meanwhile_goes_on(compiler: Compiler) -> None:
    from npu_runner.platforms.cuda.compile_ahead import compile_ahead

    def run() -> None:
        other = threading.Thread(target=_activate, args=(3, torch.float32))
        other.start()
        other.join()

    compile_ahead(run, lambda: None)
    assert compiler.asked == [("_silu_and_mul", False)]


@pytest.mark.parametrize("fails", ["compiler", "step"])
def test_what_goes_wrong_is_raised(compiler: Compiler, fails: str) -> None:
    from npu_runner.platforms.cuda.compile_ahead import compile_ahead

    def run() -> None:
        _activate(3, torch.float32)
        if fails == "step":
            raise ValueError("no such step")

    compiler.error = ValueError("no such instruction") if fails == "compiler" else None
    with pytest.raises(ValueError, match="no such"):
        compile_ahead(run, lambda: None)
    compiler.error = None
    _activate(3, torch.float32)
    assert compiler.asked[-1] == ("_silu_and_mul", False)


def test_nothing_is_compiled_before_what_all_share_is_there(compiler: Compiler) -> None:
    from npu_runner.platforms.cuda.compile_ahead import compile_ahead

    prepared: Future[None] = Future()

    def run() -> None:
        _activate(3, torch.float32)
        time.sleep(0.05)
        assert compiler.asked == []
        prepared.set_exception(ValueError("no C compiler"))

    with pytest.raises(ValueError, match="no C compiler"):
        compile_ahead(run, lambda: None, prepared)
    assert compiler.asked == []


def test_kernels_of_others_are_launched(compiler: Compiler) -> None:
    import triton

    from npu_runner.platforms.cuda.compile_ahead import compile_ahead

    foreign = triton.jit(_foreign)
    compile_ahead(lambda: foreign[(1,)](1), lambda: None)
    assert compiler.asked == [("_foreign", False)]


def _foreign(number):  # type: ignore[no-untyped-def]
    pass


def _constant(number, CONSTANT: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: F821
    pass


def test_threads_give_each_kernel_its_own_launcher(platform_name: str, device: torch.device) -> None:
    """Launchers that were loaded before share one module in CPython. A wrong one has another number of arguments."""
    if platform_name != "cuda":
        pytest.skip("needs a GPU (--platform cuda)")
    from npu_runner.platforms.cuda.compile_ahead import compile_ahead
    from npu_runner.platforms.cuda.sampling import sample
    sample.compile_all(1000, device)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            for kernel in (sample._sum_blocks, sample._sample_rows):
                kernel.device_caches.clear()
            compile_ahead(lambda: sample.compile_all(1000, device), lambda: torch.cuda.set_device(device))
            sample.compile_all(1000, device)
    finally:
        sys.setswitchinterval(interval)
