"""Writes a quantised copy of a 16- or 32-bit checkpoint, in any format that npu_runner reads, by rounding to the
nearest.

    python scripts/quantize_checkpoint.py MODEL TARGET --format fp8-block
    python scripts/quantize_checkpoint.py MODEL TARGET --format w4a16 --group-size 32 --with-tower
    python scripts/quantize_checkpoint.py MODEL TARGET --format w8a8-static --calibrate rows.jsonl

For tests, for a look at what a format costs in accuracy, and where nobody has published one. Weights are not
calibrated: a published checkpoint of the same format is usually better in 4 bits. Static scales of inputs are measured:
the rows' messages go through the model on the cpu platform, and the least and the most of each linear's inputs make its
scale. Rows are those of a job, or objects with messages; answers may be among these. The inputs of experts stay
dynamic. Embeddings, output head, norms, routers, gates, convolutions and mergers stay as they are; so does the vision
tower without --with-tower. Fused experts become single ones, except in FP8. The source's other files are copied.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.errors import NpuRunnerError
from scripts.quantised.calibration import input_ranges
from scripts.quantised.writing import FORMATS, STATIC, quantise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of a checkpoint in 16 or 32 bits, or an embedded model")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--group-size", type=int, default=128, help="inputs that share a scale; of fp8-block, the side")
    parser.add_argument("--with-tower", action="store_true", help="quantise the vision tower's blocks, too")
    parser.add_argument("--calibrate", type=Path, metavar="ROWS", help="JSON lines that static scales are measured "
                        f"over, for {' and '.join(STATIC)}")
    parser.add_argument("--allowed-media-dir", metavar="DIR", help="folder below which the rows' images lie")
    given = parser.parse_args()
    if (given.format in STATIC) != (given.calibrate is not None):
        parser.error(f"--calibrate is for {' and '.join(STATIC)}, and these need it; --format is {given.format}")
    if given.target.exists() and any(given.target.iterdir()):
        parser.error(f"{given.target} is not empty; name another folder")
    try:
        model, ranges = resolve_checkpoint(given.model), None
        if given.calibrate is not None:
            ranges = input_ranges(model, given.calibrate, allowed_media_dir=given.allowed_media_dir)
        with torch.inference_mode():
            count = quantise(model, given.target, given.format, group_size=given.group_size,
                             with_tower=given.with_tower, ranges=ranges)
    except (NpuRunnerError, OSError) as error:
        sys.exit(f"quantize_checkpoint.py: {error}")
    print(f"{count} weights written as {given.format} to {given.target}")


if __name__ == "__main__":
    main()
