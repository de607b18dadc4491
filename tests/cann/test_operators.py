"""Operators against torch on the CPU, and every constraint refused with CANN's code."""

import pytest

from .checks import assert_check, check_names

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("name", check_names("fused_operators"))
def test_fused_operator(name: str) -> None:
    assert_check("fused_operators", name)


@pytest.mark.parametrize("name", check_names("attention_operators"))
def test_attention(name: str) -> None:
    assert_check("attention_operators", name, allow_fp32_attention=True)


@pytest.mark.parametrize("name", check_names("plain_operators"))
def test_plain_operator(name: str) -> None:
    assert_check("plain_operators", name)


@pytest.mark.parametrize("name", check_names("refusals"))
def test_refusal(name: str) -> None:
    assert_check("refusals", name)
