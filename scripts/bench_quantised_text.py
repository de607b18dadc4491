"""Text of one shape on one GPU, random weights, with quantised weights and keys or without: tokens a second of
benchmark (a)'s requests, and where the time of a decode step at 256 sequences goes.

    python scripts/bench_quantised_text.py [--quantization fp8] [--kv-cache-dtype fp8] [--repeats 1] [--steps 20]
    python scripts/bench_quantised_text.py --checkpoint gptq --kv-cache-dtype auto --repeats 0 --batch-sizes 1 8 64
    python scripts/bench_quantised_text.py --model qwen3-30b-a3b --quantization auto --kv-cache-dtype auto

Prints the kernels of the steps by their share of the time, then one JSON line. --steps 0 leaves them out. --batch-sizes
adds the median of 60 decode steps of so many rows at a context of 512. --checkpoint is a form of weights that
checkpoints have; --quantization is left alone then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_common import commit, versions
from bench_device_ours import _begin_decoding, _finish, _text, _timed_steps
from bench_device_shapes import TEXT, make_text_model
from bench_device_work import SIZES

from npu_runner import LLM

NUM_SEQS = 256
FORMS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
             "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                  "fmt": "e4m3"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TEXT, default="qwen3-8b", help="the shape (default: %(default)s)")
    parser.add_argument("--quantization", default="fp8", help="auto, int8 or fp8 (default)")
    parser.add_argument("--kv-cache-dtype", default="fp8", help="auto or fp8 (default)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="under the profiler, after as many without")
    parser.add_argument("--checkpoint", choices=FORMS, help="the form of the weights in the checkpoint")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[])
    arguments = parser.parse_args()
    settings = {"quantization": "auto" if arguments.checkpoint else arguments.quantization,
                "kv_cache_dtype": arguments.kv_cache_dtype}
    sizes = SIZES["real"]
    with tempfile.TemporaryDirectory() as name:
        path = make_text_model(Path(name), arguments.model)
        if arguments.checkpoint:
            write_form(Path(path), FORMS[arguments.checkpoint])
        with LLM(path, load_format="dummy", platform="cuda", max_num_seqs=NUM_SEQS, max_model_len=2 * sizes.most_tokens,
                 **settings) as llm:
            _text(llm, SIZES["tiny"], 0)  # warms up
            counted = [_text(llm, sizes, each) for each in range(arguments.repeats)]
            rates = [count / seconds for count, seconds in counted]
            found = {"model": arguments.model, "tokens_per_second": rates, "checkpoint": arguments.checkpoint,
                     "step_ms_by_batch_size": {size: step_ms(llm, size) for size in arguments.batch_sizes},
                     **(profiled_steps(llm, arguments.steps) if arguments.steps else {})}
    for microseconds, calls, kernel in found.get("kernels", []):
        print(f"{microseconds:10.0f} us a step {calls:6.1f} calls  {kernel}")
    print(json.dumps({**settings, **found, "commit": commit(), "device": torch.cuda.get_device_name(), **versions()}))


def write_form(path: Path, form: dict[str, Any]) -> None:
    """Random numbers are made in the form that config.json names."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": form}))


def step_ms(llm: LLM, batch_size: int) -> float:
    _begin_decoding(llm, batch_size, SIZES["real"], batch_size)
    seconds = _timed_steps(llm, 60)
    _finish(llm)
    return round(1e3 * statistics.median(seconds), 3)


def profiled_steps(llm: LLM, count: int) -> dict[str, Any]:
    """Milliseconds of a decode step at a context of 512, and its kernels: microseconds and calls a step."""
    _begin_decoding(llm, NUM_SEQS, SIZES["real"], 0)
    seconds = _timed_steps(llm, count)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _timed_steps(llm, count)
    _finish(llm)
    kernels = sorted(((event.device_time_total / count, event.count / count, event.key[:100])
                      for event in profile.key_averages() if event.device_time_total), reverse=True)
    return {"step_ms": 1e3 * sum(seconds) / count, "kernels": kernels[:16]}


if __name__ == "__main__":
    main()
