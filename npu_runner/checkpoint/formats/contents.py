"""The findings of a format in a checkpoint: float tensors, the stored tensors of each, and problems. Knows no format.

It reads headers and a few small tensors, never weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from npu_runner.checkpoint.formats.stored import FloatTensor
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import WeightsError

FLOATS = ("F32", "BF16", "F16")
FP8 = ("F8_E4M3",)
_NUM_SHOWN = 20
# Bytes of a number, where a file may hold such.
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}


@dataclass
class Contents:
    """Filled by a format's `read`."""

    reader: CheckpointReader
    made: dict[str, FloatTensor] = field(default_factory=dict)
    """Float tensors that are computed, by the names that a float checkpoint has."""
    claimed: set[str] = field(default_factory=set)
    """Stored tensors that these are made of, and what belongs to them."""
    unused: Counter[str] = field(default_factory=Counter)
    """Counts of other tensors that belong to the format but are not used, by kind."""
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = self.reader.names

    def suffixed(self, *suffixes: str) -> Iterator[str]:
        """Modules that have a tensor of that name, in order."""
        for name in sorted(self._names):
            for suffix in suffixes:
                if name.endswith(suffix):
                    yield name.removesuffix(suffix)

    def has(self, name: str) -> bool:
        return name in self._names

    def claim(self, name: str, dtypes: Collection[str], *shapes: Sequence[int]) -> bool:
        """Whether the tensor is there as it must be, of one of these dtypes and shapes (none: any); else a problem."""
        if not self.has(name):
            wanted = f" {list(shapes[0])}" if shapes else ""
            return self.problem(f"missing: {name}{wanted}")
        self.claimed.add(name)
        dtype, shape = self.reader.dtype(name), self.reader.shape(name)
        if dtype not in dtypes:
            return self.problem(f"of another type: {name} holds {dtype}, its format {' or '.join(dtypes)}")
        if shapes and shape not in [tuple(each) for each in shapes]:
            return self.problem(f"misshapen: {name} is {list(shape)}, its weight makes it "
                                f"{' or '.join(str(list(each)) for each in shapes)}")
        return True

    def leave(self, what: str, *names: str) -> None:
        """Take tensors that nothing is computed from; those that are not there are none."""
        for name in names:
            if self.has(name) and name not in self.claimed:
                self.claimed.add(name)
                self.unused[what] += 1

    def problem(self, text: str) -> bool:
        self.problems.append(text)
        return False

    def groups(self, module: str, num_inputs: int, group_size: int) -> int | None:
        """The number of input groups; None if the size does not divide. A group size of -1 means one group."""
        if group_size in (-1, 0):
            return 1
        if group_size < 0 or num_inputs % group_size:
            self.problem(f"{module}: {num_inputs} inputs do not divide into groups of {group_size}")
            return None
        return num_inputs // group_size

    def raise_problems(self) -> None:
        """Raises WeightsError that names each, up to a limit."""
        if self.problems:
            more = len(self.problems) - _NUM_SHOWN
            text = "\n  ".join(self.problems[:_NUM_SHOWN]) + (f"\n  and {more} more" if more > 0 else "")
            raise WeightsError(f"{self.reader.path}: the quantised weights are not what their format makes of them; "
                               f"copy the checkpoint again from its source:\n  {text}")

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored tensors of the format."""
        return sum(math.prod(self.reader.shape(name)) * _SIZES.get(self.reader.dtype(name), 1) for name in self.claimed)

    @property
    def num_elements(self) -> int:
        """Elements of all float tensors that are computed."""
        return sum(math.prod(tensor.shape) for tensor in self.made.values())

    def describe(self) -> str:
        """The forms, and how many tensors each has."""
        forms = Counter(tensor.form for tensor in self.made.values() if tensor.form)
        return ", ".join(f"{count} as {form}" for form, count in forms.most_common())
