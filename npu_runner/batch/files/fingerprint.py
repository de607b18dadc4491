"""Tells one checkpoint from another. Knows nothing of what the files mean, bar their names.

Twice. Before anything is loaded, configuration and tokenizer files are hashed whole, and of weights the size, the
header (names, types and shapes of all tensors) and samples: a few reads tell most models apart. While the model loads,
every byte of the weights follows (SHA-256, 1.5 GB/s a thread where the processor has an instruction for it, from pages
that the loader wants as well).
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors
from npu_runner.checkpoint.weight_files import weight_files
from npu_runner.errors import JobError

_WHOLE = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/tool_use.jinja",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.safetensors.index.json",
    "quantize_config.json",
    "quant_model_description*.json",
)
_NUM_SAMPLES = 64
_MAX_DIGEST_THREADS = 4
_SAMPLE_BYTES = 64 << 10
_MAX_HEADER_BYTES = 100 << 20
_READ_BYTES = 4 << 20


def num_digest_threads(num_cores: int) -> int:
    return max(1, min(_MAX_DIGEST_THREADS, num_cores // 2))


def fingerprint_model(folder: Path) -> dict[str, str]:
    """A line per file that shapes answers: its size and a hash, of weights only over samples."""
    lines = {}
    with clear_file_errors(f"model {folder}"):
        for files, digest_of in ((_small_files(folder), _digest_whole), (_weights(folder), _digest_samples)):
            for path in files:
                lines[path.name] = f"{path.stat().st_size} bytes, blake2b {digest_of(path)}"
    return lines


def files_of_model(folder: Path) -> list[Path]:
    """The files that `fingerprint_model` reads."""
    return [*_small_files(folder), *_weights(folder)]


def refuse_changed_files(folder: Path, lines: dict[str, str]) -> None:
    """Once all is loaded. Raises JobError where `fingerprint_model` does not find what it found before."""
    now = fingerprint_model(folder)
    changed = sorted(name for name in {*now, *lines} if now.get(name) != lines.get(name))
    if changed:
        raise _changed(folder, changed)


def _changed(folder: Path, names: list[str]) -> JobError:
    return JobError(f"model {folder}: {', '.join(names)} changed while the model loaded; run the same command again "
                    "once the folder stays as it is")


def digest_lines(lines: dict[str, str]) -> str:
    """One short name for all of them."""
    text = "\n".join(f"{name}: {line}" for name, line in sorted(lines.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class WeightDigests:
    """Hashes the weights whole in threads of its own, from when it is entered until it is left or all is read."""

    def __init__(self, folder: Path, *, num_threads: int):
        self._folder = folder
        self._num_threads = num_threads
        self._digests: dict[Path, Future[str]] = {}
        self._states: dict[Path, tuple[int, ...]] = {}
        self._is_over = threading.Event()

    def __enter__(self) -> WeightDigests:
        with clear_file_errors(f"model {self._folder}"):
            self._states = {path: _state_of(path) for path in _weights(self._folder)}
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="weight-digest")
        self._digests = {path: self._threads.submit(self._digest, path) for path in self._states}
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._threads.shutdown(cancel_futures=True)

    @property
    def is_done(self) -> bool:
        """`lines` returns at once."""
        return all(digest.done() for digest in self._digests.values())

    def lines(self) -> dict[str, str]:
        """A line per file, once all are read. Call it when the model is loaded.

        Raises JobError when a file is not what it was when this was entered: the loader may have read either.
        """
        with late_file_errors(f"model {self._folder}"):
            lines = {
                path.name: f"{self._states[path][0]} bytes, sha256 {digest.result()}"
                for path, digest in self._digests.items()
            }
            changed = [path.name for path, state in self._states.items() if _state_of(path) != state]
        if changed:
            raise _changed(self._folder, changed)
        return lines

    def _digest(self, path: Path) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
        with open(path, "rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not self._is_over.is_set():
                digest.update(buffer[:count])
        return digest.hexdigest()


def _small_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _WHOLE for path in folder.glob(pattern) if path.is_file()})


def _weights(folder: Path) -> list[Path]:
    """The files that the loader opens. One that is missing stops the loader, by name."""
    return [path for name in weight_files(folder).names if (path := folder / name).is_file()]


def _state_of(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


def _digest_whole(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _digest_samples(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        digest.update(prefix + file.read(min(int.from_bytes(prefix, "little"), _MAX_HEADER_BYTES)))
        last_start = max(0, size - _SAMPLE_BYTES)
        for index in range(_NUM_SAMPLES):
            file.seek(last_start * index // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
