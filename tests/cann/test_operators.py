"""Operators against torch on the CPU, and every constraint refused with CANN's code."""

import pytest

from .checks import assert_check, check_names, operators_of
from .environment import has_real_cann
from .setup_site import setup, symbols

pytestmark = pytest.mark.npu

# Programs that compare what they launch with torch on the CPU, and the switches they run under.
COMPARING: dict[str, dict[str, object]] = {
    "fused_operators": {},
    "attention_operators": {"allow_fp32_attention": True},
    "plain_operators": {},
    "rare_operators": {},
}


@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program in COMPARING for name in check_names(program)]
)
def test_operator(program: str, name: str) -> None:
    assert_check(program, name, **COMPARING[program])


@pytest.mark.parametrize("name", check_names("refusals"))
def test_refusal(name: str) -> None:
    assert_check("refusals", name)


@pytest.mark.skipif(has_real_cann(), reason="a real CANN has more operators than these programs call")
def test_every_emulated_operator_is_compared() -> None:
    names = symbols(setup() / "libopapi.so", "--defined-only")
    emulated = {name for name in names if name.startswith("aclnn") and f"{name}GetWorkspaceSize" in names}
    compared = set().union(*(operators_of(program, **options) for program, options in COMPARING.items()))
    # torch_npu asks whether version 1 exists and then calls version 2.
    assert emulated - compared == {"aclnnRotaryPositionEmbedding"}
