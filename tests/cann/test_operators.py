"""Operators against torch on the CPU, and every constraint refused with CANN's code."""

import pytest

from .checks import assert_check, check_names, operators_of
from .environment import has_real_cann, run_python
from .setup_site import setup, symbols

pytestmark = pytest.mark.npu

# Programs that compare what they launch with torch on the CPU, and the switches they run under.
COMPARING: dict[str, dict[str, object]] = {
    "fused_operators": {},
    "attention_operators": {"allow_fp32_attention": True},
    "plain_operators": {},
    "rare_operators": {},
    "expert_operators": {},
    "quantised_operators": {}, "grouped_operators": {}, "fractal_operators": {},
    # Without a task queue: ATB's refusals come from the queue's thread, which does nothing after one.
    "second_kernels": {"TASK_QUEUE_ENABLE": "0"},
    # States in float32, which only the newest CANN takes.
    "gated_delta_operators": {"cann_version": "9.2.0"},
}
REFUSING = ("refusals", "expert_refusals")


@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program in COMPARING for name in check_names(program)]
)
def test_operator(program: str, name: str) -> None:
    assert_check(program, name, **COMPARING[program])


@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program in REFUSING for name in check_names(program)]
)
def test_refusal(program: str, name: str) -> None:
    assert_check(program, name)


@pytest.mark.skipif(has_real_cann(), reason="a real CANN is the version that it is")
@pytest.mark.parametrize("name", check_names("old_cann"))
def test_refusal_of_an_older_cann(name: str) -> None:
    assert_check("old_cann", name, cann_version="8.5.0")


@pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts")
@pytest.mark.parametrize("name", check_names("fallbacks"))
def test_operators_that_leave_the_ai_core_are_counted(name: str) -> None:
    assert_check("fallbacks", name)


@pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN can be another version")
def test_a_version_of_cann_whose_limits_nobody_wrote_down_is_refused() -> None:
    done = run_python(["-c", "import torch, torch_npu; torch.ones(1).npu()"], forked=True, cann_version="10.0.0")
    assert done.returncode != 0
    assert "CANN_EMU_CANN_VERSION=10.0.0 is none of 8.5.0, 9.0.0, 9.1.0, 9.2.0" in done.stderr


@pytest.mark.skipif(has_real_cann(), reason="a real CANN has more operators than these programs call")
def test_every_emulated_operator_is_compared() -> None:
    names = symbols(setup() / "libopapi.so", "--defined-only")
    emulated = {name for name in names if name.startswith("aclnn") and f"{name}GetWorkspaceSize" in names}
    compared = set().union(*(operators_of(program, **options) for program, options in COMPARING.items()))
    # torch_npu asks whether these exist and then calls the next version.
    assert emulated - compared == {"aclnnRotaryPositionEmbedding", "aclnnGroupedMatmulV4"}
