"""The laws of the layout: a layer imports only what stands below it, and the scheduling core knows no tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages and modules, lowest first; those of one line do not import each other.
LAYERS = [
    {"errors", "threads", "processes", "assets"}, {"request"},
    {"config", "checkpoint"}, {"grammars"}, {"prompts"},
    {"core", "platforms"}, {"layers", "sampling"}, {"models"}, {"strategies"}, {"runner"}, {"engine"}, {"serving"},
    {"llm"}, {"batch", "ray_data"}, {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "npu_runner" and len(parts) > 1 else None


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def all_sources() -> list[Path]:
    return [*(ROOT / "npu_runner").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]


def sources() -> list[Path]:
    return [path for path in all_sources()
            if path.parent.name != "npu_runner" or path.stem not in ("__init__", "__main__")]


def module_layer(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "strategies" if parts[0] == "strategies" else parts[1]  # its folder stands beside the package's


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_layer_imports_only_what_stands_below_it(path: Path) -> None:
    own = module_layer(path)
    for module in imports(path):
        layer = layer_of(module)
        if layer is not None and layer != own:
            assert LEVEL[layer] < LEVEL[own], f"{path.relative_to(ROOT)} ({own}) imports {module} ({layer})"


FLOORS = {
    "batch": ["rows", "files", "job"],  # what a row is, where rows lie, what is done with them
    "prompts": ["media", "text", "prompts"],  # what a message shows, what it says, and both in one prompt
    "serving": ["workers", "serving", "replicas", "calls"],  # to prepare, one loop, to share out, all for an LLM
}


@pytest.mark.parametrize("house", FLOORS)
def test_a_room_of_a_package_imports_only_rooms_below_it(house: str) -> None:
    rooms, folder = FLOORS[house], ROOT / "npu_runner" / house
    for path in sorted(folder.rglob("*.py")):
        for module in imports(path):
            parts = module.split(".")
            if parts[:2] == ["npu_runner", house] and len(parts) > 2:
                imported = parts[2] if (folder / parts[2]).is_dir() else house
                assert path.parent.name in rooms, f"{path.name} stands in no room"
                assert rooms.index(imported) <= rooms.index(path.parent.name), f"{path} imports {module}"


def module_name(path: Path) -> str:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"npu_runner.{dotted}" if dotted.startswith("strategies") else dotted


def test_no_file_imports_itself_by_way_of_others() -> None:
    names = {module_name(path): path for path in all_sources()}
    del names["npu_runner"]  # its public names load on first use
    wanted = {name: {module for module in imports(path) if module in names} - {name} for name, path in names.items()}
    list(TopologicalSorter(wanted).static_order())  # raises CycleError, which names the circle


def test_the_core_imports_no_torch() -> None:
    for path in (ROOT / "npu_runner" / "core").glob("*.py"):
        assert not any(module.split(".")[0] == "torch" for module in imports(path)), path.name


def test_nobody_above_a_platform_asks_which_one_it_is() -> None:
    asking = [str(path.relative_to(ROOT)) for path in sources()
              if module_layer(path) != "platforms" and "device.type" in path.read_text()]
    assert not asking


def test_no_file_is_too_long_to_read() -> None:
    long = {str(path.relative_to(ROOT)): count for path in sources()
            if (count := len(path.read_text().splitlines())) > 500}
    assert not long
