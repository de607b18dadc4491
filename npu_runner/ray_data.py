"""A callable class for Ray Data's `Dataset.map_batches`: conversations in, answers beside them (or vectors, classes,
scores), errors in a column.

Columns have the names of `ray.data.llm`. Imports neither Ray nor, before an actor is made, torch, so a program that
only writes the pipeline starts fast. Knows nothing of files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_runner.errors import ConfigError, RequestError
from npu_runner.request.limits import shown
from npu_runner.request.outputs import PooledRequestOutput, RequestOutput
from npu_runner.request.pooling_params import CLASSIFY, PoolingParams
from npu_runner.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from npu_runner.llm import LLM

ERROR_COLUMN = "__inference_error__"
_PARAMS_COLUMN = "sampling_params"
_PROMPT_COLUMNS: dict[str, tuple[str, ...]] = {
    "generate": ("messages", "prompt"), "embed": ("messages", "prompt"), CLASSIFY: ("prompt",)}
"""The columns of prompts, by the task that the model is loaded for; a batch has one of them."""
_QUERY, _DOCUMENT = "query", "document"
_UNSERVED = {"n": "a row has one generated_text; repeat the row",
             "logprobs": "there is no column for them; npu-runner batch writes them",
             "return_hidden_states": "there is no column for them; LLM.generate and LLM.chat return them"}
_WHOLE_NUMBERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "no_repeat_ngram_size",
                  "no_repeat_ngram_window")
_PARAM_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_POOLING_NAMES = frozenset(field.name for field in dataclasses.fields(PoolingParams)) - {"task"}

Batch = Mapping[str, Any]


class LLMPredictor:
    """A model in a Ray actor. Ray Data calls both the constructor and the object:

        dataset.map_batches(LLMPredictor, fn_constructor_kwargs={"model": "path/to/checkpoint"},
                            compute=ray.data.ActorPoolStrategy(size=8), resources={"NPU": 1}, batch_size=1024)

    A row has `messages`, OpenAI-style as in `LLM.chat`, or `prompt`, a raw text. Optional: `sampling_params`, an object
    of SamplingParams' fields. Its columns stay. New columns: generated_text, generated_tokens (ids), num_input_tokens,
    num_generated_tokens, finish_reason, stop_reason (None: finish_reason says all), reasoning_content (None: no
    thinking, or not split off). `__inference_error__` is empty, or "code: message".

    A model that is loaded for numbers adds them and num_input_tokens: embeddings (a list; empty where there is an
    error); probs (a list) and label, of `prompt`; or score, of the columns `query` and `document`.
    """

    def __init__(self, model: str, *, sampling_params: Mapping[str, Any] | None = None,
                 allowed_media_dir: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
                 mm_processor_kwargs: Mapping[str, Any] | None = None, drop_columns: Sequence[str] = (),
                 pooling_params: Mapping[str, Any] | None = None, **settings: Any):
        """`sampling_params`: for rows that leave them open. Behind them stand the checkpoint's generation_config, then
        SamplingParams' defaults, and for max_tokens `LLM`'s. `allowed_media_dir`, `chat_template_kwargs`,
        `mm_processor_kwargs`: as in `LLM.chat`; the last is for raw prompts, too, that bring none. `drop_columns`: not
        carried on, as messages with the bytes of images. `pooling_params`: of all rows, where the model is loaded for
        numbers: PoolingParams' fields but `task`. `settings`: LLM's.

        Raises the errors of LLM, and ConfigError for wrong `sampling_params` and `pooling_params`, and for those of
        another task than the model is loaded for.
        """
        self._model, self._settings = model, settings
        self._chat_options: dict[str, Any] = {"allowed_media_dir": allowed_media_dir,
                                              "chat_template_kwargs": chat_template_kwargs,
                                              "mm_processor_kwargs": mm_processor_kwargs}
        self._dropped = (drop_columns,) if isinstance(drop_columns, str) else tuple(drop_columns)
        self._defaults = dict(sampling_params or {})
        try:
            _sampling_params(self._defaults, {})
        except RequestError as error:
            raise ConfigError(f"sampling_params of all rows: {error}") from error
        self._pooling_params = _pooling_params(pooling_params or {})
        self._llm = self._load()
        self._task = self._llm.processor.task
        self._refuse_other_params({"sampling_params": sampling_params, "pooling_params": pooling_params})
        self._defaults = {**self._llm.generation_defaults, **self._defaults}

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """`batch`: columns as numpy arrays or lists, all of one length (batch_format "numpy", the default)."""
        if not isinstance(batch, Mapping):
            raise ConfigError(f"a batch came as {type(batch).__name__}; leave batch_format at its default, or say "
                              "numpy")
        for name in self._dropped:
            if name not in batch:
                raise ConfigError(f"drop_columns: there is no column {name}; the rows have {', '.join(batch)}")
        made = self._texts(batch) if self._task == "generate" else self._numbers(batch)
        return {**{name: values for name, values in batch.items() if name not in self._dropped}, **made}

    def _texts(self, batch: Batch) -> dict[str, Any]:
        column, prompts = _prompts(batch, self._task)
        column_of_params = batch.get(_PARAMS_COLUMN)
        params = [None] * len(prompts) if column_of_params is None else list(map(_plain, column_of_params))
        accepted: dict[int, tuple[Any, SamplingParams]] = {}
        refused: dict[int, RequestOutput] = {}
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                accepted[index] = prompt, _sampling_params(one, self._defaults)
            except RequestError as error:
                refused[index] = RequestOutput.failed("", error)
        answers = {**refused, **self._answer(accepted, is_chat=column == "messages")}
        return _columns([answers[index] for index in range(len(prompts))])

    def _numbers(self, batch: Batch) -> dict[str, Any]:
        """Columns of a model that is loaded for them."""
        for name in (_PARAMS_COLUMN, "pooling_params"):
            if name in batch:
                raise ConfigError(f"there is a column {name}, and the model is loaded for task {self._task}: "
                                  "pooling_params of the constructor are for all rows; take the column out")
        params = self._pooling_params
        if self._task == "score":
            query, document = (_column(batch, name) for name in (_QUERY, _DOCUMENT))
            scores = self._llm.score(query, document, pooling_params=params, return_errors=True, **self._chat_options)
            return _numbers_of(scores, {"score": lambda scored: scored.score})
        column, prompts = _prompts(batch, self._task)
        options = self._chat_options if column == "messages" else {}
        items = prompts if column == "messages" else [self._with_video_settings(prompt) for prompt in prompts]
        if self._task == "embed":
            vectors = self._llm.embed(items, params, return_errors=True, **options)
            return _numbers_of(vectors, {"embeddings": lambda vector: vector.embedding.tolist()}, missing=[])
        classes = self._llm.classify(items, params, return_errors=True)
        found = _numbers_of(classes, {"probs": lambda one: one.probs}, missing=[])
        return {"label": [one.outputs and one.label for one in classes], **found}

    def _refuse_other_params(self, params: Mapping[str, Any]) -> None:
        """Raises ConfigError for params of text where there are numbers, and the other way round."""
        name = "pooling_params" if self._task == "generate" else "sampling_params"
        if params[name]:
            self._llm.close()
            raise ConfigError(f"{name}: the model is loaded for task {self._task}, which takes none; leave them out")

    def _load(self) -> LLM:
        from npu_runner import LLM

        class RestartedLLM(LLM):
            """Its engine is loaded again as often as a row is the cause of its death."""

            max_engine_restarts = math.inf

        return RestartedLLM(self._model, **self._settings)

    def _answer(self, rows: Mapping[int, tuple[Any, SamplingParams]], *, is_chat: bool) -> dict[int, RequestOutput]:
        items, params = [prompt for prompt, _ in rows.values()], [params for _, params in rows.values()]
        if is_chat:
            outputs = self._llm.chat(items, params, return_errors=True, **self._chat_options)
        else:
            outputs = self._llm.generate([self._with_video_settings(item) for item in items], params,
                                         return_errors=True)
        return dict(zip(rows, outputs, strict=True))

    def _with_video_settings(self, prompt: Any) -> Any:
        """A raw prompt, with the pipeline's `mm_processor_kwargs` where it has none of its own."""
        kwargs = self._chat_options["mm_processor_kwargs"]
        if kwargs is None:
            return prompt
        if not isinstance(prompt, Mapping):
            return {"prompt": prompt, "mm_processor_kwargs": kwargs}
        return prompt if prompt.get("mm_processor_kwargs") is not None else {**prompt, "mm_processor_kwargs": kwargs}


def _prompts(batch: Batch, task: str) -> tuple[str, list[Any]]:
    """(name of the column, its values)."""
    names = _PROMPT_COLUMNS[task]
    found = [name for name in names if name in batch]
    if len(found) != 1:
        raise ConfigError(f"the rows have the columns {', '.join(batch)}; exactly one of them has to be "
                          f"{' or '.join(names)}")
    return found[0], _column(batch, found[0])


def _column(batch: Batch, name: str) -> list[Any]:
    if name not in batch:
        raise ConfigError(f"the rows have the columns {', '.join(batch)}; a score needs {_QUERY} and {_DOCUMENT}")
    return [_plain(value) for value in batch[name]]


def _plain(value: Any) -> Any:
    """Arrow's arrays as lists again, all the way down. Bytes and images stay as they are."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def _sampling_params(row_params: Any, defaults: Mapping[str, Any]) -> SamplingParams:
    """Raises RequestError naming the field that is wrong, unknown or without a column."""
    if not isinstance(row_params, (Mapping, type(None))):
        raise _refusal("an object is needed", type(row_params).__name__, _PARAMS_COLUMN)
    fields = {**defaults, **_without_arrow_types(row_params or {})}
    for name in fields:
        if name not in _PARAM_NAMES:
            raise _refusal("there is no such field", name, name)
    params = SamplingParams(**fields)
    for name, remedy in _UNSERVED.items():
        if getattr(params, name) != getattr(SamplingParams, name):
            raise _refusal(remedy, f"{name} {getattr(params, name)}", name)
    return params


def _pooling_params(fields: Mapping[str, Any]) -> PoolingParams:
    """Raises ConfigError naming the field that is wrong or unknown."""
    for name in fields:
        if name not in _POOLING_NAMES:
            raise ConfigError(f"pooling_params of all rows: there is no {shown(name)}; there are "
                              f"{', '.join(sorted(_POOLING_NAMES))}")
    try:
        return PoolingParams(**fields)
    except RequestError as error:
        raise ConfigError(f"pooling_params of all rows: {error}") from error


def _without_arrow_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arrow gives each row the fields of all rows. Fields of other rows are None or NaN, and integers have become
    floats."""
    present = {name: value for name, value in fields.items() if value is not None and value == value}
    return {
        name: int(value) if name in _WHOLE_NUMBERS and isinstance(value, float) and value.is_integer() else value
        for name, value in present.items()
    }


def _refusal(why: str, value: str, name: str) -> RequestError:
    return RequestError(f"sampling_params: {shown(value)}: {why}", "invalid_sampling_parameter", name)


def _columns(answers: Sequence[RequestOutput]) -> dict[str, Any]:
    return {
        "generated_text": [answer.text for answer in answers],
        "generated_tokens": [answer.token_ids for answer in answers],
        "num_input_tokens": [answer.num_prompt_tokens for answer in answers],
        "num_generated_tokens": [len(answer.token_ids) for answer in answers],
        "finish_reason": [answer.finish_reason for answer in answers],
        "stop_reason": [_stop_reason(answer) for answer in answers],
        "reasoning_content": [answer.reasoning_content for answer in answers],
        ERROR_COLUMN: [_error(answer) for answer in answers],
    }


def _numbers_of(outputs: Sequence[PooledRequestOutput[Any]], columns: Mapping[str, Callable[[Any], Any]], *,
                missing: Any = None) -> dict[str, Any]:
    """`missing` stands in the place of numbers where there is an error."""
    return {
        **{name: [missing if output.outputs is None else read(output) for output in outputs]
           for name, read in columns.items()},
        "num_input_tokens": [output.num_prompt_tokens for output in outputs],
        ERROR_COLUMN: [_error(output) for output in outputs],
    }


def _stop_reason(answer: RequestOutput) -> str | None:
    """A column has one type: the id of a stop token is a text as well."""
    reason = answer.completions[0].stop_reason
    return None if reason is None else str(reason)


def _error(answer: RequestOutput | PooledRequestOutput[Any]) -> str:
    if answer.error is None:
        return ""
    return f"{answer.error_code or 'generation_failed'}: {answer.error}"

