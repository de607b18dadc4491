"""Every setting of the runner, validated once and never written afterwards, in one dataclass per component.

Users see all of them under flat names: on the command line, in `LLM` and in messages. Knows nothing of checkpoints or
devices.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.platforms import check_name
from npu_runner.request.limits import LIMITS, MIB
from npu_runner.request.speculative import SpeculativeConfig

GRAPH_MODES = ("auto", "eager", "reduce-overhead", "max-autotune")
# Without max_model_len a checkpoint that promises 256k tokens would use all memory for tables that are not read.
DEFAULT_MAX_MODEL_LEN = 32768
MAX_VIDEO_FPS = 1000.0
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


READ, WRITTEN = "read", "written"
"""The metadata `file` of a setting that names a file or a folder: no file that is read may be written over."""


def one_of(*choices: str) -> Any:
    """A field whose value is one of `choices`, the first of them by default; `check_choices` holds it to that."""
    return dataclasses.field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The ranks that share one model."""

    tensor_parallel_size: int = 1
    """Devices (on the cpu platform: processes) that share each layer."""
    enable_expert_parallel: bool = False
    """With tensor_parallel_size above 1: each rank holds some experts whole, and not a slice of each; vLLM's name. The
    rest of a layer is shared as without it."""
    disable_custom_all_reduce: bool = False
    """With tensor_parallel_size above 1 on cuda: NCCL sums all messages of the ranks. Without it a kernel of ours sums
    those of up to 8 MiB, on Hopper with NVLink; vLLM's name."""
    step_timeout_seconds: float = 600.0
    """With tensor_parallel_size above 1: a rank that does not finish one call within this time ends the job."""

    def __post_init__(self) -> None:
        _check_positive(self, "tensor_parallel_size")
        for name in ("enable_expert_parallel", "disable_custom_all_reduce"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is neither true nor false")
        if self.step_timeout_seconds <= 0:
            raise ConfigError(f"step_timeout_seconds: {self.step_timeout_seconds} is not positive")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The tokens of a step."""

    max_num_seqs: int | None = None
    """Most sequences decoded together; None: the platform's, or as many as their states have room for."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one prefill step; longer prompts are prefilled in chunks. None: the platform's (npu: 8192; cuda:
    8192, and 16384 for models with a hidden size of at most 1536 that have a tower or layers with state; cpu: 4096)."""
    async_scheduling: bool | None = None
    """Plan and launch a step while the one before runs, so that the device does not wait for the host. With drafts:
    where none may follow. None: the platform's (npu, cuda: yes; cpu: no)."""
    speculative_config: Mapping[str, Any] | None = None
    """Several tokens a step: tokens are proposed and verified together, as a JSON object like {"method": "ngram",
    "num_speculative_tokens": 4}; vLLM's name. See [several tokens a step](speculative.md). None: one token a step."""

    def __post_init__(self) -> None:
        _check_positive(self, "max_num_seqs", "max_num_batched_tokens")
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(f"async_scheduling: {self.async_scheduling!r} is neither true nor false")
        self.speculative  # noqa: B018 - raises ConfigError for one that is not served

    @functools.cached_property
    def speculative(self) -> SpeculativeConfig | None:
        """`speculative_config`, parsed. A model may refuse it: `RunnerInfo` has what is run."""
        return None if self.speculative_config is None else SpeculativeConfig.from_mapping(self.speculative_config)

    def schedules_ahead(self, by_default: bool) -> bool:
        """Whether a step is submitted while the one before runs. `by_default`: the platform's async_scheduling."""
        return by_default if self.async_scheduling is None else self.async_scheduling


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The memory that lives between steps, beside the weights."""

    block_size: int | None = None
    """Tokens per KV block; None: the platform's, which its attention kernels decide."""
    kv_cache_dtype: str = one_of("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
    """The dtype of keys and values: fp8, which is fp8_e4m3, has half the bytes of 16 bits, with the checkpoint's scales
    or 1 (cuda from Ada on); bfloat16 and float16 must be the model's dtype. auto: fp8 where the checkpoint has a
    kv_cache_scheme of it and the platform supports it, else the model's dtype. vLLM's name."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache; more than is free when the model starts to load is refused. None: measured from free device
    memory; on the cpu platform 1 GiB."""
    memory_utilization: float = 0.9
    """Share of the device's memory for weights, activations and KV cache together. It has no effect on the cpu
    platform, where the cache has a fixed size."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts with the same beginning, images included."""
    max_state_snapshots: int | None = None
    """Snapshots of the state that the prefix cache of a model with Gated DeltaNet layers keeps; 0: no prefix cache.
    None: as many as the memory ledger allows."""
    vision_cache_bytes: int = 512 * MIB
    """Most bytes of cached vision embeddings (main and deepstack) on the device; 0 keeps none."""
    vision_cache_host_bytes: int = 0
    """Most bytes of host memory, per replica, for vision embeddings that the cache on the device had no room for; 0
    keeps none. Several ranks share it equally, and each holds all embeddings."""

    def __post_init__(self) -> None:
        check_choices(self)
        _check_positive(self, "block_size", "kv_cache_bytes")
        if not 0.05 <= self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization: {self.memory_utilization} is outside 0.05 to 1.0")
        if self.vision_cache_bytes < 0:
            raise ConfigError(f"vision_cache_bytes: {self.vision_cache_bytes} is negative; 0 keeps nothing")
        if self.vision_cache_host_bytes < 0:
            raise ConfigError(f"vision_cache_host_bytes: {self.vision_cache_host_bytes} is negative; 0 keeps nothing")
        num = self.max_state_snapshots
        if num is None:
            return
        if isinstance(num, bool) or not isinstance(num, int) or num < 0:
            raise ConfigError(f"max_state_snapshots: {num!r} is not a number of snapshots; 0 keeps none")
        if num and not self.enable_prefix_caching:
            raise ConfigError(f"max_state_snapshots {num}: snapshots are for the prefix cache, and "
                              "enable_prefix_caching is off; turn it on or leave max_state_snapshots out")


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """The way from requests to prompts, and from tokens to text."""

    image_min_pixels: int | None = None
    """Smaller images are scaled up to this many pixels; so are frames of videos of qwen2_vl and qwen2_5_vl. None: the
    checkpoint's setting."""
    image_max_pixels: int | None = None
    """Larger images are scaled down to this many pixels; so are frames of videos of qwen2_vl and qwen2_5_vl. None: the
    checkpoint's setting."""
    video_fps: float | None = None
    """Frames sampled from each second of a video; None: the checkpoint's setting (Qwen3-VL: 2)."""
    video_max_frames: int | None = None
    """Most frames sampled from a video, at equal distances; None: the checkpoint's setting."""
    video_num_frames: int | None = None
    """Frames sampled from a video, whatever its length; None: as video_fps says."""
    max_source_pixels: int = LIMITS.max_source_pixels
    """An image whose file declares more pixels is refused before it is decoded. Decoding takes 4 to 10 bytes a pixel
    (WebP: 16, JPEG 2000: 20)."""
    max_images_per_prompt: int = LIMITS.max_images_per_prompt
    """A prompt with more images and videos is refused."""
    limit_mm_per_prompt: Mapping[str, int] | None = None
    """A prompt with more of one kind is refused, as a JSON object like {"image": 2, "video": 1}; vLLM's name. Where it
    allows more than max_images_per_prompt does by default, that is raised. None: images and videos count together."""
    max_logprobs_per_request: int = LIMITS.max_logprobs_per_request
    """A request for more log probabilities is refused. Counted are n x max_tokens x (top_logprobs + 1), and prompt
    tokens x (prompt_logprobs + 1)."""
    chat_template: str | None = dataclasses.field(default=None, metadata={"values": "FILE", "file": READ})
    """File of the chat template, in the place of the checkpoint's; in Python also the template's text. None: the
    checkpoint's."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template, as a JSON object like {"enable_thinking": false}. A request's own
    chat_template_kwargs win, name by name."""
    reasoning_parser: str = one_of("auto", "none")
    """auto: where the checkpoint has tokens that enclose reasoning, the reasoning is split off the answer. none: the
    answer stays as the model wrote it."""
    tool_call_parser: str = "auto"
    """Format of tool calls in answers: hermes, qwen3_coder, the name of an installed package's parser, or none (they
    stay text). auto: the format of the chat template."""

    def __post_init__(self) -> None:
        check_choices(self)
        _check_positive(self, "image_min_pixels", "image_max_pixels", "video_max_frames", "video_num_frames",
                        "max_source_pixels", "max_images_per_prompt", "max_logprobs_per_request")
        self._check_media_limits()
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", template_text(self.chat_template))
        if not isinstance(self.chat_template_kwargs, (dict, type(None))):
            raise ConfigError(f"chat_template_kwargs: {self.chat_template_kwargs!r} is no object of names and values")
        if self.video_fps is not None and not 0 < self.video_fps <= MAX_VIDEO_FPS:
            raise ConfigError(f"video_fps: {self.video_fps} is not above 0 and up to {MAX_VIDEO_FPS:g}")
        if self.video_fps is not None and self.video_num_frames is not None:
            raise ConfigError("video_num_frames: contradicts video_fps; set one of them")
        low, high = self.image_min_pixels, self.image_max_pixels
        if low is not None and high is not None and low > high:
            raise ConfigError(f"image_min_pixels {low} is more than image_max_pixels {high}")

    def _check_media_limits(self) -> None:
        name, limits = "limit_mm_per_prompt", self.limit_mm_per_prompt
        if limits is None:
            return
        if not isinstance(limits, Mapping):
            raise ConfigError(f'{name}: {limits!r} is no object like {{"image": 2, "video": 1}}')
        for kind, most in limits.items():
            if kind not in ("image", "video") and most != 0:
                raise ConfigError(f"{name}: {kind!r} is not served, image and video are; leave it out, or allow 0")
            if isinstance(most, bool) or not isinstance(most, int) or most < 0:
                raise ConfigError(f"{name}: {most!r} is no number of {kind}s; 0 allows none")
        total, most_of_all = sum(limits.values()), self.max_images_per_prompt
        if total > most_of_all != LIMITS.max_images_per_prompt:
            raise ConfigError(f"{name}: {total} images and videos are more than max_images_per_prompt {most_of_all}; "
                              "raise that, or leave it out")
        object.__setattr__(self, name, dict(limits))
        object.__setattr__(self, "max_images_per_prompt", max(total, most_of_all))


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """The compilation of decode steps."""

    graph_mode: str = one_of(*GRAPH_MODES)
    """eager runs without graphs; auto: the platform's default."""
    enforce_eager: bool = False
    """Same as graph_mode eager; vLLM's name."""
    graph_batch_sizes: tuple[int, ...] | None = None
    """Batch sizes that graphs are made for; None: 1, 2, 4, 8, then multiples of 16 up to max_num_seqs."""
    graph_prefill_sizes: tuple[int, ...] | None = None
    """Numbers of tokens that graphs of prefills are made for (cuda, of models without states); None: 14 sizes up to
    1,024, then up to eight whose launches take the host at least half of their time; 0: no such graphs."""
    use_graph_cache: bool | None = None
    """Keep compiled decode graphs for the next start (npu with graph_mode max-autotune); None: where that is
    possible."""
    graph_cache_dir: str = "~/.cache/npu_runner/graphs"
    """Folder of compiled graphs, with a subfolder for each combination of model, settings, code and versions."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.enforce_eager and self.graph_mode not in ("auto", "eager"):
            raise ConfigError(f"enforce_eager contradicts graph_mode={self.graph_mode!r}; set one of them")
        for name, least, what in (("graph_batch_sizes", 1, "positive batch sizes"),
                                  ("graph_prefill_sizes", 0, "numbers of tokens")):
            value = getattr(self, name)
            if value is not None:
                sizes = tuple(sorted(set(value)))
                if not sizes or sizes[0] < least:
                    raise ConfigError(f"{name}: {value} must be {what}")
                object.__setattr__(self, name, sizes)


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Settings of one runner: the model and what it runs on, and the parts that one component each is handed.

    `from_keywords` and `replace` take all of them under flat names. An unknown name or a value out of range is a
    ConfigError that names it.
    """

    model: str = dataclasses.field(metadata={"file": READ})
    """Folder of a checkpoint, a hub id, or the name of an embedded model (shapes-vl, shapes-hybrid, shapes-reader)."""
    revision: str | None = None
    """Branch, tag or commit where the model is a hub id."""
    runner: str = one_of("auto", "generate", "pooling")
    """generate answers with text, pooling with numbers (see task). auto: pooling where the checkpoint's modules.json
    (sentence-transformers), its architectures (a classifier's) or task says so, else generate."""
    task: str = one_of("auto", "embed", "score", "classify")
    """The result of runner pooling for a prompt. embed: a vector (/v1/embeddings, LLM.embed). score: how well a
    document answers a query, as the logit of yes less that of no (/v1/score, /v1/rerank, LLM.score). classify: the
    probabilities of classes (/v1/classify, LLM.classify), for a checkpoint whose architectures name a
    *ForSequenceClassification. auto: as modules.json or architectures say, else embed."""
    platform: str = "auto"
    """npu, cuda, cpu, or the name of an installed package's; auto takes the usable one of highest priority (ours: in
    that order), and is an error where devices are there and cannot be used."""
    dtype: str = one_of("auto", "float32", "bfloat16", "float16")
    """auto: the checkpoint's own, except on the cpu platform, which computes in float32. half is float16."""
    attention_backend: str = "auto"
    """Attention kernels, where there are several (cuda: triton, flashinfer); auto: our own (cuda: triton)."""
    load_format: str = one_of("safetensors", "dummy")
    """safetensors reads the checkpoint; dummy makes random weights on the device, for benchmarks."""
    quantization: str = one_of("auto", "int8", "fp8")
    """auto: as the checkpoint is; quantised weights that the platform has no matmul for are dequantised while
    loading. int8 makes int8 of the linears of decoder and tower and of experts, stored in 16 bits or FP8, while
    loading, and rounds their inputs to int8, too (npu; cuda on Hopper, but not in max-autotune). fp8 makes FP8 (e4m3)
    of such linears in the same way, and of experts by block of 128 x 128, of 16 bits alone (cuda on Hopper, in
    bfloat16). cpu rounds the weights alike and multiplies in float32. An FP8 checkpoint with fp8 is as with auto.
    vLLM's name."""
    lora: str | None = dataclasses.field(default=None, metadata={"values": "PATH", "file": READ})
    """Folder of a LoRA adapter that PEFT has saved. It is merged into the weights while they are read, in float32, and
    so serves all requests. None: no adapter."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its answer together; None: the checkpoint's, 32,768 at most, lowered to what the KV
    cache holds."""
    prepare_structured_outputs: bool = False
    """Build the token table of structured_outputs (response_format, guided_*) while the weights load. Without it the
    first such request builds it, and all requests wait for a second or more. npu-runner batch sets it if there is a
    response_schema."""
    logprobs_mode: str = one_of("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
    """The values of `logprobs`. raw_logprobs: log probabilities of the model's own distribution. raw_logits: its
    logits. processed_logits: the logits that a token is sampled from, after penalties, logit_bias, bans, masks of
    grammars, temperature, top_k, top_p and min_p; minus infinity for tokens that cannot come. Greedy answers skip the
    last four. processed_logprobs: their log_softmax. `prompt_logprobs` are logits with the two modes of logits, else
    raw_logprobs: nothing is sampled in a prompt. Jobs refuse the modes of logits. vLLM's name."""
    hidden_state_layers: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"in_python_only": True})
    """Layers whose hidden states requests with `return_hidden_states` get, by the numbers of transformers'
    `hidden_states`: 0 is the embeddings, n the output of the n-th layer, -1 (or the number of layers) the one behind
    the final norm. All steps compute them, so that graphs have fixed outputs. None: no request may ask."""
    seed: int = 0
    """Seed of requests without a seed of their own, and of dummy weights."""
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    prompts: PromptConfig = dataclasses.field(default_factory=PromptConfig)
    graphs: GraphConfig = dataclasses.field(default_factory=GraphConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: a checkpoint folder or a hub id is needed")
        check_name(self.platform)
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", _DTYPE_NAMES.get(dtype, dtype))
        check_choices(self)
        if self.runner == "generate" and self.task != "auto":
            raise ConfigError(f"task {self.task}: runner generate answers with text; leave runner at auto, or task")
        _check_positive(self, "max_model_len")
        if self.hidden_state_layers is not None:
            object.__setattr__(self, "hidden_state_layers", _layer_numbers(self.hidden_state_layers))

    @classmethod
    def from_keywords(cls, model: str | Path, **settings: Any) -> RunnerConfig:
        """Build a config from flat keywords; an unknown one is a ConfigError that lists the nearest names."""
        (config,) = from_keywords({"model": str(model), **settings}, cls)
        return config  # type: ignore[no-any-return]

    def replace(self, **changes: Any) -> RunnerConfig:
        """A copy with some settings changed under their flat names, validated again."""
        return self.from_keywords(**{**flat_values(self), **changes})


# -- settings under flat names: a part is a field whose default is made by a dataclass ---------------------------------


def part_of(field: dataclasses.Field[Any]) -> type | None:
    """The dataclass of a field that holds a part; None: the field is a setting itself."""
    kind = field.default_factory
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def flat_fields(settings: type) -> dict[str, dataclasses.Field[Any]]:
    """The settings of a dataclass and of its parts, by the name that each has for users."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(settings):
        kind = part_of(field)
        found |= {field.name: field} if kind is None else flat_fields(kind)
    return found


def flat_values(settings: Any) -> dict[str, Any]:
    """The settings under flat names: `from_keywords` makes the same object of them."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        found |= {field.name: value} if part_of(field) is None else flat_values(value)
    return found


def from_keywords(keywords: Mapping[str, Any], *kinds: type) -> tuple[Any, ...]:
    """One object of each kind, from settings under flat names. Raises ConfigError for a name that none of them has."""
    known = [name for kind in kinds for name in flat_fields(kind)]
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "docs/options.md lists all, docs/from-vllm.md vLLM's"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    values = {name: _in_bytes(name, value) for name, value in keywords.items()}
    return tuple(_from_known(values, kind) for kind in kinds)


def _in_bytes(name: str, value: Any) -> Any:
    """A size may be written as on the command line."""
    if not isinstance(value, str) or not name.endswith("_bytes"):
        return value
    try:
        return read_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def read_size(text: str) -> int:
    """A number of bytes; K, M, G and T (also KiB, KB, ...) multiply by powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 1073741824, 1024M or 1G")
    return int(match[1]) * _SIZES[match[2]]


class TemplateText(str):
    """The text of a chat template."""

    file: Path | None = None
    """Where it was read from; None: it was given as it is."""


def template_text(template: str | Path) -> TemplateText:
    """The text of a chat template, which is given itself or by its file. Raises ConfigError for a file that cannot be
    read."""
    if isinstance(template, TemplateText):
        return template
    if isinstance(template, str) and any(character in template for character in "{}\n"):
        return TemplateText(template)
    try:
        file = Path(template).expanduser()
        text = TemplateText(file.read_text(encoding="utf-8"))
        text.file = file
    except (OSError, UnicodeDecodeError, TypeError) as error:
        message = f"chat_template: {str(template)!r} cannot be read ({error}); name the template's file"
        raise ConfigError(message) from error
    if not any(character in text for character in "{}\n"):
        raise ConfigError(f"chat_template: {str(template)!r} holds no template: there is no {{ in it")
    return text


def _from_known(keywords: Mapping[str, Any], settings: type) -> Any:
    parts = {field.name: part_of(field) for field in dataclasses.fields(settings)}
    return settings(**{name: keywords[name] if kind is None else _from_known(keywords, kind)
                       for name, kind in parts.items() if kind is not None or name in keywords})


def _layer_numbers(given: Any) -> tuple[int, ...] | None:
    is_list = isinstance(given, (list, tuple))
    if not is_list or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in given):
        raise ConfigError(f"hidden_state_layers: {given!r} is no list of layer numbers like (12, -1)")
    return tuple(given) or None


def check_choices(settings: Any) -> None:
    """Raises ConfigError for a field of this dataclass that is none of its choices."""
    for field in dataclasses.fields(settings):
        value, choices = getattr(settings, field.name), field.metadata.get("choices")
        if choices is not None and value not in choices:
            raise ConfigError(f"{field.name}: {value!r} is not one of {', '.join(choices)}")


def _check_positive(settings: Any, *names: str) -> None:
    """Raises ConfigError for one of these settings that is no positive integer; where None is the default, it may be
    None."""
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if value is None and defaults[name] is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: {value!r} is not a positive integer")
