"""Builds tiny checkpoint folders, tokenizer and settings only, in the two styles the runner meets. Holds no tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What colour is the shape on the left of the picture?",
    "Is there a red circle? How many green triangles do you see? Answer with one word, yes or no.",
    "import numpy as np\nfor i in range(10):\n    print(i ** 2, end='')\n\n\n",
    "Größe, naïve café, 你好世界, 123 456, <b>markup</b> | pipes || and < angles > [INST] im_start im_end",
] * 4
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_PLAIN_ADDED = ["<tool_call>", "<think>", "</think>"]
# The chat format of Qwen's models, with the parts of its templates that look into the text.
QWEN_TEMPLATE = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {%- set text = message.content %}
        {%- if message.role == 'assistant' and '</think>' in text %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {{- text }}
        {%- endgeneration %}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] not in ['user', 'assistant', 'system'] %}{{ raise_exception('unknown role') }}{% endif %}
{% if message['content'] | length > 4000 %}{{ raise_exception('too long for this template') }}{% endif %}
{% if message['role'] == 'user' %}
[INST] {{ message['content'] | trim }} [/INST]
{%- else %}
 {{ message['content'] }}{{ eos_token }}
{%- endif %}
{% endfor %}
"""


def qwen_tokenizer() -> Tokenizer:
    """Byte-level BPE with NFC and Qwen's way of cutting words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in QWEN_PLAIN_ADDED])
    return tokenizer


def llama_tokenizer() -> Tokenizer:
    """SentencePiece-like BPE with a space before the first word, byte fallback, and BOS from the post-processor."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    lines = [line for text in CORPUS for line in text.splitlines()]
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=600, special_tokens=special + byte_tokens, show_progress=False)
    )
    # The trainer marks the byte tokens as added; real checkpoints have them in the vocabulary only.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def write_qwen_vl(folder: Path, **preprocessor: object) -> Path:
    """A Qwen3-VL checkpoint without weights; `preprocessor` overrides entries of preprocessor_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = qwen_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    }
    write_json(folder / "config.json", config)
    image_settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64 * 64, "longest_edge": 640 * 640},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.25, 0.2],
    }
    write_json(folder / "preprocessor_config.json", {**image_settings, **preprocessor})
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    return folder


def write_llama(folder: Path) -> Path:
    """A text-only checkpoint whose tokenizer adds BOS and whose template writes it too."""
    folder.mkdir(parents=True, exist_ok=True)
    llama_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", {"model_type": "llama", "vocab_size": 600})
    eos = {
        "__type": "AddedToken",
        "content": "</s>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>", "chat_template": LLAMA_TEMPLATE},
    )
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
