"""The weights of a checkpoint with a LoRA adapter merged into them while they are read, in float32.

Knows no model: the caller maps names of the adapter to tensors.

O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import EllipsisType

import torch

from npu_runner.checkpoint.lora import Adapter, Change
from npu_runner.checkpoint.weights_reader import WeightsReader, renamed_tensor
from npu_runner.errors import WeightsError

_ROWS_AT_ONCE = 2048
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class AdaptedReader(WeightsReader):
    """Tensors as a checkpoint that PEFT had merged would have them, but not rounded: float32 where the adapter changes
    them. A head that an adapter changes apart from the embedding is a tensor of its own, whether one is stored or not.
    """

    def __init__(self, base: WeightsReader, adapter: Adapter, renamed: Mapping[str, str]):
        """`renamed`: how the checkpoint's names begin, by how the model's do. Raises WeightsError for a tensor of the
        adapter that the checkpoint lacks, or has in another shape."""
        self.path, self._base = base.path, base
        self._changes: dict[str, Change] = {}
        self._replaced: dict[str, torch.Tensor] = {}
        self._head_of: str | None = None
        problems = []
        for name in (*adapter.changes, *adapter.replaced):
            found = self._find(name, renamed)
            if found is None:
                problems.append(f"{name}: the checkpoint has no such tensor")
                continue
            shape, change = self.shape(found), adapter.changes.get(name)
            if change.fits(shape) if change is not None else tuple(adapter.replaced[name].shape) == shape:
                self._add(found, change, adapter.replaced.get(name))
            else:
                problems.append(f"{name}: it is {list(shape)} in the checkpoint, which the adapter's does not fit")
        if problems:
            shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
            raise WeightsError(f"lora {adapter.path}: it is no adapter of {base.path}:\n  {shown}")

    def _add(self, name: str, change: Change | None, replaced: torch.Tensor | None) -> None:
        if change is not None:
            self._changes[name] = change
        elif replaced is not None:
            self._replaced[name] = replaced

    @property
    def num_changed(self) -> int:
        return len(self._changes) + len(self._replaced)

    @property
    def names(self) -> set[str]:
        return self._base.names | ({_HEAD} if self._head_of is not None else set())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._stored(name))

    def dtype(self, name: str) -> str:
        return "F32" if name in self._changes or name in self._replaced else self._base.dtype(self._stored(name))

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        parts = [values for _, values in self.pieces(name, dim, start, length)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
               ) -> Iterator[tuple[slice | EllipsisType, torch.Tensor]]:
        if name in self._replaced:
            values = self._replaced[name]
            yield ..., values if dim is None else values.narrow(dim, start, length)
        elif name in self._changes:
            yield from self._changed(name, dim, start, length)
        else:
            yield from self._base.pieces(self._stored(name), dim, start, length)

    def close(self) -> None:
        self._base.close()

    def _changed(self, name: str, dim: int | None, start: int, length: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some rows at a time. DoRA's norms are those of whole rows, whichever columns are wanted."""
        change, (num_rows, *rest) = self._changes[name], self.shape(name)
        first, count = (start, length) if dim == 0 else (0, num_rows)
        columns = slice(start, start + length) if dim == 1 and len(rest) == 1 else slice(None)
        for done in range(0, count, _ROWS_AT_ONCE):
            taken = min(_ROWS_AT_ONCE, count - done)
            rows = slice(first + done, first + done + taken)
            right_RI = change.right_RI if change.magnitude_O is not None else change.right_RI[:, columns]
            if change.base_OI is None:
                weight_OI = self._base.read(self._stored(name), 0, rows.start, taken).float().flatten(1)
            else:
                weight_OI = change.base_OI[rows].float().flatten(1)
            if change.magnitude_O is None:
                weight_OI = weight_OI[:, columns]
            weight_OI = weight_OI + change.scale * (change.left_OR[rows] @ right_RI)
            if change.magnitude_O is not None:
                norms_O = torch.linalg.norm(weight_OI, dim=1)
                weight_OI = (change.magnitude_O[rows] / norms_O)[:, None] * weight_OI[:, columns]
            if len(rest) > 1:
                whole = weight_OI.unflatten(1, rest)
                weight_OI = whole if dim in (None, 0) else whole.narrow(dim, start, length)
            yield slice(done, done + taken), weight_OI

    def _stored(self, name: str) -> str:
        return self._head_of if name == _HEAD and self._head_of is not None else name

    def _find(self, name: str, renamed: Mapping[str, str]) -> str | None:
        """The checkpoint's name of what the adapter calls `name`: the same, or with another beginning."""
        names = self._base.names
        from_theirs = {theirs: ours for ours, theirs in renamed.items() if theirs}
        candidates = [name, renamed_tensor(name, renamed), renamed_tensor(name, from_theirs)]
        found = next((each for each in candidates if each in names), None)
        if found is None and name.endswith(_HEAD):
            self._head_of = next((each for each in sorted(names) if each.endswith(_EMBEDDING)), None)
            return _HEAD if self._head_of is not None else None
        return found
