"""Trains one of the embedded checkpoints on fresh drawings. Knows no family: it is told what to build and how it runs.

Only transformers' own classes are trained here, never this project's models: the result is the yardstick they are
measured with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AttentionInterface, PreTrainedModel, set_seed

from scripts.shapes.batches import Batches
from scripts.shapes.checkpoint import TEMPORAL_PATCH, read_config, read_tokenizer, save_checkpoint
from scripts.shapes.drawing import TRAIN_SEEDS, VALIDATION_SEEDS

COMPILING_STEPS = 30
"""Layers are compiled in these steps; their time does not count for the learning rate."""


@dataclass(frozen=True)
class Family:
    """A program's model: the embedded one, transformers' class for it, and the logits of a batch's answer tokens."""

    program: str
    description: str
    model_name: str
    model_class: type[PreTrainedModel]
    forward: Callable[[nn.Module, dict[str, Any]], Tensor]
    start: Callable[[nn.Module], None] = lambda model: None
    """Changes a fresh model's weights before the first step."""
    by_branch: bool = False
    """Rows as branched_delta_net.py wants them."""


def parse_arguments(family: Family) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=family.description, formatter_class=raw)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step; each asks several questions")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup-steps", type=int, default=500)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--easy-steps", type=int, default=0, help="first steps with at most two things in an image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14, help="processes that draw")
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--validation-samples", type=int, default=1024)
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="save and stop after this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile every layer")
    parser.add_argument("--init-from", type=Path, help="folder of such a checkpoint, whose weights are trained on")
    return parser.parse_args()


def attend_packed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  **kwargs: Any) -> tuple[Tensor, None]:
    """Vision attention over images of any size packed in one row, in one kernel. (1, heads, patches, dim) tensors."""
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    packed = [tensor[0].transpose(0, 1).to(torch.bfloat16) for tensor in (query, key, value)]
    return varlen_attn(*packed, offsets, offsets, longest, longest).unsqueeze(0), None


def encode_images(model: Any, batch: dict[str, Any]) -> Any:
    """The tower's output for a batch's patches."""
    patches = (batch["patches"].float() / 127.5 - 1).unsqueeze(2).expand(-1, -1, TEMPORAL_PATCH, -1).flatten(1)
    names = ("grid_thw", "interp_indices", "interp_weights", "cu_seqlens", "max_seqlen")
    return model.model.visual(patches, position_ids=batch["vision_positions"], **{name: batch[name] for name in names})


def branch_mask(branches: Tensor) -> Tensor:
    """True where a token may look: back, at the shared prefix (branch 0) and at its own branch. (B, 1, T, T)."""
    same = branches[:, :, None] == branches[:, None, :]
    length = branches.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=branches.device).tril()
    return ((same | (branches == 0)[:, None, :]) & causal)[:, None]


def to_device(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device, non_blocking=True) if isinstance(value, Tensor) and name != "grid_thw" else value
            for name, value in batch.items()}


def learning_rate(step: int, time_share: float, arguments: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a hundredth at the last step or second, whichever comes first.
    `time_share` is the part of the seconds that has passed."""
    if step < arguments.warmup_steps:
        return arguments.learning_rate * (step + 1) / arguments.warmup_steps
    done = min(1.0, max(step / arguments.steps, time_share))
    return arguments.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def validate(family: Family, model: nn.Module, batches: list[dict[str, Any]], device: str) -> dict[str, float]:
    """Part of whole answers that greedy decoding would give, by kind: every token right after the right ones.

    Runs with gradients on, like training: switching them off would compile every layer a second time.
    """
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for batch in batches:
        on_device = to_device(batch, device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            wrong_tokens = (family.forward(model, on_device).argmax(-1) != on_device["targets"]).float()
        wrong = torch.zeros(len(batch["kinds"]), device=device).index_add_(0, on_device["owners"], wrong_tokens)
        asked.update(batch["kinds"])
        right.update(kind for kind, misses in zip(batch["kinds"], wrong.tolist(), strict=True) if not misses)
    accuracy = {kind: round(right[kind] / asked[kind], 4) for kind in sorted(asked)}
    return {"all": round(right.total() / asked.total(), 4), **accuracy}


def build_model(family: Family, arguments: argparse.Namespace, config: Any) -> nn.Module:
    model = family.model_class(config)
    family.start(model)
    if arguments.init_from:
        model = family.model_class.from_pretrained(arguments.init_from, config=config, dtype=torch.float32)
    model = model.to(arguments.device)
    if arguments.device != "cpu":
        AttentionInterface.register("flash_packed", attend_packed)
        model.model.visual.config._attn_implementation = "flash_packed"
    if arguments.compile:
        torch._dynamo.config.recompile_limit = 64  # beyond it layers would run uncompiled without a word
        for layer in model.model.visual.blocks:
            layer.compile(dynamic=True)
        for layer in model.model.language_model.layers:
            layer.compile(dynamic=not family.by_branch)
    return model.train()


def build_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """Weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=(0.9, 0.98), fused=arguments.device != "cpu")


class Log:
    """Lines of JSON, on the screen and in the checkpoint's folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "training_log.jsonl").open("w")

    def write(self, **record: Any) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        print(line, file=self.file, flush=True)


def train_step(family: Family, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any],
               device: str) -> Tensor:
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        logits = family.forward(model, batch)
    losses = nn.functional.cross_entropy(logits, batch["targets"], reduction="none")
    loss = (losses * batch["weights"]).sum() / batch["weights"].sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(family: Family) -> None:
    arguments = parse_arguments(family)
    started = time.monotonic()
    set_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = arguments.device
    tokenizer_json = read_tokenizer().backend_tokenizer.to_str()
    data = Batches(TRAIN_SEEDS, tokenizer_json, arguments.batch_size, arguments.steps, arguments.easy_steps,
                   by_branch=family.by_branch)
    # Layers are compiled for this size of a batch.
    held_out = Batches(VALIDATION_SEEDS, tokenizer_json, arguments.batch_size,
                       -(-arguments.validation_samples // arguments.batch_size), by_branch=family.by_branch)

    model = build_model(family, arguments, read_config(family.model_name))
    optimizer = build_optimizer(model, arguments)
    drawn = {"num_workers": arguments.workers, "batch_size": None, "pin_memory": device != "cpu"}
    drawn |= {"prefetch_factor": 6, "multiprocessing_context": "spawn"} if arguments.workers else {}
    loader = iter(DataLoader(data, **drawn))
    validation = [held_out[index] for index in range(len(held_out))]

    log = Log(arguments.output)
    log.write(command=" ".join(["python", "-m", f"scripts.shapes.{family.program}", *sys.argv[1:]]),
              device=torch.cuda.get_device_name() if device != "cpu" else "cpu", torch=torch.__version__,
              parameters=sum(parameter.numel() for parameter in model.parameters()),
              seconds=round(time.monotonic() - started, 1))
    step, waited, compiling, loss = 0, 0.0, 0.0, torch.zeros(())
    while step < arguments.steps and time.monotonic() - started < arguments.max_seconds:
        if step == COMPILING_STEPS:
            compiling = time.monotonic() - started
        seconds = time.monotonic() - started - compiling
        rate = learning_rate(step, seconds / (arguments.max_seconds - compiling), arguments)
        for group in optimizer.param_groups:
            group["lr"] = rate
        waiting = time.monotonic()
        batch = to_device(next(loader), device)
        waited += time.monotonic() - waiting
        loss = train_step(family, model, optimizer, batch, device)
        step += 1
        if step % arguments.validate_every == 0 or step == arguments.steps:
            log.write(step=step, seconds=round(time.monotonic() - started, 1), waited_for_data=round(waited, 1),
                      learning_rate=round(rate, 6), loss=round(loss.item(), 4),
                      accuracy=validate(family, model, validation, device))
    del loader  # ends the drawing processes
    if step < arguments.steps:
        log.write(step=step, stopped="max_seconds", loss=round(loss.item(), 4))
    rounded = save_checkpoint(model, family.model_name, arguments.output)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), rounded.parameters(), strict=True):
            ours.copy_(theirs)
    log.write(step=step, after_rounding_to_bfloat16=validate(family, model, validation, device))

