"""Writes a quantised copy of a 16- or 32-bit checkpoint, in any format that npu_runner reads, by rounding to the
nearest.

    python scripts/quantize_checkpoint.py MODEL TARGET --format fp8-block
    python scripts/quantize_checkpoint.py MODEL TARGET --format w4a16 --group-size 32 --with-tower

For tests, for a look at what a format costs in accuracy, and where nobody has published one. It calibrates nothing: a
published checkpoint of the same format is usually better in 4 bits. Embeddings, output head, norms, routers, gates,
convolutions and mergers stay as they are; so does the vision tower without --with-tower. Fused experts become single
ones, except in FP8. The source's other files are copied.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from quantised.writing import FORMATS, quantise

from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of a checkpoint in 16 or 32 bits, or an embedded model")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--group-size", type=int, default=128, help="inputs that share a scale; of fp8-block, the side")
    parser.add_argument("--with-tower", action="store_true", help="quantise the vision tower's blocks, too")
    given = parser.parse_args()
    if given.target.exists() and any(given.target.iterdir()):
        parser.error(f"{given.target} is not empty; name another folder")
    try:
        with torch.inference_mode():
            count = quantise(resolve_checkpoint(given.model), given.target, given.format, group_size=given.group_size,
                             with_tower=given.with_tower)
    except ConfigError as error:
        sys.exit(f"quantize_checkpoint.py: {error}")
    print(f"{count} weights written as {given.format} to {given.target}")


if __name__ == "__main__":
    main()
