"""Compiled GE graphs kept from one start to the next, through torchair's cache_compile. Knows nothing of models.

torchair's own key is the module's repr and the compile options. It covers neither the source of forward, nor shapes,
dtypes, block counts or versions, and loading skips dynamo's guards. So every graph has a folder of its own here, named
by a hash of everything that shapes it. Its manifest stores these inputs and the hashes of its files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.graphs import DecodeForward, GraphCompiler, GraphSettings, own_code
from npu_runner.platforms.npu import torchair
from npu_runner.platforms.npu.attention import NpuAttention
from npu_runner.platforms.npu.graph_limit import LimitedGraphCompiler
from npu_runner.platforms.npu.graphs import (
    AclGraphCompiler,
    GraphEngineCompiler,
    GraphEngineDecode,
    RecordedGraphCompiler,
    ResourceErrors,
    graph_engine_config,
)
from npu_runner.platforms.npu.settings import npu_settings
from npu_runner.platforms.npu.versions import cann_version, soc_name
from npu_runner.platforms.step_inputs import StepInputs

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"


class CachedGraphEngineCompiler(GraphCompiler):
    """Like GraphEngineCompiler, with graphs of earlier runs loaded where they fit to the last detail."""

    context_lens_dtype = GraphEngineCompiler.context_lens_dtype

    def __init__(self, settings: GraphSettings):
        assert settings.cache_dir is not None, "without a folder there is GraphEngineCompiler"
        self._root = settings.cache_dir
        versions = {"torch": torch.__version__, "torch_npu": torch_npu.__version__, "cann": cann_version(),
                    "soc": soc_name(), "graph_options": repr(graph_engine_config().as_dict()),
                    "npu_settings": repr(npu_settings())}
        self._identity = {**settings.identity, **versions}
        self._graphs: dict[int, list[_KeptGraph]] = {}
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"graph_cache_dir {self._root}: {error.strerror}; choose another, or use_graph_cache off"
                              ) from error

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        module = GraphEngineDecode(forward, batch_size)
        graph = _KeptGraph(module, GraphFolder(self._root, {**self._identity, "graph": module.name}))
        self._graphs.setdefault(batch_size, []).append(graph)
        return graph

    def was_loaded(self, batch_size: int) -> bool:
        return any(graph.was_loaded for graph in self._graphs[batch_size])

    def discard(self, batch_size: int) -> None:
        for graph in self._graphs.pop(batch_size):
            graph.folder.clear()


class GraphFolder:
    """The folder of one graph. Whole only with a manifest that matches `identity` and every file."""

    def __init__(self, root: Path, identity: Mapping[str, Any]):
        self._identity = json.loads(json.dumps(identity, sort_keys=True, default=str))
        text = json.dumps(self._identity, sort_keys=True)
        self.path = root / hashlib.sha256(text.encode()).hexdigest()[:32]
        self._lock = root / f"{self.path.name}.lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time compiles or loads this graph; another one waits and then loads."""
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def is_whole(self) -> bool:
        try:
            manifest = json.loads((self.path / _MANIFEST).read_text())
            return bool(manifest["identity"] == self._identity and manifest["files"] == self._file_hashes())
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError) as damage:
            logger.warning("the manifest of the kept graph in %s is damaged (%s)", self.path, damage)
            return False

    def seal(self) -> None:
        """Write the manifest: from here on the folder counts."""
        manifest = {"identity": self._identity, "files": self._file_hashes()}
        temporary = self.path / f"{_MANIFEST}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(manifest, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / _MANIFEST)

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _file_hashes(self) -> dict[str, str]:
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.path)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
                if not path.name.startswith(_MANIFEST)}


class _KeptGraph:
    """Loads or compiles on the first call."""

    def __init__(self, module: GraphEngineDecode, folder: GraphFolder):
        self.folder = folder
        self.was_loaded = False
        method = own_code(module.decode, module.name)
        assert isinstance(method, types.MethodType), "cache_compile wants a bound method"
        self._decode = torchair.load("torchair").inference.cache_compile(
            method, config=graph_engine_config(), dynamic=False, cache_dir=str(folder.path), ge_cache=True)
        self._is_ready = False

    def __call__(self, inputs: StepInputs) -> Tensor:
        if self._is_ready:
            return self._decode(*inputs.given())
        with self.folder.locked():
            was_whole = self.folder.is_whole()
            if not was_whole:
                self.folder.clear()
            with ResourceErrors():
                output = self._decode(*inputs.given())
                torch.npu.synchronize()
            # torchair compiles anew, with a word in its log only, when it cannot read what it finds.
            self.was_loaded = was_whole and self.folder.is_whole()
            if not self.was_loaded:
                self.folder.seal()
        self._is_ready = True
        return output


def make_compiler(settings: GraphSettings, attention: NpuAttention) -> GraphCompiler:
    """The compiler for `settings`. Captured graphs take the lengths of `attention` at each replay."""
    if settings.mode == "reduce-overhead":
        # A trace infers strides by torch's rules, and torch_npu's operators have their own. Our modules need neither.
        is_recorded = settings.has_foreign_modules or npu_settings().capture == "recorded"
        return (RecordedGraphCompiler if is_recorded else AclGraphCompiler)(attention)
    return GraphEngineCompiler() if settings.cache_dir is None else CachedGraphEngineCompiler(settings)


def limited_compiler(settings: GraphSettings, attention: NpuAttention, most_graphs: int | None) -> GraphCompiler:
    """The same for at most `most_graphs` graphs; None: any number."""
    compiler = make_compiler(settings, attention)
    return compiler if most_graphs is None else LimitedGraphCompiler(compiler, most_graphs)
