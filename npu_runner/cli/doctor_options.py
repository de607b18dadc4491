"""The options of `npu-runner doctor`, apart from its code, which imports far more than a parser should."""

from __future__ import annotations

import argparse

from npu_runner.config import GRAPH_MODES
from npu_runner.platforms import AUTO, BUILT_IN


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", default=AUTO, metavar="NAME",
                        help=f"what to look at: {', '.join(BUILT_IN)}, or an installed package's; auto: the first of "
                        "which anything is seen, in this order")
    parser.add_argument("--graph-mode", choices=[mode for mode in GRAPH_MODES if mode != "auto"], action="append",
                        help="a mode to generate in; may be repeated (default: eager, and the platform's default)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="generate with N ranks")
    parser.add_argument("--skip-generation", action="store_true", help="look at the host only; takes seconds")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for each generation")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
