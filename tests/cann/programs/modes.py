"""The decode layer in every mode a platform can choose: eager, captured by hand, through torchair's backends."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401
from torch import Tensor

from .decode_layer import DecodeLayer, LayerShape, causal_mask, empty_cache, step_inputs
from .emulation import calls, counters, reset_counters

SHAPE = LayerShape()
STEPS = ([5, 130, 256], [6, 131, 255], [100, 1, 2])
Step = Callable[[dict[str, Tensor], list[int]], tuple[Tensor, Tensor]]

# What one step of the layer launches, eagerly and in a graph: thirteen.
LAYER = {
    "aclnnAddRmsNorm": 2,
    "aclnnMatmul": 4,
    "aclnnRmsNorm": 2,
    "aclnnApplyRotaryPosEmbV2": 1,
    "aclnnInplaceCopy": 1,
    "aclnnScatterPaKvCache": 1,
    "aclnnFusedInferAttentionScoreV3": 1,
    "aclnnSwiGlu": 1,
}


class Case:
    """The layer on the device with its cache, and the same on the CPU."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.dtype = dtype
        self.layer = DecodeLayer(SHAPE, dtype)
        self.reference_cache = empty_cache(SHAPE).to(dtype).float()
        # Two allocations: a graph copies caches that share one, because it cannot tell their writes apart.
        self.key_cache, self.value_cache = (part.to(dtype).npu() for part in self.reference_cache)
        self.on_npu = DecodeLayer(SHAPE, dtype).npu()
        self.mask = causal_mask()
        self.fixed = {"mask": self.mask, "key_cache": self.key_cache, "value_cache": self.value_cache}

    @property
    def cache(self) -> Tensor:
        return torch.stack((self.key_cache.cpu(), self.value_cache.cpu()))

    def run(self, inputs: dict[str, Tensor], kv_lengths: list[int]) -> tuple[Tensor, Tensor]:
        rows = len(kv_lengths)
        return self.on_npu(**inputs, **self.fixed, q_lengths=list(range(1, rows + 1)), kv_lengths=kv_lengths)

    def to_npu(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: (x.to(self.dtype) if x.is_floating_point() else x).npu() for name, x in inputs.items()}

    def compare(self, step: Step, lengths: list[list[int]] = list(STEPS)) -> None:  # noqa: B006 (never written)
        for seed, kv_lengths in enumerate(lengths):
            inputs = step_inputs(SHAPE, kv_lengths, seed)
            rounded = {name: x.to(self.dtype).float() if x.is_floating_point() else x for name, x in inputs.items()}
            expected = self.layer.reference(**rounded, cache=self.reference_cache, kv_lengths=kv_lengths)
            actual = step(self.to_npu(inputs), kv_lengths)
            for got, wanted in zip(actual, expected, strict=True):
                torch.testing.assert_close(got.cpu().float(), wanted, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(self.cache.float(), self.reference_cache, rtol=2e-2, atol=2e-2)


def no_copy_of_the_cache(case: Case) -> None:
    cache_bytes = 2 * case.key_cache.numel() * case.key_cache.element_size()
    moved = sum(entry["bytes"] for name, entry in counters()["copies"].items() if name.startswith("d2d"))
    assert moved < cache_bytes // 4, (
        f"{moved} bytes were copied on the device, the cache has {cache_bytes}: {counters()}"
    )


def check_eager() -> None:
    case = Case()
    case.compare(case.run)
    inputs = case.to_npu(step_inputs(SHAPE, STEPS[0], 0))
    reset_counters()
    case.run(inputs, STEPS[0])
    assert calls("launches") == LAYER, calls("launches")
    no_copy_of_the_cache(case)


def check_captured_by_hand() -> None:
    case = Case()
    static = case.to_npu(step_inputs(SHAPE, STEPS[0], 0))
    torch.npu.synchronize()
    before = case.cache
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out = case.run(static, STEPS[0])
    assert torch.equal(before, case.cache)

    def step(inputs: dict[str, Tensor], kv_lengths: list[int]) -> tuple[Tensor, Tensor]:
        for name, value in inputs.items():
            static[name].copy_(value)
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": kv_lengths}])
        graph.replay()
        return out

    case.compare(step)
    reset_counters()
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": STEPS[1]}])
    graph.replay()
    assert calls("replayed") == LAYER, calls("replayed")
    assert calls("updated") == {"aclnnFusedInferAttentionScoreV3": 1}
    no_copy_of_the_cache(case)


def keep_cache_writes_in_place() -> None:
    """Torchair copies the whole cache around a write it does not know; this tells it which arguments are written."""
    from torch_npu.dynamo import npugraph_ex, torchair  # noqa: F401 (makes both names importable)

    for package in ("torchair", "npugraph_ex"):
        graph_pass = importlib.import_module(f"{package}._acl_concrete_graph.graph_pass")
        graph_pass.register_inplaceable_npu_op(
            "npu_scatter_pa_kv_cache_functional", "npu_scatter_pa_kv_cache", mutated_arg=[2, 3]
        )


def compiled(case: Case, backend: Any, **options: Any) -> Step:
    """One trace for all lengths: they are symbols of the graph, everything else is of fixed size."""
    torch._dynamo.reset()
    for tensor in case.fixed.values():
        torch._dynamo.mark_static_address(tensor)  # or the graph copies them into memory of its own at each replay
    function = torch.compile(case.on_npu.forward, backend=backend, dynamic=True, fullgraph=True, **options)

    def step(inputs: dict[str, Tensor], kv_lengths: list[int]) -> tuple[Tensor, Tensor]:
        for tensor in inputs.values():
            torch._dynamo.mark_static(tensor)
        totals = list(range(1, len(kv_lengths) + 1))
        # The fused rotary works in place and its schema does not say so.
        with torch.inference_mode(), torch._functorch.config.patch(error_on_custom_op_aliasing=False):
            return function(**inputs, **case.fixed, q_lengths=totals, kv_lengths=kv_lengths)

    return step


def one_graph_serves_all_lengths(backend: Any, **options: Any) -> None:
    keep_cache_writes_in_place()
    case = Case()
    step = compiled(case, backend, **options)
    case.compare(step, [[5, 130, 256]])
    captured = calls("graphs")["captured"]
    reset_counters()
    # Lengths of 1 and lengths that were equal while tracing would be constants of the trace.
    case.compare(step, [[6, 131, 255], [100, 2, 3], [2, 2, 2]])
    assert "captured" not in calls("graphs"), calls("graphs")
    assert calls("graphs")["replayed"] == 3, (captured, calls("graphs"))
    no_copy_of_the_cache(case)


def check_torchair_reduce_overhead() -> None:
    from torch_npu.dynamo import torchair

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    one_graph_serves_all_lengths(torchair.get_npu_backend(compiler_config=config))


def check_npugraph_ex() -> None:
    one_graph_serves_all_lengths("npugraph_ex")


class GraphEngineLayer(torch.nn.Module):
    """The layer as the graph engine takes it: lengths as tensors on the device, one trace for all of them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        import torchair  # its own name is there once torch_npu.dynamo.torchair was imported

        self.layer, self.fixed = case.on_npu, case.fixed
        self.layer.attention = torchair.ops.npu_fused_infer_attention_score

    def decode(self, inputs: dict[str, Tensor], q_lengths: Tensor, kv_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(**inputs, **self.fixed, q_lengths=q_lengths, kv_lengths=kv_lengths)


def graph_engine_step(function: Callable[..., tuple[Tensor, Tensor]]) -> Step:
    def step(inputs: dict[str, Tensor], kv_lengths: list[int]) -> tuple[Tensor, Tensor]:
        totals = torch.arange(1, len(kv_lengths) + 1).npu()
        with torch.inference_mode():
            return function(inputs, totals, torch.tensor(kv_lengths).npu())

    return step


def max_autotune() -> Any:
    from torch_npu.dynamo import torchair

    config = torchair.CompilerConfig()
    config.mode = "max-autotune"
    return config


def check_torchair_max_autotune() -> None:
    from torch_npu.dynamo import torchair

    case = Case()
    torch._dynamo.reset()
    reset_counters()
    backend = torchair.get_npu_backend(compiler_config=max_autotune())
    compiled = torch.compile(GraphEngineLayer(case).decode, backend=backend, dynamic=False, fullgraph=True)
    case.compare(graph_engine_step(compiled))
    assert calls("graphs")["ge_run"] == len(STEPS)
    assert calls("ge")["compile"] == 1
    no_copy_of_the_cache(case)


def check_cached_graph() -> None:
    """Compiles or loads from CACHE_DIR, which of the two is the test's business."""
    import torch_npu.dynamo.torchair  # noqa: F401 (makes the name torchair importable)
    import torchair

    case = Case()
    torch._dynamo.reset()
    layer = GraphEngineLayer(case)
    decode = torchair.inference.cache_compile(
        layer.decode, config=max_autotune(), dynamic=False, cache_dir=os.environ["CACHE_DIR"]
    )
    case.compare(graph_engine_step(decode))
