"""Tells one checkpoint from another without reading all of it. Knows nothing of what the files mean, bar their names.

Configuration and tokenizer files are hashed whole. Of weights: the size, the header (names, types and shapes of all
tensors) and samples spread evenly over the file, which a fine-tuned or re-quantised copy does not survive.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from npu_runner.batch.files.durable import clear_file_errors

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
    "*preprocessor_config.json",
    "processor_config.json",
    "*.safetensors.index.json",
)
_SAMPLED = ("*.safetensors",)
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10
_MAX_HEADER_BYTES = 100 << 20


def fingerprint_model(folder: Path) -> dict[str, str]:
    """A line per file that shapes answers: its size and a hash."""
    lines = {}
    with clear_file_errors(f"model {folder}"):
        for patterns, digest_of in ((_WHOLE, _digest_whole), (_SAMPLED, _digest_samples)):
            for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
                lines[path.name] = f"{path.stat().st_size} bytes, blake2b {digest_of(path)}"
    return lines


def digest_lines(lines: dict[str, str]) -> str:
    """One short name for all of them."""
    text = "\n".join(f"{name}: {line}" for name, line in sorted(lines.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
