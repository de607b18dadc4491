"""Draws docs/benchmarks.svg from the first table of docs/benchmarks.md. Measures nothing.

usage: python -m bench.chart

One bar per row whose peer is another engine: how many times as fast npu_runner is. A time (unit s or ms) is better when
it is smaller, every other figure when it is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import dropwhile, takewhile
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = ("workload", "unit", "npu_runner", "peer", "peer's figure", "times as fast", "machine", "commit", "command")
_TIMES = ("s", "ms")
_ENGINES = ("transformers", "vLLM")
_WIDTH, _LEFT, _FIGURES, _ROW, _HEAD = 1000, 12, 600, 42, 62
_OURS, _LINE, _TEXT = "#1f6feb", "#cf222e", "#1f2328"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table. `peer_value` is None where it has no peer."""

    workload: str
    unit: str
    value: float
    peer: str
    peer_value: float | None
    stated_ratio: str
    machine: str

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer."""
        assert self.peer_value is not None, f"{self.workload} has no peer"
        return self.peer_value / self.value if self.unit in _TIMES else self.value / self.peer_value


def read_table(page: str) -> list[Figure]:
    """The rows of the page's first table. Raises ValueError if its columns are not COLUMNS or a figure is no number."""
    lines = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: line[:1] != "|", page.splitlines()))
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if not table or tuple(table[0]) != COLUMNS:
        raise ValueError(f"the first table has the columns {table[:1]}, not {COLUMNS}")
    return [_figure(dict(zip(COLUMNS, cells, strict=True))) for cells in table[2:]]


def _figure(cells: dict[str, str]) -> Figure:
    peer_value = _number(cells["peer's figure"]) if cells["peer"] else None
    return Figure(workload=cells["workload"].replace("`", ""), unit=cells["unit"], value=_number(cells["npu_runner"]),
                  peer=cells["peer"].replace("`", ""), peer_value=peer_value, stated_ratio=cells["times as fast"],
                  machine=cells["machine"])


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def draw(figures: Sequence[Figure]) -> str:
    """The chart as SVG text, which is the same for the same figures."""
    bars = [figure for figure in figures if figure.peer.startswith(_ENGINES)]
    scale = (_WIDTH - _LEFT - _FIGURES) / max(figure.ratio for figure in bars)
    height = _HEAD + _ROW * len(bars) + 12
    even = _LEFT + scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="13" fill="{_TEXT}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="16" font-weight="bold">npu_runner beside other engines: times as fast</text>',
        f'<text x="{even:.1f}" y="{_HEAD - 10}" text-anchor="middle" fill="{_LINE}">as fast (1.0)</text>',
        f'<line x1="{even:.1f}" x2="{even:.1f}" y1="{_HEAD - 4}" y2="{height - 12}" stroke="{_LINE}" '
        'stroke-dasharray="4 3"/>',
        *(line for number, figure in enumerate(bars) for line in _bar(figure, _HEAD + _ROW * number, scale)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bar(figure: Figure, top: int, scale: float) -> list[str]:
    """The workload stands above its bar, and the figures beside that."""
    width = figure.ratio * scale
    detail = (f"{figure.ratio:.2f} on {figure.machine}: {figure.value:,g} against {figure.peer_value:,g} "
              f"{figure.unit}, {figure.peer}")
    return [
        f'<text x="{_LEFT}" y="{top + 15}">{escape(figure.workload)}</text>',
        f'<rect class="bar" x="{_LEFT}" y="{top + 20}" width="{width:.1f}" height="{_ROW - 26}" fill="{_OURS}"/>',
        f'<text x="{_LEFT + width + 8:.1f}" y="{top + 33}" font-size="11">{escape(detail)}</text>',
    ]


def main() -> None:
    figures = read_table((DOCS / "benchmarks.md").read_text())
    (DOCS / "benchmarks.svg").write_text(draw(figures))


if __name__ == "__main__":
    main()
