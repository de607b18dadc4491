"""GE's plain operators, computed by torch on the CPU over device memory: one function for each operator type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import GE_TYPES, Node
from .memory import GraphEngineError, count, device_empty, host_view, to_device

REGISTRY: dict[str, Callable[[Call], Any]] = {}


@dataclasses.dataclass
class Call:
    """One operator with its inputs: device tensors, or CPU tensors for constants and host values."""

    node: Node
    arguments: list[tuple[str, Tensor | None]]

    def __getitem__(self, name: str) -> Tensor:
        value = self.get(name)
        if value is None:
            raise GraphEngineError(
                f"input {name} is missing, there are {[parameter for parameter, _ in self.arguments]}"
            )
        return value

    def get(self, name: str) -> Tensor | None:
        return next((value for parameter, value in self.arguments if parameter == name), None)

    def attribute(self, name: str, default: Any = None) -> Any:
        value = self.node.attributes.get(name)
        return default if value is None else value

    def given(self) -> list[Tensor]:
        return [value for _, value in self.arguments if value is not None]

    def hosts(self) -> list[Tensor]:
        return [host_view(value) for value in self.given()]


def register(*types: str) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    def add(function: Callable[[Call], Any]) -> Callable[[Call], Any]:
        for name in types:
            REGISTRY[name] = function
        return function

    return add


def on_device(value: Tensor) -> Tensor:
    """Constants live on the host until an operator of the device reads them."""
    return to_device(value) if value.device.type == "cpu" else value


def numbers(value: Tensor) -> list[int]:
    return [int(item) for item in host_view(value).flatten().tolist()]


def plain(name: str, function: Callable[..., Tensor]) -> None:
    """An operator whose inputs, in order, are the arguments of a torch function."""
    REGISTRY[name] = lambda call: to_device(function(*call.hosts()).contiguous())


def _matmul(call: Call, left: str, right: str) -> Tensor:
    a, b, *rest = call.hosts()
    # A transposition attribute means the last two dimensions.
    a = a.transpose(-1, -2) if call.attribute(left, False) else a
    b = b.transpose(-1, -2) if call.attribute(right, False) else b
    product = torch.matmul(a, b)
    return to_device((product if not rest else product + rest[0]).to(a.dtype).contiguous())


register("MatMul", "MatMulV2")(lambda call: _matmul(call, "transpose_x1", "transpose_x2"))
register("BatchMatMul")(lambda call: _matmul(call, "adj_x1", "adj_x2"))

for operator, function in {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "RealDiv": torch.true_divide,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "Pow": torch.pow,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Neg": torch.neg,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Reciprocal": torch.reciprocal,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Abs": torch.abs,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Relu": torch.relu,
    "Equal": torch.eq,
    "NotEqual": torch.ne,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "LogicalNot": torch.logical_not,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "SelectV2": torch.where,
    "ClipByValueV2": torch.clamp,
    "ZerosLike": torch.zeros_like,
    "OnesLike": torch.ones_like,
    "Swish": torch.nn.functional.silu,
    "Gelu": torch.nn.functional.gelu,
    "Invert": torch.bitwise_not,
    "Erf": torch.erf,
}.items():
    plain(operator, function)


@register("SoftplusV2")
def softplus(call: Call) -> Tensor:
    beta, threshold = (float(call.attribute(name, default)) for name, default in (("beta", 1.0), ("threshold", 20.0)))
    return to_device(torch.nn.functional.softplus(host_view(call["x"]), beta, threshold))


@register("AxpyV2")
def add_scaled(call: Call) -> Tensor:
    first, second, alpha = call.hosts()
    return to_device((first + second * alpha).contiguous())


@register("Addcmul")
def add_product(call: Call) -> Tensor:
    summand, first, second, value = call.hosts()
    if not summand.dtype == first.dtype == second.dtype == value.dtype:
        raise GraphEngineError(f"Addcmul takes one dtype, not {[item.dtype for item in call.hosts()]}")
    return to_device((summand + first * second * value).contiguous())


@register("MaskedFill")
def masked_fill(call: Call) -> Tensor:
    value, mask, filling = call.hosts()
    return to_device(value.masked_fill(mask, filling.reshape(()).to(value.dtype)).contiguous())


@register("Sxpy")
def subtract_scaled(call: Call) -> Tensor:
    first, second, *alpha = call.hosts()
    return to_device(torch.sub(first, second * alpha[0] if alpha else second).contiguous())


@register("Cast")
def cast(call: Call) -> Tensor:
    return to_device(host_view(call["x"]).to(GE_TYPES[int(call.attribute("dst_type"))]))


@register("Identity", "Bitcast")
def identity(call: Call) -> Tensor:
    if call.node.type == "Bitcast":
        return call["x"].view(GE_TYPES[int(call.attribute("type"))])
    return call["x"]


@register("TensorMove")
def tensor_move(call: Call) -> Tensor:
    source = call["x"]
    count("copies", "d2d_operator", source.numel() * source.element_size())
    count("copy_operators", "TensorMove", source.numel() * source.element_size())
    return to_device(host_view(source))


@register("Shape")
def shape(call: Call) -> Tensor:
    return torch.tensor(list(call["x"].shape), dtype=GE_TYPES[int(call.attribute("dtype", 3))])


@register("Reshape")
def reshape(call: Call) -> Tensor:
    return call["x"].reshape(numbers(call["shape"]))


@register("Unsqueeze")
def unsqueeze(call: Call) -> Tensor:
    value = call["x"]
    for axis in sorted(call.attribute("axes", [])):
        value = value.unsqueeze(axis)
    return value


@register("Squeeze")
def squeeze(call: Call) -> Tensor:
    axes = call.attribute("axis", [])
    value = call["x"]
    return value.squeeze(tuple(axes)) if axes else value.squeeze()


@register("Transpose")
def transpose(call: Call) -> Tensor:
    return to_device(host_view(call["x"]).permute(numbers(call["perm"])).contiguous())


@register("BroadcastTo")
def broadcast_to(call: Call) -> Tensor:
    return to_device(host_view(call["x"]).expand(numbers(call["shape"])).contiguous())


@register("Tile")
def tile(call: Call) -> Tensor:
    return to_device(host_view(call["x"]).repeat(numbers(call["multiples"])))


def _parts(call: Call, prefix: str = "x") -> list[Tensor]:
    return [
        host_view(value)
        for name, value in call.arguments
        if name.startswith(prefix) and name != "concat_dim" and value is not None
    ]


@register("ConcatV2")
def concat(call: Call) -> Tensor:
    axis = call.get("concat_dim")
    return to_device(
        torch.cat(_parts(call), int(call.attribute("concat_dim", 0)) if axis is None else numbers(axis)[0])
    )


@register("Pack")
def pack(call: Call) -> Tensor:
    stacked = torch.stack(_parts(call), int(call.attribute("axis", 0)))
    return stacked if all(value.device.type == "cpu" for value in call.given()) else to_device(stacked)


@register("SplitV")
def split_v(call: Call) -> list[Tensor]:
    value, sizes, axis = host_view(call["x"]), numbers(call["size_splits"]), numbers(call["split_dim"])[0]
    if -1 in sizes:
        sizes[sizes.index(-1)] = value.shape[axis] - sum(size for size in sizes if size >= 0)
    return [to_device(part.contiguous()) for part in value.split(sizes, axis)]


@register("Unpack")
def unpack(call: Call) -> list[Tensor]:
    return [to_device(part.contiguous()) for part in host_view(call["x"]).unbind(int(call.attribute("axis", 0)))]


@register("StridedSliceV2")
def strided_slice(call: Call) -> Tensor:
    value, begin, end = host_view(call["x"]), numbers(call["begin"]), numbers(call["end"])
    strides = call.get("strides")
    steps = numbers(strides) if strides is not None else [1] * len(begin)
    masks = {
        name: int(call.attribute(name, 0))
        for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    }
    if masks["ellipsis_mask"] or masks["new_axis_mask"]:
        raise GraphEngineError("ellipsis and new-axis masks are not emulated")
    axes = call.get("axes")
    order = numbers(axes) if axes is not None else list(range(len(begin)))
    index: list[slice | int] = [slice(None)] * value.dim()
    for i, axis in enumerate(order):
        if masks["shrink_axis_mask"] >> i & 1:
            index[axis] = begin[i]
            continue
        low = None if masks["begin_mask"] >> i & 1 else begin[i]
        high = None if masks["end_mask"] >> i & 1 else end[i]
        index[axis] = slice(low, high, steps[i])
    return to_device(value[tuple(index)].contiguous())


@register("GatherV2")
def gather(call: Call) -> Tensor:
    value, index = host_view(call["x"]), host_view(call["indices"]).long()
    axis = call.get("axis")
    dim = (numbers(axis)[0] if axis is not None else 0) % value.dim()
    size = value.shape[dim]
    _check_range(index, size, "indices", least=-size if call.attribute("negative_index_support", False) else 0)
    picked = value.index_select(dim, (index % size).flatten())
    return to_device(picked.reshape((*value.shape[:dim], *index.shape, *value.shape[dim + 1 :])))


@register("IndexByTensor")
def index_by_tensor(call: Call) -> Tensor:
    """indices_mask has a 1 for each dimension that one of the index tensors, in order, chooses from."""
    value, indices = host_view(call["x"]), iter(_parts(call, "indices"))
    chosen: list[slice | Tensor] = []
    for dim, is_indexed in enumerate(call.attribute("indices_mask")):
        chosen.append(next(indices) if is_indexed else slice(None))
        if is_indexed:
            _check_range(chosen[-1], value.shape[dim], "indices", least=-value.shape[dim])
    return to_device(value[tuple(chosen)].contiguous())


@register("GatherElements")
def gather_elements(call: Call) -> Tensor:
    value, index, dim = host_view(call["x"]), host_view(call["index"]).long(), int(call.attribute("dim", 0))
    _check_range(index, value.shape[dim], "index")
    return to_device(value.gather(dim, index))


@register("Fill")
def fill(call: Call) -> Tensor:
    value = host_view(call["value"])
    return to_device(torch.full(numbers(call["dims"]), value.item(), dtype=value.dtype))


@register("Range")
def range_(call: Call) -> Tensor:
    start, limit, delta = (host_view(call[name]) for name in ("start", "limit", "delta"))
    return to_device(torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype))


def _reduction(function: Callable[..., Tensor]) -> Callable[[Call], Tensor]:
    def run(call: Call) -> Tensor:
        axes = numbers(call["axes"]) if call.get("axes") is not None else call.attribute("axes", [])
        value = host_view(call["x"])
        return to_device(
            function(value, tuple(axes) or tuple(range(value.dim())), bool(call.attribute("keep_dims", False)))
        )

    return run


register("ReduceSum")(_reduction(torch.sum))
register("ReduceMean")(_reduction(lambda value, axes, keep: torch.mean(value.float(), axes, keep).to(value.dtype)))
register("ReduceMax")(_reduction(torch.amax))
register("ReduceAll")(_reduction(torch.all))
register("ReduceAny")(_reduction(torch.any))


@register("SoftmaxV2")
def softmax(call: Call) -> Tensor:
    value = host_view(call["x"])
    (axis,) = call.attribute("axes", [-1])
    return to_device(torch.softmax(value.float(), axis).to(value.dtype))


@register("ArgMaxV2")
def arg_max(call: Call) -> Tensor:
    return to_device(
        host_view(call["x"]).argmax(numbers(call["dimension"])[0]).to(GE_TYPES[int(call.attribute("dtype", 9))])
    )


@register("ArgMaxWithValue")
def arg_max_with_value(call: Call) -> list[Tensor]:
    values, indices = host_view(call["x"]).max(
        int(call.attribute("dimension")), bool(call.attribute("keep_dims", False))
    )
    return [to_device(indices.int()), to_device(values)]


def _check_range(index: Tensor, size: int, name: str, least: int = 0) -> None:
    if index.numel() and (int(index.min()) < least or int(index.max()) >= size):
        raise GraphEngineError(f"{name} holds {int(index.min())} to {int(index.max())}, outside [{least}, {size})")


def shapes(values: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


__all__ = ["REGISTRY", "Call", "device_empty", "numbers", "on_device", "register", "shapes"]


@register("Empty")
def empty(call: Call) -> Tensor:
    """Memory that nobody has written: full of garbage, as everywhere."""
    return device_empty(numbers(call["shape"]), GE_TYPES[int(call.attribute("dtype", 0))])
