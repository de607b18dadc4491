"""Stands in for the graph session: load, compile, run. What each operator does is in operators.py and fused.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import collectives, experts, fused, operators, quantised  # noqa: F401 (these register their operators)
from .graph import Node, const_value, in_order, parse_node
from .memory import NZ, GraphEngineError, count, device_empty, host_view, is_fractal, runtime, to_device, uncounted
from .operators import REGISTRY, Call

# Operators whose tiling depends on the values of these inputs. Without tiling on the device
# (ge.tiling_schedule_optimize) GE schedules such a graph from the host, which fetches the values first.
TILED_BY_VALUE = {"FusedInferAttentionScore": {"actual_seq_lengths", "actual_seq_lengths_kv"}}


def drain() -> None:
    """Everything that was launched before the graph has run."""
    with uncounted():
        torch.npu.current_stream().synchronize()


class EmulatedGraph:
    """Has the methods of torchair's TorchNpuGraph."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.is_compiled = False

    def load(self, ge_graph: Any, options: dict[str, str] | None = None) -> None:
        self.nodes = in_order([parse_node(op) for op in ge_graph.op])
        self.tiles_on_device = dict(options or {}).get("ge.tiling_schedule_optimize") == "1"
        self.constants = {node.name: const_value(node) for node in self.nodes if node.type == "Const"}
        self.folded = set(self.constants)  # what GE computes once, when it compiles
        for node in self.nodes:
            sources = {name for _, name, _ in node.inputs if name}
            if sources and sources <= self.folded:
                self.folded.add(node.name)

    def compile(self) -> None:
        """Fails for operators that are not emulated: a graph breaks when it is made, not in the middle of a run."""
        unknown = sorted({node.type for node in self.nodes} - set(REGISTRY) - {"Data", "RefData", "Const", "NetOutput"})
        if unknown:
            raise GraphEngineError(f"graph {self.name}: GE operators that are not emulated: {', '.join(unknown)}")
        count("ge", "compile")
        self.is_compiled = True

    def set_hint_shape(self, inputs: object, outputs: object) -> None:
        """Torchair's hint for scheduling; values do not depend on it."""

    def auto_tune(self, example_inputs: object = (), stream: object = None) -> None:
        raise GraphEngineError("tuning is not emulated")

    def run(
        self, inputs: Sequence[Tensor], assigned_outputs: Sequence[Tensor | None] = (), stream: object = None
    ) -> list[Tensor]:
        if not self.is_compiled:
            raise GraphEngineError(f"graph {self.name} runs before it was compiled")
        if code := runtime.cann_emu_injected_failure(b"GE_run"):
            raise GraphEngineError(f"graph {self.name} fails with {code} because a test asked for it")
        drain()
        count("graphs", "ge_run")
        values: dict[str, list[Tensor]] = {}
        outputs: list[Tensor] = []
        for node in self.nodes:
            if node.type == "NetOutput":
                outputs = [values[name][index] for _, name, index in node.inputs]
            else:
                values[node.name] = self._results(node, values, inputs)
        return [
            self._deliver(value, target)
            for value, target in zip(outputs, self._targets(assigned_outputs, len(outputs)), strict=True)
        ]

    def _results(self, node: Node, values: dict[str, list[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        if node.type in ("Data", "RefData"):
            given = inputs[node.attributes["index"]]
            if is_fractal(given) and node.raw.output_desc[0].attr["format_for_int"].i != NZ:
                raise GraphEngineError(f"graph {self.name}: {node.name} lies in FRACTAL_NZ, and was compiled without")
            return [given]
        if node.type == "Const":
            return [self.constants[node.name]]
        arguments = [(parameter, values[name][index] if name else None) for parameter, name, index in node.inputs]
        try:
            results = REGISTRY[node.type](Call(node, arguments))
        except Exception as error:
            raise GraphEngineError(f"graph {self.name}, operator {node.name} ({node.type}): {error}") from error
        count("ge_operators", node.type)
        if node.name in self.folded:
            count("ge_folded", node.type)
        if node.type in TILED_BY_VALUE and self._waits_for_values(node):
            count("ge", f"host_scheduled {node.type}")
        return list(results) if isinstance(results, (list, tuple)) else [results]

    def _waits_for_values(self, node: Node) -> bool:
        """Whether the host has to read an earlier operator's result before it can lay out this one."""
        if self.tiles_on_device:
            return False
        read = TILED_BY_VALUE[node.type]
        return any(parameter in read and name and name not in self.constants for parameter, name, _ in node.inputs)

    @staticmethod
    def _targets(assigned: Sequence[Tensor | None], num_outputs: int) -> list[Tensor | None]:
        return list(assigned) if assigned else [None] * num_outputs

    @staticmethod
    def _deliver(value: Tensor, target: Tensor | None) -> Tensor:
        """The output in device memory: its own, or the input it was assigned to (a KV cache updated in place)."""
        if target is None:
            return value if value.device.type != "cpu" else to_device(value)
        if target.data_ptr() != value.data_ptr():
            count("copies", "d2d_operator", target.numel() * target.element_size())
            host_view(target).copy_(host_view(value).reshape(target.shape))
        return target


def registered(operator: str) -> tuple[str, list[object], list[object], list[object]]:
    """What the registry of a CANN answers; the lists of inputs, outputs and attributes are not read here."""
    return ("SUCCESS" if operator in REGISTRY else "UNREGISTERED", [], [], [])


def replace_engine(backend: ModuleType) -> None:
    """Puts the interpreter in the place of GE, in torchair's backend module."""
    backend.TorchNpuGraph = EmulatedGraph  # type: ignore[attr-defined]
    backend._torchair.InitializeGraphEngine = lambda options: None  # type: ignore[attr-defined]
    backend._torchair.FinalizeGraphEngine = lambda: None  # type: ignore[attr-defined]
    # "Is this operator registered?", asked for those that a program names itself.
    backend._torchair.get_registered_ir_def = registered  # type: ignore[attr-defined]
    # "Does this CANN know the operator and these optional arguments?" A current one does; compile() refuses the others.
    backend._torchair.check_cann_compat = lambda operator, inputs, attributes: ""  # type: ignore[attr-defined]


__all__ = ["EmulatedGraph", "device_empty", "replace_engine"]
