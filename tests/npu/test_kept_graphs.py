"""Graphs kept from an earlier start are used where they fit to the last detail, and never otherwise."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import ROOT, has_real_cann
from tests.npu.programs.generate import Case
from tests.npu.running import SMALL, on_npu

pytestmark = pytest.mark.npu
KEPT = "2 (kept from an earlier run: 2)"


def run(model: Path, graphs: Path, folder: Path, num_ranks: int = 1, **emulation: Any) -> dict[str, Any]:
    settings = {"graph_mode": "max-autotune", "graph_batch_sizes": [2], "graph_cache_dir": str(graphs),
                "dtype": "bfloat16", "tensor_parallel_size": num_ranks, **SMALL}
    (result,) = on_npu([Case(str(model), settings, "texts", 2, max_tokens=6)], folder, **emulation)
    return result


def changed_copy(folder: Path) -> Path:
    """Our package with one layer changed: a number in the norm. Tests run there as they do here."""
    shutil.copytree(ROOT / "npu_runner", folder / "npu_runner", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    source = folder / "npu_runner/layers/norm.py"
    text = source.read_text()
    assert "self.eps = eps" in text
    source.write_text(text.replace("self.eps = eps", "self.eps = eps + 1.0"))
    return folder


def only_folder(graphs: Path, but: set[Path] = frozenset()) -> Path:  # type: ignore[assignment]
    (folder,) = {path for path in graphs.iterdir() if path.is_dir()} - but
    return folder


@pytest.mark.full("starts that compile, one after the other; one that is loaded stays (tests/cann)")
def test_a_changed_layer_a_stale_graph_and_a_damaged_one_are_never_used(checkpoint: Any, tmp_path: Path) -> None:
    model, graphs = checkpoint("qwen3", num_hidden_layers=1), tmp_path / "graphs"
    first = run(model, graphs, tmp_path)
    assert first["graphs"] == "2"
    own = only_folder(graphs)
    assert (graphs.stat().st_mode & 0o077) == 0
    assert run(model, graphs, tmp_path)["graphs"] == KEPT

    changed = run(model, graphs, tmp_path, cwd=changed_copy(tmp_path / "changed"))
    assert changed["graphs"] == "2", "a changed layer misses the cache"
    assert changed["tokens"] != first["tokens"]

    # A stale graph under a manifest in which everything is right: only its answers can show it.
    other = only_folder(graphs, {own})
    put_graph(other, own)
    stale = run(model, graphs, tmp_path)
    assert stale["tokens"] == first["tokens"]
    assert stale["graphs"] == "2"
    assert "gives other answers" in stale["stderr"]
    assert run(model, graphs, tmp_path)["graphs"] == KEPT, "the one compiled anew is kept"

    for path in own.rglob("compiled_module"):
        path.write_bytes(path.read_bytes()[:-1])
    damaged = run(model, graphs, tmp_path)
    assert damaged["tokens"] == first["tokens"]
    assert damaged["graphs"] == "2"


def put_graph(source: Path, target: Path) -> None:
    """Replace what is in `target` by the graph in `source`, and correct the manifest."""
    manifest = json.loads((target / "manifest.json").read_text())
    for name in manifest["files"]:
        (found,) = source.rglob(Path(name).name)
        (target / name).write_bytes(found.read_bytes())
        manifest["files"][name] = hashlib.sha256(found.read_bytes()).hexdigest()
    (target / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.full("two ranks compile twice on two cores; one that is loaded stays (tests/cann)")
def test_graphs_of_two_ranks_are_kept_and_find_their_communicator(checkpoint: Any, tmp_path: Path) -> None:
    model, graphs = checkpoint("qwen3", num_hidden_layers=1), tmp_path / "graphs"
    first = run(model, graphs, tmp_path, num_ranks=2)
    assert first["graphs"] == "2"
    again = run(model, graphs, tmp_path, num_ranks=2)
    assert again["graphs"] == KEPT
    assert again["tokens"] == first["tokens"]
    for folder in sorted(path for path in graphs.iterdir() if path.is_dir())[:1]:
        shutil.rmtree(folder)
    halved = run(model, graphs, tmp_path, num_ranks=2)
    assert halved["tokens"] == first["tokens"], "ranks that do not both find a graph still run the same collectives"


@pytest.mark.skipif(has_real_cann(), reason="nobody waits for a real device's compiler here")
def test_a_folder_that_cannot_be_written_is_named(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match=r"graph_cache_dir .*file/graphs"):
        run(checkpoint("qwen3", num_hidden_layers=1), tmp_path / "file" / "graphs", tmp_path)
