"""The cases of this platform's operators: those of the doctor, and the few of a model's start (platforms/cases.py).

Operators that every model calls, and those of sampling, are here; others in attention_cases.py and weight_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from npu_runner.platforms.cases import BOUNDS, Case, Side
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.platforms.grouped import GROUPED
from npu_runner.platforms.npu import rank_cases
from npu_runner.platforms.npu.attention_cases import attention, replay, soak, tower
from npu_runner.platforms.npu.kernels import KERNELS
from npu_runner.platforms.npu.platform import NpuPlatform
from npu_runner.platforms.npu.weight_cases import (
    experts,
    experts_behind,
    grouped,
    int8_behind,
    quantised,
    states,
    states_behind,
)
from npu_runner.platforms.platform import ModelNeeds

Call = Callable[[], Tensor]

_TOKENS, _LOGITS, _VOCABULARY = 37, 9, 151_936
_EPS = 1e-6


def operators(asked: None) -> list[Case]:
    """The doctor's, each by itself: shapes of models in use, then narrow ones."""
    return [
        *(case for dtype in ("bfloat16", "float16") for case in _of_every_model(dtype)),
        *(case for heads in ((32, 8, 128), (16, 16, 128), (14, 2, 64), (16, 2, 256)) for case in attention(*heads)),
        *(case for head_dim in (64, 72, 80) for case in tower(16, head_dim)),
        *quantised(2048, 6144), *grouped(2048, 6144),
        *(case for width in (768, 64, 96, 48) for case in experts(8, 4, 1024, width)),
        *states(GatedDeltaShape(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)),
        *_sampling(),
    ]


def graphs_and_ranks(soak_minutes: float) -> list[Case]:
    """The doctor's, which take longer: captured graphs, collectives; last, replays for so long."""
    return [
        *(case for num_rows in (1, 8, NpuPlatform.defaults.max_num_seqs) for case in _graphs(num_rows)),
        *rank_cases.served(),
        *([soak(soak_minutes)] if soak_minutes else []),
    ]


def _graphs(num_rows: int) -> Iterator[Case]:
    heads = 16, 8, 128
    yield replay(*heads, num_rows=num_rows)
    for kind, behind in {"int8": int8_behind, "experts": experts_behind, "states": states_behind}.items():
        yield replay(*heads, num_rows=num_rows, kind=kind, behind=behind)
    yield from _drafts(*heads, num_rows=num_rows, drafts=3)


def _drafts(*shape: Any, drafts: int, **asked: Any) -> list[Case]:
    return [replay(*shape, drafts=drafts, kernel=kernel, **asked) for kernel in KERNELS["drafts"] if drafts]


def of_model(asked: dict[str, Any]) -> list[Case]:
    """The few of a model's start. `asked`: the fields of its ModelNeeds."""
    needs = ModelNeeds(**{**asked, "states": asked["states"] and GatedDeltaShape(**asked["states"])})
    if needs.dtype not in BOUNDS:
        return []
    heads, dtype = (needs.num_heads, needs.num_kv_heads, needs.head_dim), needs.dtype
    found = [_add_norm(needs.hidden_size, dtype), *attention(*heads, dtype, needs.windows, needs.num_drafts)]
    if needs.tower is not None:
        found += tower(*needs.tower, dtype)
    if needs.mlp_width is not None:
        found += [case for case in quantised(needs.hidden_size, needs.mlp_width, dtype)
                  if case.gives_up in needs.forms]
        found += grouped(needs.hidden_size, needs.mlp_width, dtype) if GROUPED in needs.forms else []
    if needs.experts is not None:
        count, top_k, width = needs.experts
        found += [case for case in experts(min(count, 16), min(top_k, 16), needs.hidden_size, width, dtype)
                  if case.gives_up in ("", *needs.forms)]
    if needs.states is not None:
        found += states(needs.states, dtype)
    if needs.graph_mode == "reduce-overhead":
        found.append(replay(*heads, dtype))
        found += _drafts(*heads, dtype, drafts=needs.num_drafts)
    return found


# -- what every model does ---------------------------------------------------------------------------------------------


def _of_every_model(dtype: str) -> Iterator[Case]:
    hidden, width = 4096, 12288  # of Qwen3-8B

    def linear(side: Side) -> Call:
        return partial(side.ops.linear, side.random(_TOKENS, hidden, seed=1),
                       side.random(2048, hidden, seed=2, scale=hidden**-0.5), None)

    def norm(side: Side) -> Call:
        weight = 1 + side.random(hidden, seed=3, scale=0.1)
        return partial(side.ops.rms_norm, side.random(_TOKENS, hidden, seed=1), weight, _EPS)

    def swiglu(side: Side) -> Call:
        return partial(side.ops.silu_and_mul, side.random(_TOKENS, 2 * width, seed=5))

    yield Case(name=f"linear, {hidden} to 2048", prepare=linear, dtype=dtype)
    yield Case(name=f"npu_rms_norm, {hidden}", prepare=norm, dtype=dtype)
    yield _add_norm(hidden, dtype)
    yield Case(name=f"npu_swiglu, {width}", prepare=swiglu, dtype=dtype)


def _add_norm(hidden: int, dtype: str) -> Case:
    def prepare(side: Side) -> Call:
        given = side.random(_TOKENS, hidden, seed=1), side.random(_TOKENS, hidden, seed=4)
        weight = 1 + side.random(hidden, seed=3, scale=0.1)
        return lambda: torch.cat(side.ops.add_rms_norm(*given, weight, _EPS), dim=1)

    return Case(name=f"npu_add_rms_norm, {hidden}", prepare=prepare, dtype=dtype)


# -- sampling ----------------------------------------------------------------------------------------------------------


def _sampling() -> Iterator[Case]:
    """In the sizes of a job. What is decided by one rounding is compared by the values that it decides between."""

    def logits(side: Side) -> Tensor:
        return side.random(_LOGITS, _VOCABULARY, seed=60).float()

    def prepare(call: Callable[[Side, Tensor], Tensor], side: Side) -> Call:
        return partial(call, side, logits(side))

    of_logits: dict[str, Callable[[Side, Tensor], Tensor]] = {
        "argmax and gather": lambda side, rows: rows.gather(1, rows.argmax(-1, keepdim=True)),
        "topk of 64": lambda side, rows: rows.topk(64, dim=-1).values,
        "sort": lambda side, rows: side.ops.sort_ascending(rows),
        "cumsum of int32": lambda side, rows: rows.abs().int().cumsum(-1, dtype=torch.int32),
    }

    def count(side: Side) -> Call:
        table = side.put(torch.zeros(256 * _VOCABULARY))
        places = side.put(torch.arange(_LOGITS) * _VOCABULARY + 7)
        ones = side.put(torch.ones(_LOGITS))

        def call() -> Tensor:
            side.ops.add_at(table, places, ones)
            found = table.index_select(0, places)[:, None]
            side.ops.add_at(table, places, -ones)
            return found

        return call

    def add(side: Side) -> Call:
        rows, amounts = logits(side), side.random(_LOGITS, 64, seed=62).float()
        places = side.put(torch.arange(64)[None].repeat(_LOGITS, 1) * 2000)
        return lambda: rows.clone().scatter_add_(1, places, amounts)

    shape = f"{_LOGITS} x {_VOCABULARY}"
    for name, call in of_logits.items():
        yield Case(name=f"{name}, {shape}", prepare=partial(prepare, call))
    yield Case(name=f"scatter_add_ of 64 a row, {shape}", prepare=add)
    yield Case(name=f"counts of tokens, 256 x {_VOCABULARY}", prepare=count)
