"""Cases of models of int8 on the npu platform, and how far their logits may be from float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.cann.environment import run_python
from tests.npu.running import SMALL

SIZES = {"head_dim": 64, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 4,
         "moe_intermediate_size": 64}
"""Each token sees all experts: rounding would choose others."""
LIMIT = 2.0
PROMPT, COUNT = [3, 17, 5, 40, 11, 29, 8], 6
DENSE = {"head_dim": 64, "num_hidden_layers": 1}
MODES: list[dict[str, Any]] = [
    {"graph_mode": "eager"}, {"graph_mode": "reduce-overhead", "graph_batch_sizes": [2]},
]
# In a process of its own: torch_npu cannot load both of its compilers in one.
GRAPH_ENGINE = [{"graph_mode": "max-autotune", "graph_batch_sizes": [2], "use_graph_cache": False}]


def run(cases: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    (folder / "spec.json").write_text(json.dumps({"cases": cases}))
    done = run_python(["-m", "tests.npu.programs.int8", str(folder / "spec.json"), str(folder / "found.pt")],
                      timeout=900)
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = torch.load(folder / "found.pt")
    return found


def case(model: Path, *, prompt: list[int] | None = PROMPT, **settings: Any) -> dict[str, Any]:
    given = {} if prompt is None else {"prompt": prompt}
    return {"model": str(model), "settings": {**SMALL, "dtype": "bfloat16", **settings}, "count": COUNT, **given}


def assert_near(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    ours, theirs = ((x.double() - exact).abs().max().item() for x in (found, plain))
    assert ours <= LIMIT * theirs, f"{ours:.3e} from float64, plain torch {theirs:.3e}"


@torch.inference_mode()
def logits(model: nn.Module, tokens: list[int], prompt: list[int] = PROMPT, **images: Tensor) -> Tensor:
    """(count, V), of each token that was chosen."""
    inputs = images or {"input_ids": torch.tensor([prompt + tokens[:-1]])}
    return model(**inputs).logits[0, len(prompt) - 1:]


def distance(found: list[Any], exact: list[Any]) -> float:
    """The largest difference of a first token's logprobs, of those that both name."""
    pairs = [(ours[0], theirs[0]) for ours, theirs in zip(found, exact, strict=True)]
    assert all(len(set(ours) & set(theirs)) > 10 for ours, theirs in pairs)
    return max(abs(ours[token] - theirs[token]) for ours, theirs in pairs for token in set(ours) & set(theirs))
