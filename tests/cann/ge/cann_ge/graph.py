"""The GraphDef of torchair as a list of nodes in an order that can be executed. Knows nothing of what operators do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# Element types as GE numbers them in attributes.
GE_TYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    27: torch.bfloat16,
}
# The same in the descriptions of tensors, which number them as the protobuf does.
PROTO_TYPES = {
    1: torch.float32,
    2: torch.float16,
    3: torch.int8,
    4: torch.uint8,
    5: torch.int16,
    6: torch.uint16,
    7: torch.int32,
    8: torch.int64,
    9: torch.uint32,
    10: torch.uint64,
    11: torch.bool,
    12: torch.float64,
    27: torch.bfloat16,
}


@dataclasses.dataclass
class Node:
    name: str
    type: str
    inputs: list[tuple[str, str, int]]  # (parameter, producing node or "", output index)
    waits_for: list[str]  # control edges
    attributes: dict[str, Any]
    num_outputs: int
    raw: Any = dataclasses.field(repr=False)


def _attribute(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "list":
        for field in ("s", "i", "f", "b", "bt"):
            items = list(getattr(value.list, field))
            if items:
                return [item.decode() if isinstance(item, bytes) else item for item in items]
        return []
    item = getattr(value, kind) if kind else None
    return item.decode(errors="replace") if isinstance(item, bytes) else item


def _split(reference: str) -> tuple[str, int]:
    name, _, index = reference.rpartition(":")
    return (name, int(index)) if name else (reference, 0)


def parse_node(op: Any) -> Node:
    data, waits_for = [], []
    for reference in op.input:
        name, index = _split(reference) if reference else ("", 0)
        if index < 0:
            waits_for.append(name)
        else:
            data.append((name, index))
    names = [desc.name for desc in op.input_desc]
    names += [f"x{i}" for i in range(len(names), len(data))]
    inputs = [(parameter, name, index) for parameter, (name, index) in zip(names, data, strict=False)]
    attributes = {key: _attribute(op.attr[key]) for key in op.attr if key != "value"}
    return Node(op.name, op.type, inputs, waits_for, attributes, len(op.output_desc), op)


def in_order(nodes: list[Node]) -> list[Node]:
    """The nodes with every producer and every control edge first, otherwise as they stand."""
    by_name, done, ordered = {node.name: node for node in nodes}, set(), []

    def needs(node: Node) -> list[str]:
        return [name for _, name, _ in node.inputs if name] + node.waits_for

    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            if node.name in done:
                stack.pop()
                continue
            open_needs = [by_name[name] for name in needs(node) if name not in done]
            if open_needs:
                stack.extend(open_needs)
            else:
                done.add(node.name)
                ordered.append(node)
                stack.pop()
    return ordered


def const_value(node: Node) -> torch.Tensor:
    tensor = node.raw.attr["value"].t
    dtype = PROTO_TYPES.get(tensor.desc.dtype)
    if dtype is None:
        raise ValueError(f"constant {node.name} has element type {tensor.desc.dtype}, which is not emulated")
    shape = list(tensor.desc.shape.dim)
    if not tensor.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(shape)
