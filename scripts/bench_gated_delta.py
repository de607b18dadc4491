"""One Gated DeltaNet layer of a 9B qwen3_5 shape: ours, transformers' chunks and its token loop, in the same run.

    python scripts/bench_gated_delta.py [--platform cpu] [--tokens 64 512 2048] [--batch 1 8 64] [--repeats 5]

Prompts: milliseconds of the gated delta rule from convolved queries, keys and values on, one row of so many tokens, the
state kept. Decoding: convolution and rule of one token a row. transformers computes the same from the same numbers; the
largest difference is printed with it. Prints two tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_common import commit, versions
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from npu_runner.platforms import pick_platform
from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
from npu_runner.platforms.platform import Platform
from npu_runner.platforms.step_inputs import AttentionMetadata

SHAPE = GatedDeltaShape(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)


class Layer:
    """States of `batch_size` rows and what they are given."""

    def __init__(self, platform: Platform, batch_size: int, num_tokens: int):
        self.platform, self.device = platform, platform.devices.set_device(0)
        self.backend: GatedDeltaBackend = platform.make_gated_delta(SHAPE, torch.float32)
        num = batch_size * num_tokens
        self.qkv, self.a, self.b = (torch.randn(num, width, device=self.device)
                                    for width in (SHAPE.num_channels, SHAPE.num_v_heads, SHAPE.num_v_heads))
        self.conv = torch.randn(SHAPE.num_channels, SHAPE.conv_kernel_size, device=self.device)
        self.neg_exp_A = -torch.empty(SHAPE.num_v_heads, device=self.device).uniform_(1, 16)
        self.dt_bias = torch.randn(SHAPE.num_v_heads, device=self.device) - 4
        self.state = torch.zeros(batch_size, *SHAPE.state_shape, device=self.device)
        self.conv_state = torch.zeros(batch_size, *SHAPE.conv_state_shape, device=self.device)
        is_prefill = num_tokens > 1
        lens = [num_tokens] * batch_size
        plan = self.backend.plan_prefill(lens, lens, [], self.device) if is_prefill else None
        nothing = torch.empty(0)
        slots = torch.arange(batch_size, dtype=torch.int32, device=self.device)
        lens_B = torch.tensor(lens, dtype=torch.int32, device=self.device)
        self.metadata = AttentionMetadata(is_prefill, nothing, lens_B, nothing, state_slots_B=slots, state_plan=plan)

    def rule(self) -> Tensor:
        return self.backend.delta_rule(self.qkv, self.a, self.b, self.neg_exp_A, self.dt_bias, self.state,
                                       self.metadata)

    def decode(self) -> Tensor:
        self.qkv = self.backend.convolve(self.qkv, self.conv, self.conv_state, self.metadata)
        return self.rule()

    def transformers(self, function: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """The same of one row from zeros, with the gates its layer would compute."""
        q, k, v = self.qkv.split([SHAPE.key_size, SHAPE.key_size, SHAPE.value_size], dim=-1)
        q, k = (x.unflatten(-1, (SHAPE.num_k_heads, -1))[None] for x in (q, k))
        g = self.neg_exp_A * F.softplus(self.a + self.dt_bias)
        return function(q, k, v.unflatten(-1, (SHAPE.num_v_heads, -1))[None], g[None], self.b.sigmoid()[None],
                        output_final_state=True, use_qk_l2norm_in_kernel=True)[0][0]

    def milliseconds(self, run: Callable[[], Tensor], repeats: int) -> float:
        """The median of `repeats` after one more."""
        times = []
        for _ in range(repeats + 1):
            self.platform.memory.synchronize()
            started = time.perf_counter()
            run()
            self.platform.memory.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times[1:])


def bench_prompt(platform: Platform, num_tokens: int, repeats: int) -> dict[str, float]:
    layer = Layer(platform, 1, num_tokens)
    chunks, loop = (lambda: layer.transformers(torch_chunk_gated_delta_rule),
                    lambda: layer.transformers(torch_recurrent_gated_delta_rule))
    return {"tokens": num_tokens, "ours": layer.milliseconds(layer.rule, repeats),
            "chunks": layer.milliseconds(chunks, repeats), "loop": layer.milliseconds(loop, 1),
            "difference": (layer.rule() - chunks()).abs().max().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    platform = pick_platform(options.platform)
    prompts, decodes = [], []
    with torch.inference_mode():
        print(f"{'tokens':>8}{'ours':>12}{'tf chunks':>12}{'tf loop':>12}   loop / ours   largest difference")
        for num_tokens in options.tokens:
            row = bench_prompt(platform, num_tokens, options.repeats)
            prompts.append(row)
            print(f"{num_tokens:>8}{row['ours']:>9.1f} ms{row['chunks']:>9.1f} ms{row['loop']:>9.1f} ms"
                  f"{row['loop'] / row['ours']:>14.1f}   {row['difference']:.1e}")
        print(f"{'batch':>8}{'decode':>12}{'GB/s of states':>17}")
        for batch_size in options.batch:
            layer = Layer(platform, batch_size, 1)
            milliseconds = layer.milliseconds(layer.decode, options.repeats)
            moved = 2 * layer.state.nbytes / milliseconds / 1e6
            decodes.append({"batch": batch_size, "ms": milliseconds, "GB/s": moved})
            print(f"{batch_size:>8}{milliseconds:>9.2f} ms{moved:>17.1f}")
    print(json.dumps({"platform": options.platform, "threads": torch.get_num_threads(), "prompts": prompts,
                      "decodes": decodes, "commit": commit(),
                      **versions("torch", "transformers")}))


if __name__ == "__main__":
    main()
