"""What a rule holds in all, added up: the grammar library's time and memory grow with it, or with its square.

Knows neither schemas nor grammars: whoever reads them adds what is found.
"""

from __future__ import annotations

import math
import re
import sys

from npu_runner.request.limits import LIMITS, shown

_WRITTEN_OUT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_MAY_BE_LEFT_OUT = re.compile(r"\*|(?<!\()\?|\{\s*0*\s*,|\{0|\(\||\(\?\w*:\||\|\)|\|\|")


class OutOfBounds(ValueError):
    """`place`: in the schema or the grammar, as a message names it."""

    def __init__(self, place: str, what: str):
        super().__init__(what)
        self.place = place


def check(place: str, what: str, value: float, limit: int) -> None:
    if value > limit:
        said = shown(value) if isinstance(value, int) and value > sys.maxsize else f"{value:,}"
        raise OutOfBounds(place, f"{said} {what}, at most {limit:,} are allowed")


def num_optional_parts(expression: str) -> int:
    """What may be left out of a regular expression, as it is written."""
    return len(_MAY_BE_LEFT_OUT.findall(_WRITTEN_OUT.sub("x", expression)))


class RuleSize:
    """Of one rule with all that stands in it. Raises OutOfBounds where it becomes too much."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._num_optional = 0
        self._multiple = 1

    def add_parts(self, place: str, count: int) -> None:
        self._num_parts += count
        check(place, "parts of the whole rule", self._num_parts, LIMITS.max_rule_parts)

    def add_expression(self, place: str, num_optional: int) -> None:
        """Of one text: an expression, or a terminal with all that it is made of."""
        check(place, "parts of an expression that may be left out", num_optional, LIMITS.max_optional_parts)
        self._num_optional += num_optional
        check(place, "parts of all expressions that may be left out", self._num_optional,
              LIMITS.max_all_optional_parts)  # fmt: skip

    def add_multiple(self, place: str, value: int) -> None:
        """Without the factors 2 and 5. Numbers that are tried beside each other are counted in the product."""
        self._multiple = math.lcm(self._multiple, value)
        check(place, "is the least common multiple of all values without the point and the factors 2 and 5",
              self._multiple, LIMITS.max_common_multiple)  # fmt: skip
