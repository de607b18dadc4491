"""Every sampling parameter draws on the npu platform what it draws on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from tests.cann.environment import has_real_cann, run_python
from tests.npu.programs.sampling import draw, draw_wide

pytestmark = pytest.mark.npu


def test_every_parameter_draws_the_same_tokens() -> None:
    count = [] if has_real_cann() else ["--count"]
    done = run_python(["-m", "tests.npu.programs.sampling", *count])
    assert done.returncode == 0, done.stderr[-4000:]
    launches = dict.fromkeys(("aclnnInplaceCopy", "aclnnIndexSelect", "aclnnAdd"), 1) if count else {}
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "tokens": draw(torch.device("cpu")), "masks_on_ai_cpu": {},
        "mask_launches": launches}, "bytes as indices, their look-up, and one sum that also widens 16 bits"


def test_nothing_of_a_wide_vocabulary_leaves_the_ai_core() -> None:
    """Penalties, biases, bans and draws of 16 rows, whose tables are longer than an axis that CANN's kernels take."""
    count = [] if has_real_cann() else ["--count"]
    done = run_python(["-m", "tests.npu.programs.sampling", "--wide", *count])
    assert done.returncode == 0, done.stderr[-4000:]
    wanted = {"tokens": draw_wide(torch.device("cpu")), **({"fallbacks": {}} if count else {})}
    assert json.loads(done.stdout.splitlines()[-1]) == wanted
