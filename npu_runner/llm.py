"""The Python API: a list of prompts or conversations in, a list of results out, in the same order.

Knows nothing of files or rows; the batch job has those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from npu_runner.config import RunnerConfig
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.errors import EngineDeadError, RequestError
from npu_runner.multimodal.inputs import PromptInputs
from npu_runner.multimodal.media import MediaRules, resolve_media
from npu_runner.multimodal.prompt_forms import prompt_and_images
from npu_runner.outputs import EngineStats, RequestOutput
from npu_runner.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any] | PromptInputs
"""Text, token ids, {"prompt": text or ids, "images": [PIL image or bytes, ...]}, vLLM's {"prompt" or
"prompt_token_ids", "multi_modal_data": {"image": ...}}, or an already prepared prompt."""
Conversation = Sequence[Mapping[str, Any]]
"""OpenAI-style messages; picture parts are {"type": "image", "image": PIL image or bytes}, or OpenAI's image_url."""


class LLM:
    """A loaded model. `settings` are the fields of RunnerConfig; an unknown one is a ConfigError.

        with LLM("path/to/checkpoint") as llm:
            for result in llm.chat(conversations, SamplingParams(temperature=0)):
                print(result.text)
    """

    def __init__(self, model: str | Path, **settings: Any):
        self.engine = LLMEngine(RunnerConfig.from_keywords(model, **settings))
        self._num_requests = 0
        self._is_torn = False
        """A call was interrupted, or is under way: what the engine holds is nobody's any more."""

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool = False) -> list[RequestOutput]:
        """Continue raw prompts. One prompt may stand alone; one SamplingParams may serve all prompts.

        Raises RequestError naming the prompt's index, before anything runs, when one of them cannot be served. One that
        makes the model fail all the same has finish_reason `error`.
        """
        items: Sequence[Any] = prompts if _is_list_of_prompts(prompts) else [prompts]  # type: ignore[assignment]
        return self._run([self._prompt(item, index) for index, item in enumerate(items)], sampling_params, use_tqdm)

    def chat(self, conversations: Conversation | Sequence[Conversation],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             use_tqdm: bool = False, allowed_media_dir: Path | str | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None) -> list[RequestOutput]:
        """Answer conversations through the checkpoint's chat template. One conversation may stand alone.

        An image_url may be a data: URL or, with `allowed_media_dir`, a file below that folder; nothing is downloaded.
        `chat_template_kwargs` go into the template, as {"enable_thinking": False}; a name that it does not read is a
        RequestError. What a model thinks first is a result's `reasoning_content`, its `text` is what comes behind.
        """
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        items: Sequence[Any] = [conversations] if single else conversations
        rules = MediaRules(allowed_dir=allowed_media_dir, max_images=self.engine.config.max_images_per_prompt)
        prompts = [
            _with_index(index, self._conversation, messages, rules, chat_template_kwargs)
            for index, messages in enumerate(items)
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """End all processes and free the device. May be called twice."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def _conversation(self, messages: Conversation, rules: MediaRules,
                      chat_template_kwargs: Mapping[str, Any] | None) -> PromptInputs:
        is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
        return self.engine.processor(resolve_media(messages, rules) if is_list else messages, chat_template_kwargs)

    def _prompt(self, item: Prompt, index: int) -> PromptInputs:
        if isinstance(item, PromptInputs):
            return item
        if isinstance(item, Mapping):
            text, images = _with_index(index, prompt_and_images, item)
            return _with_index(index, self.engine.processor.from_text, text, images)
        return _with_index(index, self.engine.processor.from_text, item)

    def _run(self, prompts: list[PromptInputs], sampling_params: SamplingParams | Sequence[SamplingParams] | None,
             use_tqdm: bool) -> list[RequestOutput]:
        params = self._params(sampling_params, len(prompts))
        ids = [f"request-{self._num_requests + index}" for index in range(len(prompts))]
        self._num_requests += len(prompts)
        params = [_with_index(index, self.engine.check_request, prompt, wanted)
                  for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))]
        if self._is_torn:
            self.engine.reset()  # again, if an interrupt came before it was done the first time
        self._is_torn = True
        try:
            finished = self._answer(ids, prompts, params, use_tqdm)
        except EngineDeadError:
            self.close()
            raise
        except BaseException:
            self.engine.reset()
            self._is_torn = False
            raise
        self._is_torn = False
        return [finished[request_id] for request_id in ids]

    def _answer(self, ids: list[str], prompts: list[PromptInputs], params: list[SamplingParams],
                use_tqdm: bool) -> dict[str, RequestOutput]:
        for index, request_id in enumerate(ids):
            _with_index(index, self.engine.add_request, request_id, prompts[index], params[index])
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), disable=not use_tqdm, unit="request") as bar:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    finished[output.request_id] = output
                    bar.update()
        return finished

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams(**self.engine.generation_defaults)
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts; pass one, or one for each")
        return list(given)


def _is_list_of_prompts(prompts: Any) -> bool:
    """A list is a list of prompts, unless it is one prompt's token ids."""
    is_sequence = isinstance(prompts, Sequence) and not isinstance(prompts, (str, bytes))
    return is_sequence and not (len(prompts) > 0 and isinstance(prompts[0], int))


def _with_index(index: int, function: Any, *arguments: Any) -> Any:
    """Call; a RequestError says which prompt it was."""
    try:
        return function(*arguments)
    except RequestError as error:
        raise RequestError(f"prompt {index}: {error.message}", error.code, error.param) from error
