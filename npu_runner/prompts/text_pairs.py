"""Prompts of a query and a document for a classifier of one label: both texts as the checkpoint's tokenizer puts pairs
together. Knows nothing of rows, nor of what is made of a prompt.

sentence-transformers' CrossEncoder and vLLM make the same ones. Where they would differ, scores are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenizers import Encoding, Tokenizer

from npu_runner.errors import RequestError
from npu_runner.prompts.pair_prompts import Side
from npu_runner.prompts.text.messages import checked_text
from npu_runner.prompts.text.tokenizer import TextLength
from npu_runner.prompts.vision_prompts import Known, VisionPrompts, not_cut
from npu_runner.request.classes import SIGMOID, Classes
from npu_runner.request.prompt_inputs import PromptInputs

_SECOND = 1  # sequence id of a document's tokens


def why_no_scores(classes: Classes, config: Mapping[str, Any], *, has_template: bool) -> str | None:
    """Why a classifier gives no scores; None: it does. `config`: its config.json."""
    if len(classes.labels) != 1:
        return f"a score needs a classifier of one label, and this one has {len(classes.labels)}"
    if classes.activation != SIGMOID:
        return ("problem_type is regression: sentence-transformers would take the sigmoid of its number, vLLM the "
                "number itself; /v1/classify gives it")
    saved = config.get("sentence_transformers")
    named = saved.get("activation_fn") if isinstance(saved, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None and str(named).rpartition(".")[2] != "Sigmoid":
        return f"config.json asks for the activation {named}, and a score is a sigmoid; /v1/classify gives logits"
    if has_template:
        return ("it has a chat template: sentence-transformers would render the pair with it, vLLM would not; ask "
                "/v1/classify with the text of the pair as the model was trained on")
    return None


class TextPairs:
    """Prompts of one checkpoint. Images are refused, and so is what a template would read."""

    def __init__(self, *, tokenizer: Tokenizer, vision: VisionPrompts, text_length: TextLength):
        self._tokenizer, self._vision, self._text_length = tokenizer, vision, text_length

    def __call__(
        self, query: Side, document: Side, *, instruction: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, truncate_prompt_tokens: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None, known: Known | None = None,
    ) -> PromptInputs:  # fmt: skip
        """`truncate_prompt_tokens`: of a longer prompt the end of the document is left out. Raises RequestError."""
        for name, value in (("instruction", instruction), ("chat_template_kwargs", chat_template_kwargs),
                            ("mm_processor_kwargs", mm_processor_kwargs)):
            if value:
                raise RequestError(f"{name}: a classifier's prompt is the two texts alone; leave it out",
                                   "unsupported_parameter", name)
        asked, shown = _text_of(query, "the query"), _text_of(document, "the document")
        if not asked.strip() and not shown.strip():
            raise RequestError("query and document are both empty; give text", "empty_prompt")
        self._text_length.check([asked, shown], is_cut=truncate_prompt_tokens is not None)
        token_ids = _cut(self._tokenizer.encode(asked, shown), truncate_prompt_tokens)
        self._vision.in_order(token_ids, [])
        prompt = self._vision.prompt(token_ids, [], None, self._vision.as_asked(None))
        return replace(prompt, text=self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _text_of(side: Side, name: str) -> str:
    if isinstance(side.content, str):
        return checked_text(side.content, name)
    if side.seen:
        raise RequestError(f"{name} shows images or videos; a classifier's pair is two texts", "unsupported_part")
    return "\n".join(checked_text(part["text"], name) for part in side.content)


def _cut(encoding: Encoding, most: int | None) -> list[int]:
    """The ids, without the last ones of the document where there are more than `most`."""
    num_over = 0 if most is None else len(encoding.ids) - most
    if num_over <= 0:
        return list(encoding.ids)
    places = [place for place, number in enumerate(encoding.sequence_ids) if number == _SECOND]
    if num_over >= len(places):
        assert most is not None, "nothing is over without a limit"
        least = len(encoding.ids) - len(places)
        raise not_cut(len(encoding.ids), most, f"has {least} tokens without its document")
    left_out = set(places[-num_over:])
    return [token for place, token in enumerate(encoding.ids) if place not in left_out]
