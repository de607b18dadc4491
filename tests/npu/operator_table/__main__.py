"""Makes table.json: what the wheels of the version table have of the names that `platforms/npu` uses.

    python -m tests.npu.operator_table              # downloads each wheel, reads its text, forgets it: minutes
    python -m tests.npu.operator_table --texts DIR  # keeps the text files there, and takes them from there next time

Nothing is installed, and nothing of a wheel is run. One wheel at a time is on the disk (40 MB). uses.py finds names,
wheels.py what a wheel says of them; test_operator_table.py compares.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

from npu_runner.platforms.npu.versions import OLD_WHEELS, PAIRINGS
from tests.npu.operator_table.uses import Reader
from tests.npu.operator_table.wheels import Wheel

HERE = Path(__file__).parent
TABLE = HERE / "table.json"
SOURCES = HERE.parents[2] / "npu_runner/platforms/npu"
PACKAGE = "npu_runner.platforms.npu"
WHEELS = (*(pair.torch_npu for pair in PAIRINGS), *OLD_WHEELS)

_TEXT_SUFFIXES = (".py", ".yaml")
_PYTHON = "3.11"  # every wheel of the table exists for it, on x86_64; the text is the same on all
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# Beside what is used: what a change of platforms/npu may want next.
_OTHERS = (
    *(f"torch.npu.{name}" for name in (  # through DeviceMemory, which knows no vendor
        "mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats",
        "empty_cache", "synchronize")),
    *(f"torch.ops.npu.{name}" for name in (
        "npu_fused_infer_attention_score_v2", "npu_gelu", "npu_prefetch", "npu_qkv_rms_norm_rope_cache",
        "npu_gather_pa_kv_cache", "npu_top_k_top_p", "npu_mm_all_reduce_base", "npu_mrope",
        "_npu_fused_infer_attention_score_get_max_workspace", "npu_chunk_gated_delta_rule",
        "npu_moe_finalize_routing", "npu_moe_gating_top_k", "npu_gemma_rms_norm")),
    *(f"torchair.CompilerConfig().experimental_config.{name}" for name in (
        "tiling_schedule_optimize", "topology_sorting_strategy", "keep_inference_input_mutations")),
    *(f"GE converter of torch.ops.npu.{name}" for name in (
        "npu_scatter_pa_kv_cache_functional", "npu_apply_rotary_pos_emb", "npu_rotary_mul", "npu_gelu", "npu_swiglu",
        "npu_rms_norm", "npu_add_rms_norm", "npu_moe_gating_top_k_softmax_v2", "npu_moe_init_routing_v2",
        "npu_grouped_matmul", "npu_moe_finalize_routing", "npu_moe_token_unpermute", "_npu_moe_token_unpermute",
        "npu_recurrent_gated_delta_rule_functional", "npu_chunk_gated_delta_rule", "npu_scatter_nd_update")),
    "torchair._ge_concrete_graph.ge_apis.ScatterPaKvCache", "torch.npu.graph", "torch.npu.NPUGraph",
    "torch.npu.Stream", "torch.npu.Event", "torch.npu.stream", "torch.npu.current_stream",
)


def fetch(wheel: str, texts: Path) -> Path:
    """The text files of one wheel, below `texts`."""
    folder = texts / wheel
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as download:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:",
             "--python-version", _PYTHON, *(word for name in _PLATFORMS for word in ("--platform", name)),
             "--dest", download, f"torch_npu=={wheel}"], check=True)
        (path,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(_TEXT_SUFFIXES)])
    return folder


def table_of(wheels: dict[str, Wheel], paths: list[str]) -> dict[str, dict[str, str]]:
    """Name to what it is to the wheels in which it is that; a wheel that is missing under a name does not have it."""
    table: dict[str, dict[str, str]] = {}
    for path in paths:
        facts = defaultdict(list)
        for name, wheel in wheels.items():
            fact = wheel.fact(path)
            if fact is not None:
                facts[fact].append(name)
        table[path] = {fact: "all" if len(names) == len(wheels) else " ".join(names) for fact, names in facts.items()}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="where the wheels' text files are, and are kept")
    folder = parser.parse_args().texts
    paths = sorted({use.path for use in Reader(SOURCES, PACKAGE).uses} | set(_OTHERS))
    with tempfile.TemporaryDirectory() as temporary:
        texts = folder or Path(temporary)
        wheels = {name: Wheel(fetch(name, texts)) for name in WHEELS}
        names = table_of(wheels, paths)
    TABLE.write_text(json.dumps({"wheels": " ".join(WHEELS), "names": names}, indent=1) + "\n")
    print(f"{len(names)} names of {len(WHEELS)} wheels: {TABLE}")


if __name__ == "__main__":
    main()
