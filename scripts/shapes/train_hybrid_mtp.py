"""Trains a head for multi-token prediction for npu_runner/assets/shapes-hybrid, whose own weights stay as they are.

The checkpoint answers questions about fresh drawings. Of each prompt with its answer the embedded tokens and the final
hidden states are kept. The head learns to name the token after next of these answers, and from what it made of that
pair the one behind it. Its layer and norms are transformers' own classes; a whole head it has not. Some minutes on one
core of a CPU:

    OMP_NUM_THREADS=1 python -m scripts.shapes.train_hybrid_mtp --output npu_runner/assets/shapes-hybrid

B rows of a batch, T tokens of the longest one, D hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding

from npu_runner import LLM, SamplingParams
from npu_runner.assets import EMBEDDED
from npu_runner.request.prompt_inputs import PromptInputs
from scripts.shapes.drawing import TRAIN_SEEDS, VALIDATION_SEEDS, draw_example, draw_json_example

SHAPES_HYBRID = EMBEDDED["shapes-hybrid"]
PART_IN_JSON = 0.4
BATCH_SIZE, LEARNING_RATE = 24, 2e-3
WEIGHTS = (1.0, 0.5)
"""Weights of the losses of a first and of a second draft."""


@dataclass(frozen=True)
class Row:
    """A prompt and its answer: tokens (T,), where they stand (3, T), embedded tokens and final hidden states (T, D)."""

    token_ids: Tensor
    positions: Tensor
    embedded_TD: Tensor
    hidden_TD: Tensor
    num_prompt_tokens: int


class Head(nn.Module):
    """The head under its checkpoints' names; see npu_runner/models/decoder.py."""

    def __init__(self, config: Any):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (Qwen3_5RMSNorm(size, eps) for _ in range(3))
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.rotary = [Qwen3_5TextRotaryEmbedding(config)]

    def forward(self, next_BTD: Tensor, hidden_BTD: Tensor, positions_3BT: Tensor) -> Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(next_BTD), self.pre_fc_norm_hidden(hidden_BTD)], dim=-1)
        x_BTD = self.fc(both)
        x_BTD = self.layers[0](x_BTD, position_embeddings=self.rotary[0](x_BTD, positions_3BT), attention_mask=None)
        return self.norm(x_BTD)


def collect(seeds: Sequence[int]) -> list[Row]:
    """Fresh drawings, and what shapes-hybrid answers of itself."""
    examples = [(draw_json_example if random.Random(seed).random() < PART_IN_JSON else draw_example)(seed)
                for seed in seeds]
    with LLM("shapes-hybrid", platform="cpu", enable_prefix_caching=False, preprocessing_workers=0,
             async_scheduling=False) as llm:
        prompts = [llm.engine.processor(example.conversation()) for example in examples]
        answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=120))
        steps: Any = llm.engine._executor._runner.steps  # type: ignore[attr-defined]
        rows = []
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = _with_answer(prompt, answer.token_ids)
            seen: list[Any] = []
            steps.record_prompts = lambda step, x_TD, hidden_TD, seen=seen: seen.append((step, x_TD, hidden_TD))
            llm.generate([whole], SamplingParams(temperature=0.0, max_tokens=1))
            ((step, x_TD, hidden_TD),) = seen
            rows.append(Row(torch.tensor(whole.token_ids), torch.from_numpy(step.batch.positions.copy()).long(),
                            x_TD.clone(), hidden_TD.clone(), len(prompt.token_ids)))
    return rows


def _with_answer(prompt: PromptInputs, tokens: list[int]) -> PromptInputs:
    assert prompt.positions_3T is not None, "the model has positions of three axes"
    places = len(prompt.token_ids) + prompt.position_delta + np.arange(len(tokens), dtype=np.int32)
    positions = np.concatenate([prompt.positions_3T, np.broadcast_to(places, (3, len(tokens)))], axis=1)
    return replace(prompt, token_ids=[*prompt.token_ids, *tokens], positions_3T=positions)


def drafted(head: Head, rows: Sequence[Row], table_VD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(logits (N, V), tokens (N,)) of all first drafts behind tokens of answers, and of all second ones."""
    length = max(len(row.token_ids) for row in rows)

    def padded(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([F.pad(value, (0, 0, 0, length - len(value))) for value in values])

    tokens_BT = torch.stack([F.pad(row.token_ids, (0, length - len(row.token_ids))) for row in rows])
    positions = torch.stack([F.pad(row.positions, (0, length - row.positions.shape[1])) for row in rows], dim=1)
    embedded = padded([row.embedded_TD for row in rows])
    made = head(embedded[:, 1:], padded([row.hidden_TD for row in rows])[:, :-1], positions[..., :-1])
    again = head(embedded[:, 2:], made[:, :-1], positions[..., 1:-1])
    found = []
    for ahead, result in ((2, made), (3, again)):
        # A pair that begins at place p names the token p + 2; those from the last token of the prompt on.
        learned = [(index, place) for index, row in enumerate(rows)
                   for place in range(row.num_prompt_tokens - 1, len(row.token_ids) - ahead)]
        if learned:
            at, places = (torch.tensor(each) for each in zip(*learned, strict=True))
            found.append((result[at, places] @ table_VD.T, tokens_BT[at, places + ahead]))
    return found


def accuracy(head: Head, rows: Sequence[Row], table_VD: Tensor) -> list[float]:
    """The parts of the first and of the second drafts that are right."""
    right, asked = [0, 0], [0, 0]
    with torch.no_grad():
        for start in range(0, len(rows), 16):
            for number, (logits, tokens) in enumerate(drafted(head, rows[start : start + 16], table_VD)):
                right[number] += int((logits.argmax(-1) == tokens).sum())
                asked[number] += len(tokens)
    return [round(hits / max(1, count), 4) for hits, count in zip(right, asked, strict=True)]


def train(head: Head, rows: Sequence[Row], table_VD: Tensor, epochs: int) -> None:
    """AdamW with a warm-up of a tenth and a cosine; rows of a batch are of like length."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02)
    rng, by_length = random.Random(0), sorted(rows, key=lambda row: len(row.token_ids))
    batches = [by_length[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE)]
    steps = epochs * len(batches)
    for step in range(steps):
        if step % len(batches) == 0:
            rng.shuffle(batches)
        share = step / steps
        rate = min(1.0, share / 0.1) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        losses = [weight * F.cross_entropy(logits, tokens) for weight, (logits, tokens) in
                  zip(WEIGHTS, drafted(head, batches[step % len(batches)], table_VD), strict=False)]
        loss = torch.stack(losses).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(json.dumps({"step": step, "of": steps, "loss": round(loss.item(), 4)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint, which has the rest")
    parser.add_argument("--rows", type=int, default=700)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    started = time.monotonic()
    rows, held_out = collect(TRAIN_SEEDS[: arguments.rows]), collect(VALIDATION_SEEDS[:100])
    print(json.dumps({"rows": len(rows), "seconds": round(time.monotonic() - started, 1)}), flush=True)
    tensors = load_file(SHAPES_HYBRID / "model.safetensors")
    table_VD = tensors["model.language_model.embed_tokens.weight"].float()
    config = AutoConfig.from_pretrained(SHAPES_HYBRID).text_config
    config._attn_implementation = "sdpa"  # causal where no mask is given
    head = Head(config)
    train(head, rows, table_VD, arguments.epochs)
    head.bfloat16().float()
    print(json.dumps({"right, first and second drafts": accuracy(head, held_out, table_VD),
                      "seconds": round(time.monotonic() - started, 1)}))
    arguments.output.mkdir(parents=True, exist_ok=True)
    tensors |= {f"mtp.{name}": value.detach().bfloat16().contiguous() for name, value in head.state_dict().items()}
    save_file(tensors, arguments.output / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
