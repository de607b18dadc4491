"""Tiny checkpoints that score, and what sentence-transformers and transformers make of them. Holds no tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer

from tests.oracle import reference
from tests.oracle.tiny_checkpoints import make_checkpoint

JUDGE = ('Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that '
         'the answer can only be "yes" or "no".')
# As rerankers have them: strings where there is a tokenizer alone, parts where there is a processor.
FLAT = (
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('find') }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "\n<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% macro show(role) %}{% for m in messages if m.role == role %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}{% endmacro %}"
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: {{ show('system') or 'find' }}"
    "<Query>:{{ show('query') }}\n<Document>:{{ show('document') }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_reranker(path: Path, model_type: str, *, template: str | None = None, name: str | None = None) -> Path:
    """A random checkpoint whose tokenizer has a yes and a no. `template`: in the place of the chat template, or with
    `name` beside it."""
    make_checkpoint(path, model_type)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    # Ordinary tokens, as in Qwen's tokenizer (added ones would be control tokens), in the place of the last ones.
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    kept = sorted(vocab, key=vocab.__getitem__)[:-3]
    tokenizer["model"]["vocab"] = {token: number for number, token in enumerate([*kept, "ye", "yes", "no"])}
    tokenizer["model"]["merges"] = [*merges[:-3], ["y", "e"], ["ye", "s"], ["n", "o"]]
    file.write_text(json.dumps(tokenizer))
    if template is not None:
        target = path / ("chat_template.jinja" if name is None else f"additional_chat_templates/{name}.jinja")
        target.parent.mkdir(exist_ok=True)
        target.write_text(template)
    return path


def yes_and_no(path: Path) -> tuple[int, int]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")


def with_score(path: Path, target: Path, **config: object) -> Path:
    """A copy of the checkpoint in `path`, or itself, that says how it scores, as sentence-transformers saves it."""
    if target != path:
        shutil.copytree(path, target, dirs_exist_ok=True)
    modules = [{"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
               {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}]
    (target / "modules.json").write_text(json.dumps(modules))
    (target / "1_LogitScore").mkdir(exist_ok=True)
    (target / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    return target


def cross_encoder(path: Path, task: str, *, template_kwargs: dict[str, Any], instruction: str | None = None) -> Any:
    """sentence-transformers' model of the checkpoint in `path`, in float32; writes what it saves of itself there."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.cross_encoder.modules.logit_score import LogitScore

    transformer = Transformer(str(path), transformer_task=task, model_kwargs={"torch_dtype": torch.float32},
                              processing_kwargs={"chat_template": template_kwargs})
    prompts = {} if instruction is None else {"prompts": {"query": instruction}, "default_prompt_name": "query"}
    model = CrossEncoder(modules=[transformer, LogitScore(*yes_and_no(path))], **prompts)
    settings = {"prompts": model.prompts, "default_prompt_name": model.default_prompt_name}
    with_score(path, path, **model[1].get_config_dict())
    (path / "sentence_bert_config.json").write_text(json.dumps(transformer.get_config_dict()))
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return model


class PilProcessor:
    """In the place of transformers' AutoProcessor, of which videos need torchvision: the same without videos."""

    @staticmethod
    def from_pretrained(path: str, **settings: Any) -> Any:
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLProcessor

        class WithoutVideos(Qwen3VLProcessor):
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                return type(argument)

        tokenizer = AutoTokenizer.from_pretrained(path)
        return WithoutVideos(image_processor=Qwen2VLImageProcessorPil.from_pretrained(path), tokenizer=tokenizer,
                             video_processor=None, chat_template=tokenizer.chat_template)


def published(query: str, document: str, instruction: str | None = None, *, is_vision: bool = False) -> str:
    """The prompt of the model cards."""
    if is_vision:
        told = instruction or "Given a search query, retrieve relevant candidates that answer the query."
        user, answer = f"<Instruct>: {told}<Query>:{query}\n<Document>:{document}", ""
    else:
        told = instruction or "Given a web search query, retrieve relevant passages that answer the query"
        user, answer = f"<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}", "<think>\n\n</think>\n\n"
    return (f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
            f"{answer}")


@torch.inference_mode()
def expected_difference(path: Path, token_ids: Sequence[int], images: Sequence[Image.Image] = ()) -> float:
    """transformers' logit of yes less that of no, of the last token."""
    yes, no = yes_and_no(path)
    logits_V = reference.load_model(path)(**reference.model_inputs(path, token_ids, images)).logits[0, -1].double()
    return float(logits_V[yes] - logits_V[no])
