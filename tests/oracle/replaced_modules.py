"""Which modules of transformers are replaced by ours in a running model, and in which family by docs/generic.md."""

from __future__ import annotations

import re
from pathlib import Path

from npu_runner import LLM
from npu_runner.layers.norm import RMSNorm
from npu_runner.models.transformers_fusion import FusedAttention, FusedLayer, FusedMLP
from tests.oracle.running import runner_of

KINDS = {"layers": FusedLayer, "attention": FusedAttention, "MLP": FusedMLP, "norms": RMSNorm}
_TABLE = re.search(r"\| replaced by ours \| families \|\n\|---\|---\|\n(.*?)\n\n", (
    Path(__file__).parents[2] / "docs" / "generic.md").read_text(), re.DOTALL)
assert _TABLE is not None, "docs/generic.md has the table"
IN_DOCS = {family: kinds for line in _TABLE[1].splitlines() for kinds, families in [line.strip("| ").split(" | ")]
           for family in re.findall(r"`(.*?)`", families)}
"""The kinds, as the table has them, by family."""


def counts(llm: LLM) -> dict[str, int]:
    """The modules of each kind that there are."""
    modules = list(runner_of(llm).model.modules())
    found = {name: sum(isinstance(module, kind) for module in modules) for name, kind in KINDS.items()}
    return {name: count for name, count in found.items() if count}


def kinds(llm: LLM) -> str:
    """As the table has them."""
    return ", ".join(counts(llm)) or "nothing"
