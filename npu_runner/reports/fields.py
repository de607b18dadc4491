"""How the fields of answers that are JSON objects are spread over a job. Knows nothing of schemas, rows or pages.

Bounded: of a field with many different values only numbers keep a spread, over a sample of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_FIELDS = 60
_MAX_VALUES = 64
_MAX_NAME = 80
_MAX_SAMPLE = 8192
_BINS = 16
_TYPES = {str: "text", list: "list", dict: "object", bool: "boolean", type(None): "null"}


@dataclass
class Sample:
    """Every first, second, fourth, ... of a row of numbers, so that it stays small, and their exact bounds and sum."""

    lowest: float = math.inf
    highest: float = -math.inf
    total: float = 0.0
    num_seen: int = 0
    values: list[float] = field(default_factory=list)
    _stride: int = 1

    def add(self, value: float) -> None:
        if self.num_seen % self._stride == 0:
            self.values.append(value)
            if len(self.values) > _MAX_SAMPLE:
                self.values, self._stride = self.values[::2], self._stride * 2
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        self.total += value
        self.num_seen += 1

    @property
    def mean(self) -> float:
        return self.total / self.num_seen

    def bins(self) -> list[int]:
        """How many of the sample lie in each of equal parts from the lowest to the highest."""
        counts, width = [0] * _BINS, (self.highest - self.lowest) / _BINS
        for value in self.values:
            place = int((value - self.lowest) / width) if 0 < width < math.inf else 0
            counts[min(place, _BINS - 1)] += 1
        return counts


@dataclass
class FieldSpread:
    """One field. A list counts with each of its items that is plain."""

    num_rows: int = 0
    values: Counter[str] = field(default_factory=Counter)
    has_more_values: bool = False
    """Than are counted in `values`."""
    numbers: Sample = field(default_factory=Sample)
    lengths: Sample = field(default_factory=Sample)
    """Characters of texts, items of lists and objects."""
    types: Counter[str] = field(default_factory=Counter)
    """JSON's, of the values."""

    def add(self, value: object) -> None:
        self.num_rows += 1
        self.types[_TYPES.get(type(value), "number")] += 1
        if isinstance(value, (str, list, dict)):
            self.lengths.add(len(value))
        for item in value if isinstance(value, list) else [value]:
            self._count(item)

    def _count(self, item: object) -> None:
        if isinstance(item, (int, float)) and not isinstance(item, bool) and abs(item) < 1e300:  # no NaN either
            self.numbers.add(float(item))
        shown = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
        if isinstance(item, (list, dict)) or len(shown) > _MAX_NAME:
            self.has_more_values = True
        elif shown in self.values or len(self.values) < _MAX_VALUES:
            self.values[shown] += 1
        else:
            self.has_more_values = True


@dataclass
class FieldTable:
    """The fields of all objects that were added, in the order in which they came."""

    num_objects: int = 0
    spreads: dict[str, FieldSpread] = field(default_factory=dict)
    num_more_fields: int = 0
    """Names beyond those that are kept, each time that one was met."""

    def add(self, value: Mapping[str, Any]) -> None:
        self.num_objects += 1
        for name, item in value.items():
            name = name[:_MAX_NAME]
            if name not in self.spreads and len(self.spreads) >= _MAX_FIELDS:
                self.num_more_fields += 1
                continue
            self.spreads.setdefault(name, FieldSpread()).add(item)
