"""Everything of shapes-vl but the weights: tokenizer, chat template, configs, the folder. Knows no training."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
)

from scripts.shapes.drawing import TRAIN_SEEDS, draw_group, draw_scene, group_questions, questions, text_question
from scripts.shapes.questions import SYSTEM_PROMPTS, Question

PATCH, MERGE, TEMPORAL_PATCH = 16, 2, 2
MIN_PIXELS, MAX_PIXELS = 128 * 128, 320 * 320
MAX_POSITIONS = 4096

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 576

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('unknown role ' ~ message.role ~ '; use system, user or assistant') }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- elif part.type in ('image', 'image_url') %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type in ('video', 'video_url') %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}
                {{- raise_exception('unknown content part ' ~ part.type ~ '; use text, image or video') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# size: areas in pixels, not sides. A drawing of 128x128 up to 320x320 is only rounded to whole 32-pixel cells.
PREPROCESSOR_CONFIG: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": TEMPORAL_PATCH,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
}


def build_tokenizer(num_scenes: int = 2000) -> PreTrainedTokenizerFast:
    """Byte-level BPE learned from the questions and answers themselves: any UTF-8 text has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_scenes), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE - len(SPECIAL_TOKENS):
        raise ValueError(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens; lower VOCAB_SIZE {VOCAB_SIZE} to fit it"
        )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _corpus(num_scenes: int) -> Iterator[str]:
    for seed in TRAIN_SEEDS[:num_scenes]:
        rng = random.Random(seed)
        asked: list[Question] = [*questions(draw_scene(rng), rng), text_question(rng)]
        if seed % 4 == 0:
            asked += group_questions(draw_group(rng), rng)
        for question in asked:
            yield f"user\n{question.text}"
            yield f"assistant\n{question.answer}"
        yield f"system\n{rng.choice(SYSTEM_PROMPTS)}"


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """The real architecture at a size that lives in git: 4.4 million parameters."""
    token_id = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|endoftext|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 6,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL_PATCH,
            "out_hidden_size": 192,
            "num_position_embeddings": 400,
            "deepstack_visual_indexes": [1, 3],
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def save_checkpoint(model: Any, config: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Any:
    """Writes the folder with weights rounded to bfloat16 and returns the rounded model, which is what users get."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = type(model)(config)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    rounded.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name every transformers 5 knows
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR_CONFIG, indent=2) + "\n")
    return rounded
