"""Every setting of the runner, validated once and never written afterwards, in one dataclass per component.

Users see all of them under flat names: on the command line, in `LLM` and in messages. Knows nothing of checkpoints or
devices.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.platforms import check_name
from npu_runner.request.limits import LIMITS, MIB

GRAPH_MODES = ("auto", "eager", "reduce-overhead", "max-autotune")
# Without max_model_len a checkpoint that promises 256k tokens would take all memory for tables nobody needs.
DEFAULT_MAX_MODEL_LEN = 32768
MAX_VIDEO_FPS = 1000.0


def one_of(*choices: str) -> Any:
    """A field whose value is one of `choices`, the first of them by default; `check_choices` holds it to that."""
    return dataclasses.field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The ranks that share one model."""

    tensor_parallel_size: int = 1
    """Devices (on the cpu platform: processes) that share each layer."""
    step_timeout_seconds: float = 600.0
    """With tensor_parallel_size above 1: a rank that does not finish one call within this time ends the job."""

    def __post_init__(self) -> None:
        _check_positive(self, "tensor_parallel_size")
        if self.step_timeout_seconds <= 0:
            raise ConfigError(f"step_timeout_seconds: {self.step_timeout_seconds} is not positive")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Which tokens run in a step."""

    max_num_seqs: int | None = None
    """Most sequences decoded together; None: the platform's, or as many as their states have room for."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one prefill step; longer prompts are prefilled in chunks. None: the platform's."""
    async_scheduling: bool | None = None
    """Plan and launch a step while the one before runs, so that the device does not wait for the host. None: the
    platform's (npu, cuda: yes; cpu: no)."""

    def __post_init__(self) -> None:
        _check_positive(self, "max_num_seqs", "max_num_batched_tokens")
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(f"async_scheduling: {self.async_scheduling!r} is neither true nor false")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What the device keeps between steps, beside the weights."""

    block_size: int | None = None
    """Tokens per KV block; None: the platform's, which its attention kernels decide."""
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

    def __post_init__(self) -> None:
        _check_positive(self, "block_size", "kv_cache_bytes")
        if not 0.05 <= self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization: {self.memory_utilization} is outside 0.05 to 1.0")
        if self.vision_cache_bytes < 0:
            raise ConfigError(f"vision_cache_bytes: {self.vision_cache_bytes} is negative; 0 keeps nothing")
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
    """How requests become prompts, and answers text."""

    image_min_pixels: int | None = None
    """Smaller images are scaled up to this many pixels; None: the checkpoint's setting."""
    image_max_pixels: int | None = None
    """Larger images are scaled down to this many pixels; None: the checkpoint's setting."""
    video_fps: float | None = None
    """Frames sampled from each second of a video; None: the checkpoint's setting (Qwen3-VL: 2)."""
    video_max_frames: int | None = None
    """Most frames sampled from a video, at equal distances; None: the checkpoint's setting."""
    max_source_pixels: int = LIMITS.max_source_pixels
    """An image whose file declares more pixels is refused before it is decoded. Decoding takes 4 to 10 bytes a pixel
    (WebP: 16, JPEG 2000: 20)."""
    max_images_per_prompt: int = LIMITS.max_images_per_prompt
    """A prompt with more images and videos is refused."""
    max_logprobs_per_request: int = LIMITS.max_logprobs_per_request
    """A request for more log probabilities is refused. Counted are n x max_tokens x (top_logprobs + 1), and prompt
    tokens x (prompt_logprobs + 1)."""
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
        _check_positive(self, "image_min_pixels", "image_max_pixels", "video_max_frames", "max_source_pixels",
                        "max_images_per_prompt", "max_logprobs_per_request")
        if not isinstance(self.chat_template_kwargs, (dict, type(None))):
            raise ConfigError(f"chat_template_kwargs: {self.chat_template_kwargs!r} is no object of names and values")
        if self.video_fps is not None and not 0 < self.video_fps <= MAX_VIDEO_FPS:
            raise ConfigError(f"video_fps: {self.video_fps} is not above 0 and up to {MAX_VIDEO_FPS:g}")
        low, high = self.image_min_pixels, self.image_max_pixels
        if low is not None and high is not None and low > high:
            raise ConfigError(f"image_min_pixels {low} is more than image_max_pixels {high}")


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How decode steps are compiled."""

    graph_mode: str = one_of(*GRAPH_MODES)
    """eager runs without graphs; auto: the platform's default."""
    enforce_eager: bool = False
    """Same as graph_mode eager; vLLM's name."""
    graph_batch_sizes: tuple[int, ...] | None = None
    """Batch sizes that graphs are made for; None: 1, 2, 4, 8, then multiples of 16 up to max_num_seqs."""
    use_graph_cache: bool | None = None
    """Keep compiled decode graphs for the next start (npu with graph_mode max-autotune); None: where that is
    possible."""
    graph_cache_dir: str = "~/.cache/npu_runner/graphs"
    """Folder of compiled graphs, with a subfolder for each combination of model, settings, code and versions."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.enforce_eager and self.graph_mode not in ("auto", "eager"):
            raise ConfigError(f"enforce_eager contradicts graph_mode={self.graph_mode!r}; set one of them")
        if self.graph_batch_sizes is not None:
            sizes = tuple(sorted(set(self.graph_batch_sizes)))
            if not sizes or sizes[0] < 1:
                raise ConfigError(f"graph_batch_sizes: {self.graph_batch_sizes} must be positive batch sizes")
            object.__setattr__(self, "graph_batch_sizes", sizes)


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Settings of one runner: the model and what it runs on, and the parts that one component each is handed.

    `from_keywords` and `replace` take all of them under flat names. An unknown name or a value out of range is a
    ConfigError that names it.
    """

    model: str
    """Folder of a checkpoint, a hub id, or the name of an embedded model (shapes-vl or shapes-hybrid)."""
    revision: str | None = None
    """Branch, tag or commit where the model is a hub id."""
    runner: str = one_of("auto", "generate", "pooling")
    """generate answers with text, pooling with numbers (see task). auto: pooling where the checkpoint's modules.json
    (sentence-transformers), its architectures (a classifier's) or task says so, else generate."""
    task: str = one_of("auto", "embed", "score", "classify")
    """What runner pooling makes of a prompt: embed, a vector (/v1/embeddings, LLM.embed); score, how well a document
    answers a query, as the logit of yes less that of no (/v1/score, /v1/rerank, LLM.score). classify, the
    probabilities of classes (/v1/classify, LLM.classify), of a checkpoint whose architectures name a
    *ForSequenceClassification. auto: as modules.json or architectures say, else embed."""
    platform: str = "auto"
    """npu, cuda, cpu, or the name of an installed package's; auto takes the usable one of highest priority (ours: in
    that order), and is an error where devices are there and cannot be used."""
    dtype: str = one_of("auto", "float32", "bfloat16", "float16")
    """auto: the checkpoint's own, except on the cpu platform, which computes in float32."""
    attention_backend: str = "auto"
    """Attention kernels, where there are several (cuda: triton, flashinfer); auto: our own (cuda: triton)."""
    load_format: str = one_of("safetensors", "dummy")
    """safetensors reads the checkpoint; dummy draws random weights on the device, for benchmarks."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its answer together; None: the checkpoint's, 32,768 at most, lowered to what the KV
    cache holds."""
    prepare_structured_outputs: bool = False
    """Build the token table of structured_outputs (response_format, guided_*) while the weights load. Without it the
    first such request builds it, and all requests wait for a second or more. npu-runner batch sets it if there is a
    response_schema."""
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
        check_choices(self)
        if self.runner == "generate" and self.task != "auto":
            raise ConfigError(f"task {self.task}: runner generate answers with text; leave runner at auto, or task")
        _check_positive(self, "max_model_len")

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
    """What `from_keywords` would make the same settings of."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        found |= {field.name: value} if part_of(field) is None else flat_values(value)
    return found


def from_keywords(given: Mapping[str, Any], *kinds: type) -> tuple[Any, ...]:
    """One object of each kind, from settings under flat names. Raises ConfigError for a name that none of them has."""
    known = [name for kind in kinds for name in flat_fields(kind)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or sorted(known)
            raise ConfigError(f"unknown setting {name!r}; did you mean {', '.join(near)}?")
    return tuple(_from_known(given, kind) for kind in kinds)


def _from_known(given: Mapping[str, Any], settings: type) -> Any:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        kind = part_of(field)
        if kind is not None:
            values[field.name] = _from_known(given, kind)
        elif field.name in given:
            values[field.name] = given[field.name]
    return settings(**values)


def check_choices(settings: Any) -> None:
    """Raises ConfigError for a field of this dataclass that is none of its choices."""
    for field in dataclasses.fields(settings):
        if "choices" in field.metadata:
            _one_of(field.name, getattr(settings, field.name), field.metadata["choices"])


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


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
