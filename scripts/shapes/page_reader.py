"""The embedded page reader: its config, tokenizer and other files, and transformers' forward pass over whole pages.

All pages have one size and one prompt, so every row of a batch has the same positions.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from npu_runner.assets import SHAPES_VL
from scripts.shapes.pages import HEIGHT, WIDTH

PATCH, MERGE, TEMPORAL = 16, 2, 2
GRID = (HEIGHT // PATCH, WIDTH // PATCH)
CELLS = (GRID[0] // MERGE, GRID[1] // MERGE)
NUM_PATCHES, NUM_CELLS = GRID[0] * GRID[1], CELLS[0] * CELLS[1]
NUM_BYTES, VOCABULARY = 256, 272
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|page|>", "<|vision_start|>", "<|vision_end|>",
           "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
IDS = {token: NUM_BYTES + index for index, token in enumerate(SPECIAL)}
END = IDS["<|im_end|>"]
MOST_TOKENS, LENGTHS = 304, 152
"""Of an answer, its end included. Rows of a batch are a multiple of LENGTHS long: layers are compiled for each."""


def page_config() -> Qwen3VLConfig:
    """4.4 million parameters, which are 8.8 MB in bfloat16."""
    rope = {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_theta": 10000.0, "rope_type": "default"}
    text = {"vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
            "rope_parameters": rope, "tie_word_embeddings": True, "pad_token_id": IDS["<|endoftext|>"],
            "eos_token_id": END}
    vision = {"depth": 6, "hidden_size": 160, "num_heads": 5, "intermediate_size": 480, "out_hidden_size": 192,
              "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": TEMPORAL,
              "num_position_embeddings": 24 * 24, "deepstack_visual_indexes": []}
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"], vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"])


def tokenizer_json() -> str:
    """That of shapes-vl without its merges: a token is a byte."""
    found = json.loads((SHAPES_VL / "tokenizer.json").read_text())
    pieces = found["model"]["vocab"]
    found["model"] |= {"vocab": {piece: index for piece, index in pieces.items() if index < NUM_BYTES}, "merges": []}
    like = found["added_tokens"][0]
    found["added_tokens"] = [like | {"id": index, "content": token} for token, index in IDS.items()]
    return json.dumps(found, ensure_ascii=False)


def save_page_reader(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """The checkpoint's folder, with weights in bfloat16."""
    config = copy.deepcopy(model.config)
    config.vision_config._attn_implementation = "sdpa"  # not PageForward's
    rounded = Qwen3VLForConditionalGeneration(config)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(SHAPES_VL / name, folder / name)
    images = json.loads((SHAPES_VL / "preprocessor_config.json").read_text())
    texts = {"preprocessor_config.json": images | {"size": {"shortest_edge": WIDTH * HEIGHT,
                                                            "longest_edge": WIDTH * HEIGHT}},
             "generation_config.json": {"do_sample": False, "eos_token_id": [END, IDS["<|endoftext|>"]],
                                        "pad_token_id": IDS["<|endoftext|>"]}}
    for name, text in texts.items():
        (folder / name).write_text(json.dumps(text, indent=2) + "\n")


class PageForward:
    """Runs transformers' model on batches of pages. Call `logits`, or `read` for answers of its own."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, device: str):
        self.model, self.device = model, device
        self.tokenizer = Tokenizer.from_str(tokenizer_json())
        AttentionInterface.register("flash_pages", _attend_pages)
        model.model.visual.config._attn_implementation = "flash_pages"
        before = "<|im_start|>user\n<|vision_start|>"
        after = "<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
        first, last = (self.tokenizer.encode(text, add_special_tokens=False).ids for text in (before, after))
        self.prompt = torch.tensor(first + [IDS["<|image_pad|>"]] * NUM_CELLS + last, device=device)
        self.first, self.length = len(first), len(self.prompt)
        image = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), *map(torch.arange, CELLS)).T + self.first
        texts = torch.arange(len(last) + MOST_TOKENS) + self.first + max(CELLS)
        self.positions = torch.cat([torch.arange(self.first).expand(3, -1), image, texts.expand(3, -1)], 1).to(device)
        grid = torch.tensor([(1, *GRID)])
        self.indices, self.weights = (tensor.to(device) for tensor in get_vision_interpolation_indices_and_weights(
            grid, num_grid_per_side=24, mode="bilinear", align_corners=True, spatial_merge_size=MERGE))
        self.vision_positions = get_vision_position_ids(grid, MERGE).to(device)

    def see(self, pages_BHW: Tensor) -> Tensor:
        """Embeddings of uint8 pages, (B, cells, width)."""
        batch = len(pages_BHW)
        pixels = pages_BHW.to(self.device).float() / 127.5 - 1
        patches = pixels.view(batch, CELLS[0], MERGE, PATCH, CELLS[1], MERGE, PATCH).permute(0, 1, 4, 2, 5, 3, 6)
        patches = patches.reshape(batch * NUM_PATCHES, 1, PATCH * PATCH).expand(-1, 3 * TEMPORAL, -1).flatten(1)
        output = self.model.model.visual(
            patches, torch.tensor([(1, *GRID)] * batch), interp_indices=self.indices.repeat(batch, 1),
            interp_weights=self.weights.repeat(batch, 1), position_ids=self.vision_positions.repeat(batch, 1),
            cu_seqlens=torch.arange(batch + 1, dtype=torch.int32, device=self.device) * NUM_PATCHES,
            max_seqlen=NUM_PATCHES)
        embeddings: Tensor = output.pooler_output.view(batch, NUM_CELLS, -1)
        return embeddings

    def logits(self, cells: Tensor, answers_BT: Tensor) -> Tensor:
        """(B, T, vocabulary): position t predicts answer token t."""
        decoder = self.model.model.language_model
        embedded = decoder.embed_tokens(torch.cat([self.prompt.expand(len(cells), -1), answers_BT[:, :-1]], 1))
        first = self.first
        embedded = torch.cat([embedded[:, :first], cells.to(embedded.dtype), embedded[:, first + NUM_CELLS:]], 1)
        positions = self.positions[:, None, : embedded.shape[1]].expand(-1, len(cells), -1)
        hidden = decoder(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[:, self.length - 1:]).float()
        return logits

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def read(self, pages_BHW: Tensor, most_tokens: int | None = None) -> list[str]:
        """Greedy answers, as Markdown."""
        most_tokens = most_tokens or MOST_TOKENS
        decoder, batch = self.model.model.language_model, len(pages_BHW)
        cells = self.see(pages_BHW)
        answers = torch.full((batch, most_tokens), END, device=self.device)
        embedded = decoder.embed_tokens(self.prompt.expand(batch, -1))
        embedded[:, self.first:self.first + NUM_CELLS] = cells.to(embedded.dtype)
        ended, cache, done = torch.zeros(batch, dtype=torch.bool, device=self.device), None, 0
        for index in range(most_tokens):
            positions = self.positions[:, None, done:done + embedded.shape[1]].expand(-1, batch, -1)
            output = decoder(inputs_embeds=embedded, position_ids=positions, past_key_values=cache, use_cache=True)
            cache, done = output.past_key_values, done + embedded.shape[1]
            answers[:, index] = self.model.lm_head(output.last_hidden_state[:, -1]).argmax(-1).where(~ended, END)
            ended |= answers[:, index] == END
            if ended.all():
                break
            embedded = decoder.embed_tokens(answers[:, index : index + 1])
        rows = answers.tolist()
        return [self.tokenizer.decode(row[:row.index(END)] if END in row else row) for row in rows]


def _attend_pages(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  **kwargs: Any) -> tuple[Tensor, None]:
    """Attention within each page, of (1, heads, pages * patches, dim) tensors."""
    query, key, value = (tensor[0].unflatten(1, (-1, NUM_PATCHES)).transpose(0, 1) for tensor in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(query, key, value)
    return attended.transpose(1, 2).flatten(0, 1).unsqueeze(0), None
