"""The Python API: prompts or conversations in, results out, in the same order or as they finish.

Knows nothing of files or rows; the batch job has those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from tqdm import tqdm

from npu_runner.config import RunnerConfig, from_keywords
from npu_runner.engine.checked_format import check_format
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.errors import ConfigError, EngineDeadError, RequestError
from npu_runner.llm.prompt_service import make_service
from npu_runner.llm.requests import (
    AnyParams,
    ChatOptions,
    PairOptions,
    Parse,
    PromptOptions,
    UnsaidLimit,
    chat_parser,
    checked_options,
    classes_task,
    is_conversation,
    is_one_conversation,
    is_one_prompt,
    pair_parser,
    params_of,
    parse_prompt,
    prompt_or_chat_parser,
    tasks_of,
    with_fields,
    with_index,
)
from npu_runner.llm.turns import Call, Turns
from npu_runner.llm.vllm_settings import own_settings
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.pair_prompts import pairs_of
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.tasks import MadeTask, PromptTask
from npu_runner.prompts.text.tokenizer import transformers_tokenizer
from npu_runner.request.limits import field_error, shown, wrong_type
from npu_runner.request.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    EngineStats,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from npu_runner.request.pooling_params import CLASSIFY, LABELS, SOFTMAX, TOKEN_EMBED, Classes, PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from npu_runner.serving.loading_line import shows_progress
from npu_runner.serving.options import PreprocessingOptions, ReplicaOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on

Prompt = str | Sequence[int] | Mapping[str, Any] | PromptInputs
"""Text, token ids (a list, an array or a tensor), {"prompt": text or ids, "images": [PIL image, array or bytes, ...],
"videos": [bytes, ...]}, vLLM's {"prompt" or "prompt_token_ids", "multi_modal_data": {"image": ..., "video": ...}}, each
optionally with "mm_processor_kwargs", or an already prepared prompt."""
Conversation = Sequence[Mapping[str, Any]]
"""OpenAI-style messages; image parts are {"type": "image", "image": PIL image, array, bytes or address}, or OpenAI's
image_url; video parts {"type": "video", "video": bytes or address} or vLLM's video_url."""
Prompts = Prompt | Iterable[Prompt]
Conversations = Conversation | Iterable[Conversation]
Sided = str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]]
"""A query or a document, or several: text, or vLLM's {"content": parts} with parts as in a conversation."""
Bar = bool | Callable[..., Any] | None
Params = SamplingParams | Iterable[SamplingParams] | None
PoolingRequests = PoolingParams | Iterable[PoolingParams] | None
_T = TypeVar("_T")
Stream = Iterator[tuple[int, _T]]
"""Results as they finish, each with the index of its prompt."""
Results = Stream[RequestOutput]
Answers = list[_T] | Stream[_T]
_TASKS = {TOKEN_EMBED: TOKEN_EMBED, "embed": None, CLASSIFY: None}
"""The tasks of `encode`, and their names in PoolingParams."""
# The longest time in which an iterator is read before a step: a slow one must not stop the model.
_READ_SECONDS = 0.05


class LLM:
    """A loaded model. `settings` are the fields of RunnerConfig, of PreprocessingOptions and of ReplicaOptions, or
    vLLM's (docs/from-vllm.md); an unknown one is a ConfigError. Two more are `allowed_media_dir`, the folder below
    which addresses of images and videos may lie, for every call that names none itself; and `pdf_passwords`, a JSON
    file of an object with the passwords of PDFs by path, where * is all others.

        with LLM("path/to/checkpoint") as llm:
            for result in llm.chat(conversations, SamplingParams(temperature=0)):
                print(result.text)

    Images and long texts are prepared in worker processes, ahead of the model. These start with the first of them and
    end with `close`. With `data_parallel_size` there are several engines, each in its own process with its own devices
    and workers. Answers are those of one engine, to rounding.

    One call is answered at a time. Those of other threads wait for one that has lists of prompts and of results. Beside
    one with an iterator on either side, and inside such an iterator, a call is a RequestError.
    """

    max_engine_restarts: float = 0
    """The number of times that this process loads its engine again after a death, and tries its requests again."""

    def __init__(self, model: str | Path, **settings: Any):
        given = {"model": str(model), **own_settings(str(model), settings)}
        self.allowed_media_dir: Path | str | None = given.pop("allowed_media_dir", None) or None
        self._rules = MediaRules().with_passwords(given.pop("pdf_passwords", None))
        config, self.options, several = from_keywords(given, RunnerConfig, PreprocessingOptions, ReplicaOptions)
        check_format(config, settings.get("quantization"))
        self._turns = Turns()
        self._tokenizer: Any = None
        self._is_torn = False
        """A call was interrupted, or is under way: the requests of the service have to be aborted."""
        # The last line: a fault behind it would leave replicas running.
        self._service = make_service(config, self.options, several, self.max_engine_restarts)

    @property
    def config(self) -> RunnerConfig:
        """The configuration, with the checkpoint's values where none was set."""
        return self._service.config

    @property
    def processor(self) -> ChatProcessor:
        """Makes prompts of conversations."""
        return self._service.processor

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Fields of SamplingParams that the checkpoint sets."""
        return self._service.generation_defaults

    def get_default_sampling_params(self, *, for_chat: bool = False) -> SamplingParams:
        """The params of a `generate`, or a `chat`, without any: generation_config.json's, then OpenAI's."""
        limit = UnsaidLimit(self.generation_defaults, None if for_chat else DEFAULT_MAX_TOKENS)
        return limit.bounded(SamplingParams(**self.generation_defaults))

    @property
    def num_requests(self) -> int:
        """The number of requests so far; the request_id of the next one is request-<num_requests>."""
        return self._service.num_requests

    @property
    def engine(self) -> LLMEngine:
        """The engine of this process. Raises ConfigError where several replicas have one each."""
        engine = self._service.engine
        if engine is None:
            raise ConfigError("data_parallel_size: each replica has an engine in a process of its own; `stats()`, "
                              "`config` and `processor` are those of all")
        return engine

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as transformers makes it, which is imported for that; the same object each time.

        Raises ConfigError where transformers is not installed.
        """
        if self._tokenizer is None:
            self._tokenizer = transformers_tokenizer(self.processor.model_path, self.config.prompts.chat_template)
        return self._tokenizer

    @overload
    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: Bar = None, *,
                 stream_results: Literal[False] = False, return_errors: bool = False,
                 **options: Unpack[PromptOptions]) -> list[RequestOutput]: ...
    @overload
    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: Bar = None, *,
                 stream_results: Literal[True], return_errors: bool = False,
                 **options: Unpack[PromptOptions]) -> Results: ...
    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: Bar = None, *,
                 stream_results: bool = False, return_errors: bool = False,
                 **options: Unpack[PromptOptions]) -> Answers[RequestOutput]:
        """Continue raw prompts. One prompt may stand alone; one SamplingParams may serve all prompts.

        Without max_tokens a completion has the checkpoint's max_new_tokens, or 16, as rows of /v1/completions. Where
        such a limit cuts one off, that is logged once a process. Everything else is as in `chat`.
        """
        items: Iterable[Any] = [prompts] if is_one_prompt(prompts) else prompts  # type: ignore[list-item,assignment]
        checked_options("generate", options, PromptOptions)
        return self._run(items, sampling_params, parse_prompt, use_tqdm, stream_results, return_errors,
                         DEFAULT_MAX_TOKENS)

    @overload
    def chat(self, messages: Conversations, sampling_params: Params = None, use_tqdm: Bar = None, *,
             stream_results: Literal[False] = False, return_errors: bool = False,
             **options: Unpack[ChatOptions]) -> list[RequestOutput]: ...
    @overload
    def chat(self, messages: Conversations, sampling_params: Params = None, use_tqdm: Bar = None, *,
             stream_results: Literal[True], return_errors: bool = False, **options: Unpack[ChatOptions]) -> Results: ...
    def chat(self, messages: Conversations, sampling_params: Params = None, use_tqdm: Bar = None, *,
             stream_results: bool = False, return_errors: bool = False,
             **options: Unpack[ChatOptions]) -> Answers[RequestOutput]:
        """Answer conversations through the checkpoint's chat template. One conversation may stand alone.

        Options, which are for all conversations:
        - `allowed_media_dir`: an image_url or video_url, or an image that is text, may be a data: URL or, with this, a
          file below that folder; without it the setting of that name counts. A `pathlib.Path` is read wherever it lies.
          Nothing is downloaded. An image_url may name a page of a PDF or TIFF file, a size and a part of it
          (docs/documents.md).
        - `mm_processor_kwargs`: how videos are sampled, {"fps": 1}, {"num_frames": 8} or {"max_frames": 9}, and how
          images (and frames of Qwen2-VL) are bounded, {"min_pixels": 3136, "max_pixels": 500_000}.
        - `chat_template`: text or file of one that stands in for the checkpoint's.
        - `chat_template_kwargs` go into the template, as {"enable_thinking": False}, and so does OpenAI's
          `reasoning_effort`; a name that it does not read is a RequestError.
        - `tools` are OpenAI's; calls stay in the text as the model writes them.
        - With `continue_final_message` the answer goes on with the last message, the assistant's; with
          `add_generation_prompt` False the prompt ends behind it.

        What a model thinks first is a result's `reasoning_content`, its `text` is what comes behind. Without max_tokens
        an answer has the checkpoint's max_new_tokens, or what the model's length leaves.

        `messages` and `sampling_params` may be iterators of any length. They are read in this thread, at most a few
        hundred ahead of the results. `stream_results` gives an iterator of (index of the conversation, result) instead
        of a list, each as it finishes; with both, memory stays flat. The next call ends an iterator that was not read
        to its end. `use_tqdm` shows a bar, or is what makes one; None: for lists of results, on a terminal and in a
        notebook.

        Raises RequestError naming the index of a conversation that cannot be served, and drops the others' answers. In
        a list, what shows without reading an image or counting tokens is refused before anything runs. With
        `return_errors` such a conversation is a result with finish_reason `error`, `error` and `error_code` instead, as
        one always is that makes the model fail.
        """
        given = checked_options("chat", options, ChatOptions)
        parse = chat_parser(self.processor, self._media_rules(given.pop("allowed_media_dir", None)), **given)
        items: Iterable[Any] = [messages] if is_one_conversation(messages) else messages
        return self._run(items, sampling_params, parse, use_tqdm, stream_results, return_errors)

    @overload
    def embed(self, prompts: Prompts | Conversations, pooling_params: PoolingRequests = None, use_tqdm: Bar = None, *,
              stream_results: Literal[False] = False, return_errors: bool = False,
              **options: Unpack[ChatOptions]) -> list[EmbeddingRequestOutput]: ...
    @overload
    def embed(self, prompts: Prompts | Conversations, pooling_params: PoolingRequests = None, use_tqdm: Bar = None, *,
              stream_results: Literal[True], return_errors: bool = False,
              **options: Unpack[ChatOptions]) -> Stream[EmbeddingRequestOutput]: ...
    def embed(self, prompts: Prompts | Conversations, pooling_params: PoolingRequests = None, use_tqdm: Bar = None, *,
              stream_results: bool = False, return_errors: bool = False,
              **options: Unpack[ChatOptions]) -> Answers[EmbeddingRequestOutput]:
        """A vector of each raw prompt or conversation, of a model that was loaded for that (setting `runner`).

        Prompts are those of `generate`, instructions and template included. A conversation goes through the chat
        template, with the options of `chat`; its prompt ends behind the last message, unless `add_generation_prompt` is
        True. Everything else is as in `chat`.
        """
        given = checked_options("embed", options, ChatOptions)
        rules = self._media_rules(given.pop("allowed_media_dir", None))
        return self._pool(prompts, pooling_params, "embed", EmbeddingRequestOutput.from_output, use_tqdm,
                          stream_results, return_errors, prompt_or_chat_parser(self.processor, rules, given))

    @overload
    def encode(self, prompts: Prompts, pooling_params: PoolingRequests = None, use_tqdm: Bar = None, *,
               pooling_task: str, stream_results: Literal[False] = False,
               return_errors: bool = False) -> list[PoolingRequestOutput]: ...
    @overload
    def encode(self, prompts: Prompts, pooling_params: PoolingRequests = None, use_tqdm: Bar = None, *,
               pooling_task: str, stream_results: Literal[True],
               return_errors: bool = False) -> Stream[PoolingRequestOutput]: ...
    def encode(self, prompts: Prompts, pooling_params: PoolingRequests = None, use_tqdm: Bar = None, *,
               pooling_task: str, stream_results: bool = False,
               return_errors: bool = False) -> Answers[PoolingRequestOutput]:
        """Arrays of raw prompts, of a model that was loaded for numbers. `pooling_task`, as vLLM calls them:

        - token_embed: the hidden state behind the final norm of every token, float32 (T, D), as it is, not normalised.
          The states of a step are copied to the host with it. The prefix cache is not used.
        - embed: the vector that `embed` gives. classify: the probabilities that `classify` gives.

        Everything else is as in `embed`. Raises RequestError for another task.
        """
        if pooling_task not in _TASKS:
            raise field_error("pooling_task", f"{shown(pooling_task)} is not one of {', '.join(_TASKS)}")
        task = classes_task(pooling_params, self.processor) if pooling_task == CLASSIFY else pooling_task
        self.processor.check_task(task)
        wrap = partial(PoolingRequestOutput.from_output, classes=self.processor.classes if task == CLASSIFY else None)
        return self._pool(prompts, with_fields(pooling_params, task=_TASKS[pooling_task]), task, wrap, use_tqdm,
                          stream_results, return_errors)

    @overload
    def classify(self, prompts: Prompts | Conversations, pooling_params: PoolingRequests = None, use_tqdm: Bar = None,
                 *, labels: Sequence[str] | None = None, stream_results: Literal[False] = False,
                 return_errors: bool = False, **options: Unpack[ChatOptions]) -> list[ClassificationRequestOutput]: ...
    @overload
    def classify(self, prompts: Prompts | Conversations, pooling_params: PoolingRequests = None, use_tqdm: Bar = None,
                 *, labels: Sequence[str] | None = None, stream_results: Literal[True], return_errors: bool = False,
                 **options: Unpack[ChatOptions]) -> Stream[ClassificationRequestOutput]: ...
    def classify(self, prompts: Prompts | Conversations, pooling_params: PoolingRequests = None, use_tqdm: Bar = None,
                 *, labels: Sequence[str] | None = None, stream_results: bool = False, return_errors: bool = False,
                 **options: Unpack[ChatOptions]) -> Answers[ClassificationRequestOutput]:
        """The probabilities of classes of each raw prompt or conversation. With `use_activation` False in
        `pooling_params` `probs` are the numbers that the probabilities are made of.

        - A classifier (a *ForSequenceClassification) has classes of its own.
        - A model that generates text gets `labels`, 2 to 512 different texts; each request may bring its own in
          `pooling_params`. The likelihood of a label is the sum of the log probabilities of its tokens, tokenized by
          themselves, and of the model's end tokens behind it (added up). The probabilities are the softmax of these
          sums. The prompt of a conversation ends with the start of the answer, unless `add_generation_prompt` is False,
          and may not end within reasoning.

        Prompts are those of `generate`, template included; everything else is as in `embed`.
        """
        given = checked_options("classify", options, ChatOptions)
        rules = self._media_rules(given.pop("allowed_media_dir", None))
        if labels is not None:
            pooling_params = with_fields(pooling_params, labels=labels)
        task = classes_task(pooling_params, self.processor)
        self.processor.check_task(task)
        classes, adds_prompt = (None, None) if task == LABELS else (self.processor.classes, False)
        wrap = partial(ClassificationRequestOutput.from_output, classes=classes)
        parse = prompt_or_chat_parser(self.processor, rules, given, add_generation_prompt=adds_prompt)
        return self._pool(prompts, pooling_params, task, wrap, use_tqdm, stream_results, return_errors, parse)

    @overload
    def score(self, data_1: Sided, data_2: Sided, /, *, use_tqdm: Bar = None,
              pooling_params: PoolingParams | None = None, stream_results: Literal[False] = False,
              return_errors: bool = False, **options: Unpack[PairOptions]) -> list[ScoringRequestOutput]: ...
    @overload
    def score(self, data_1: Sided, data_2: Sided, /, *, use_tqdm: Bar = None,
              pooling_params: PoolingParams | None = None, stream_results: Literal[True], return_errors: bool = False,
              **options: Unpack[PairOptions]) -> Stream[ScoringRequestOutput]: ...
    def score(self, data_1: Sided, data_2: Sided, /, *, use_tqdm: Bar = None,
              pooling_params: PoolingParams | None = None, stream_results: bool = False, return_errors: bool = False,
              **options: Unpack[PairOptions]) -> Answers[ScoringRequestOutput]:
        """Scores of each document of `data_2` for its query in `data_1`, from a model that was loaded for that
        (setting `task`). One query serves all documents.

        `instruction` says what is looked for; without one the checkpoint's own counts. `pooling_params`:
        `use_activation` False gives differences of logits instead of their sigmoids, `truncate_prompt_tokens` leaves
        out the end of a longer document. Everything else is as in `chat`.
        """
        self.processor.check_task("score")
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise wrong_type("pooling_params", "one PoolingParams", params)
        given = checked_options("score", options, PairOptions)
        parse = pair_parser(self.processor, self._media_rules(given.pop("allowed_media_dir", None)), **given)
        return self._run(pairs_of(data_1, data_2), params, parse, use_tqdm, stream_results, return_errors,
                         wrap=ScoringRequestOutput.from_output)

    def stats(self) -> EngineStats:
        """Counters and gauges; sums of the last reports if there are several replicas."""
        return self._service.stats()

    def close(self) -> None:
        """End all processes and free the device, once the step under way has ended. May be called twice. In a fork of
        the process that loaded the model it does nothing: they are that process's."""
        if not self._turns.are_here:
            return
        self._turns.end()
        self._service.close()

    def __repr__(self) -> str:
        return f"LLM({self.config.model!r}, platform={self.config.platform!r})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    # -- one call --------------------------------------------------------------------------------------------------

    def _media_rules(self, allowed_dir: Path | str | None) -> MediaRules:
        return replace(
            self._rules, allowed_dir=allowed_dir or self.allowed_media_dir,
            max_bytes=self.options.max_media_bytes, max_total_bytes=self.options.max_prompt_media_bytes)

    def _pool(self, prompts: Any, params: PoolingRequests, task: str, wrap: Callable[..., Any], use_tqdm: Bar,
              stream_results: bool, return_errors: bool, parse: Parse = parse_prompt) -> Any:
        is_one = is_one_prompt(prompts) or is_conversation(prompts)
        self.processor.check_task(task)
        given = PoolingParams() if params is None else params
        return self._run([prompts] if is_one else prompts, given, parse, use_tqdm, stream_results, return_errors,
                         wrap=wrap)

    def _run(self, items: Iterable[Any], sampling_params: AnyParams | None, parse: Parse, use_tqdm: Bar,
             stream_results: bool, return_errors: bool, max_tokens: int | None = None,
             wrap: Callable[..., Any] = lambda output, **_: output) -> Any:
        """`max_tokens`: the limit where neither params nor the checkpoint name one; None: the model's length. `wrap`
        makes the caller's result of an output; `is_raw`: the request wants logits (`use_activation` False); `classes`:
        the request's own labels."""
        if not isinstance(items, Iterable):
            raise RequestError(f"prompts: a list or an iterator is needed, not {type(items).__name__}", "invalid_type")
        total = len(items) if isinstance(items, Sized) else None
        limit = UnsaidLimit(self.generation_defaults, max_tokens)
        params = params_of(sampling_params, SamplingParams(**self.generation_defaults), total)
        tasks = partial(tasks_of, items, params, parse, limit, self.processor)
        if isinstance(items, Sequence) and not return_errors:
            self.processor.check_rules(params if isinstance(params, Sequence) else ())
            for index, task in enumerate(tasks()):
                if isinstance(task, MadeTask) and isinstance(task.made, RequestError):
                    raise with_index(index, task.made)
        read_seconds = inf if isinstance(items, Sequence) else _READ_SECONDS
        call = Call(is_open=stream_results or not isinstance(items, Sequence))
        if use_tqdm is None:
            use_tqdm = not stream_results and shows_progress(sys.stderr)
        results = self._results(call, tasks, read_seconds, total, use_tqdm, return_errors, limit, wrap)
        call.follow(results)
        if stream_results:
            return results
        try:
            finished = dict(results)
        finally:
            results.close()
        return [finished[index] for index in range(len(finished))]

    def _results(self, call: Call, tasks: Callable[[int], Iterator[PromptTask]], read_seconds: float,
                 total: int | None, use_tqdm: Bar, return_errors: bool, limit: UnsaidLimit,
                 wrap: Callable[..., Any]) -> Generator[tuple[int, Any]]:
        self._turns.start(call)
        if self._is_torn:
            self._reset()  # again, if an interrupt came before it was done the first time
        self._is_torn = True
        try:
            first, wanted = self.num_requests, dict[int, dict[str, Any]]()
            make_bar = use_tqdm if callable(use_tqdm) else tqdm
            with make_bar(total=total, disable=not use_tqdm, unit="request") as bar:
                for index, answer in self._service.answers(_record_wanted(tasks(first), wanted), read_seconds):
                    if isinstance(answer, RequestError) and not return_errors:
                        raise with_index(index, answer)
                    bar.update()
                    if isinstance(answer, RequestError):
                        answer = RequestOutput.failed(f"request-{first + index}", answer)
                    limit.log_cut_off(answer)
                    yield index, wrap(answer, **wanted.pop(index, {}))
                    if not self._turns.is_current(call):
                        raise RequestError("these results ended when the LLM was called again, or closed",
                                           code="results_ended")
        except EngineDeadError:
            self.close()
            raise
        except GeneratorExit:  # the stream is dropped, by any thread; the next call cleans up
            raise
        except BaseException:
            if self._turns.is_current(call):
                self._reset()
            raise
        self._is_torn = False

    def _reset(self) -> None:
        """Abort all requests. Nothing is repaired, all is made again."""
        self._service.reset()
        self._is_torn = False


def _record_wanted(tasks: Iterator[PromptTask], wanted: dict[int, dict[str, Any]]) -> Iterator[PromptTask]:
    """`tasks`; arguments for `wrap` of those that want logits or bring labels are added to `wanted`, by index."""
    for index, task in enumerate(tasks):
        if isinstance(task.params, PoolingParams):
            if task.params.use_activation is False:
                wanted[index] = {"is_raw": True}
            if task.params.labels is not None:
                classes = Classes(labels=tuple(task.params.labels), activation=SOFTMAX)
                wanted[index] = {**wanted.get(index, {}), "classes": classes}
        yield task
