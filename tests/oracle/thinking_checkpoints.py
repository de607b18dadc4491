"""Tiny checkpoints that think: two tokens for it and templates that use them. Holds no tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

VOCAB_SIZE = 336
_TURNS = (
    "{% if effort is defined and effort not in ['low', 'high'] %}{{ raise_exception('low or high') }}{% endif %}"
    "{% if notes is defined %}{{ '<|im_start|>system\n' + (notes | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
)
OPENS = _TURNS + "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
"""Writes the opening tag itself."""
LEAVES_IT = _TURNS + "{% endif %}{% endif %}"
"""Leaves both tags to the model."""


def make_thinking(checkpoint: Callable[..., Path], folder: Path, template: str = OPENS,
                  tags: tuple[str, str] = ("<think>", "</think>")) -> Path:
    """A random qwen3 checkpoint in `folder` whose tokenizer has the tags as its last tokens."""
    template = template.replace("</think>", tags[1]).replace("<think>", tags[0])
    path = shutil.copytree(checkpoint("qwen3", vocab_size=VOCAB_SIZE), folder)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return path
