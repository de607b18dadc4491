"""Reads bodies of /v1/classify, in vLLM's form, and writes their answers: the probabilities of classes. No files here.

Knows nothing of tokens or of how a logit is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from npu_runner.batch.rows.endpoint import AnswerForm, AnswerRow, number_of
from npu_runner.batch.rows.logprobs_json import opened
from npu_runner.batch.rows.pooled import PooledBody, numbers
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.pooling_params import CLASSIFY, Classes


class ClassifyBody(PooledBody):
    """vLLM's classification request, as far as it is served. None means: not asked for."""

    task: ClassVar[str] = CLASSIFY
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation": (True,), "add_special_tokens": (), "priority": (0,), "softmax": (True,)}
    instead: ClassVar[Mapping[str, str]] = {
        "activation": "; use_activation is its present name",
        "add_special_tokens": "; they are added as the checkpoint's own tokenizer and processor do",
        "softmax": "; the checkpoint says what makes probabilities of its logits, which use_activation=false leaves "
                   "as they are",
    }

    use_activation: bool | None = None

    def form(self, processor: ChatProcessor) -> AnswerForm:
        return ClassifyForm(model=self.model, classes=processor.classes, has_logits=self.use_activation is False,
                            places=self.places)


@dataclass(frozen=True, kw_only=True)
class ClassifyForm(AnswerForm):
    """Of each prompt the likeliest label and all probabilities, or with `has_logits` what these are made of."""

    id_prefix: ClassVar[str] = "classify-"
    object: ClassVar[str] = "list"
    list_name: ClassVar[str] = "data"
    item_name: ClassVar[str] = "label"
    has_text: ClassVar[bool] = False

    classes: Classes
    has_logits: bool

    def answer_of(self, output: RequestOutput) -> str:
        return self.classes.label(_logits(output.completions[0]))

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        logits_W = _logits(completion)
        row.write(opened({"index": completion.index, "label": self.classes.label(logits_W)}, "probs"))
        row.write(numbers(logits_W if self.has_logits else self.classes.probabilities(logits_W)))
        row.write(f',"num_classes":{len(logits_W)}}}')

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return str(item["label"])

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"label": str(item["label"]), "probs": [number_of(value) for value in item["probs"]]}


def _logits(completion: CompletionOutput) -> Any:
    assert completion.pooled is not None, "a request for classes that ended well has logits"
    return completion.pooled
