"""Every setting of the runner, validated once and never written afterwards. Knows nothing of checkpoints or devices."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS

GIB = 1 << 30
MIB = 1 << 20
PLATFORMS = ("auto", "npu", "cuda", "cpu")
GRAPH_MODES = ("auto", "eager", "reduce-overhead", "max-autotune")
# Without max_model_len a checkpoint that promises 256k tokens would take all memory for tables nobody needs.
DEFAULT_MAX_MODEL_LEN = 32768
MAX_VIDEO_FPS = 1000.0


def one_of(*choices: str) -> Any:
    """A field whose value is one of `choices`, the first of them by default; `check_choices` holds it to that."""
    return dataclasses.field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Settings of one runner. An unknown name or a value out of range is a ConfigError that names it."""

    model: str
    """Folder of a checkpoint, a hub id, or the name of an embedded model (shapes-vl or shapes-hybrid)."""
    revision: str | None = None
    """Branch, tag or commit when `model` is a hub id."""
    runner: str = one_of("auto", "generate", "pooling")
    """generate answers with text, pooling with vectors (/v1/embeddings, LLM.embed); auto: pooling where the
    checkpoint's modules.json (sentence-transformers) says so, else generate."""
    platform: str = "auto"
    """npu, cuda or cpu; auto takes the first that is usable, in that order."""
    dtype: str = one_of("auto", "float32", "bfloat16", "float16")
    """auto: the checkpoint's own, except on the cpu platform, which computes in float32."""
    load_format: str = one_of("safetensors", "dummy")
    """safetensors reads the checkpoint; dummy draws random weights on the device (for benchmarks)."""
    tensor_parallel_size: int = 1
    """Devices (on the cpu platform: processes) that share each layer."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: the checkpoint's, 32,768 at most, cut to what the KV
    cache holds."""
    max_num_seqs: int | None = None
    """Most sequences decoded together; None: the platform's default, or as many as have room for their states."""
    async_scheduling: bool | None = None
    """Plan and hand over a step while the one before runs, so that the device need not wait for the host; None: the
    platform's default (npu, cuda: yes; cpu: no)."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one prefill step; longer prompts are prefilled in chunks. None: the platform's default."""
    block_size: int | None = None
    """Tokens per KV block; None: the platform's default (what its attention kernels like)."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache. None: measured from free device memory; on the cpu platform 1 GiB."""
    memory_utilization: float = 0.9
    """Share of the device's memory that weights, activations and KV cache may take together; not on the cpu platform,
    whose cache is a setting."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike, pictures included."""
    max_state_snapshots: int | None = None
    """Snapshots of the state that the prefix cache of a model with Gated DeltaNet layers keeps; 0: no prefix cache.
    None: what the memory ledger gives."""
    vision_cache_bytes: int = 512 * MIB
    """Bound on cached vision embeddings (main and deepstack) on the device."""
    image_min_pixels: int | None = None
    """Smaller pictures are scaled up to this many pixels; None: the checkpoint's setting."""
    image_max_pixels: int | None = None
    """Larger pictures are scaled down to this many pixels; None: the checkpoint's setting."""
    video_fps: float | None = None
    """Frames that are taken of each second of a film; None: the checkpoint's setting (Qwen3-VL: 2)."""
    video_max_frames: int | None = None
    """Of a film that would have more, so many frames are taken, evenly; None: the checkpoint's setting."""
    max_source_pixels: int = LIMITS.max_source_pixels
    """A picture whose file declares more pixels is refused before it is decoded, which takes 4 to 10 bytes each (JPEG
    2000: 20, WebP: 16)."""
    max_images_per_prompt: int = LIMITS.max_images_per_prompt
    """A prompt with more pictures and films is refused."""
    max_logprobs_per_request: int = LIMITS.max_logprobs_per_request
    """A request for more log probabilities is refused: n x max_tokens x (top_logprobs + 1), and prompt tokens x
    (prompt_logprobs + 1)."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """What the chat template reads beside the conversation, a JSON object as {"enable_thinking": false}. A request's
    own chat_template_kwargs win, name by name."""
    reasoning_parser: str = one_of("auto", "none")
    """auto: where the checkpoint has tokens to think between, the reasoning is split off the answer; none: the answer
    stays as the model wrote it."""
    prepare_structured_outputs: bool = False
    """Requests with structured_outputs (response_format, guided_*) will come: what follows them is made ready while the
    weights load, and not when the first one comes, which holds everybody up for a second or more. npu-runner batch
    does so by itself where there is a response_schema."""
    tool_call_parser: str = "auto"
    """How tool calls are read out of answers to rows with tools: hermes, qwen3_coder, the name of an installed
    package's parser, or none (they stay text); auto: as the chat template asks for them to be written."""
    graph_mode: str = one_of(*GRAPH_MODES)
    """How decode steps are compiled: eager, reduce-overhead or max-autotune; auto: the platform's default."""
    enforce_eager: bool = False
    """Same as graph_mode="eager"."""
    graph_batch_sizes: tuple[int, ...] | None = None
    """Decode buckets; None: 1, 2, 4, 8, then multiples of 16 up to max_num_seqs."""
    use_graph_cache: bool | None = None
    """Keep compiled decode graphs for the next start (npu with graph_mode max-autotune); None: where they can be."""
    graph_cache_dir: str = "~/.cache/npu_runner/graphs"
    """Where compiled graphs are kept; a folder for each combination of model, settings, code and versions."""
    attention_backend: str = "auto"
    """Attention kernels, where there are several (cuda: triton, flashinfer); auto: our own (cuda: triton)."""
    step_timeout_seconds: float = 600.0
    """A rank that does not finish one call within this time ends the job (tensor_parallel_size > 1)."""
    seed: int = 0
    """Seeds requests that bring no seed of their own, and dummy weights."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: a checkpoint folder or a hub id is needed")
        _one_of("platform", self.platform, PLATFORMS)
        check_choices(self)
        if not isinstance(self.chat_template_kwargs, (dict, type(None))):
            raise ConfigError(f"chat_template_kwargs: {self.chat_template_kwargs!r} is no object of names and values")
        for name in ("tensor_parallel_size", "max_images_per_prompt", "max_source_pixels", "max_logprobs_per_request"):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_bytes",
                     "image_min_pixels", "image_max_pixels", "video_max_frames"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if not 0.05 <= self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization: {self.memory_utilization} is outside 0.05 to 1.0")
        if self.vision_cache_bytes < 0:
            raise ConfigError(f"vision_cache_bytes: {self.vision_cache_bytes} is negative; 0 keeps nothing")
        self._check_snapshots()
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(f"async_scheduling: {self.async_scheduling!r} is neither true nor false")
        if self.step_timeout_seconds <= 0:
            raise ConfigError(f"step_timeout_seconds: {self.step_timeout_seconds} is not positive")
        if self.video_fps is not None and not 0 < self.video_fps <= MAX_VIDEO_FPS:
            raise ConfigError(f"video_fps: {self.video_fps} is not above 0 and up to {MAX_VIDEO_FPS:g}")
        low, high = self.image_min_pixels, self.image_max_pixels
        if low is not None and high is not None and low > high:
            raise ConfigError(f"image_min_pixels {low} is more than image_max_pixels {high}")
        if self.enforce_eager and self.graph_mode not in ("auto", "eager"):
            raise ConfigError(f"enforce_eager contradicts graph_mode={self.graph_mode!r}; set one of them")
        if self.graph_batch_sizes is not None:
            sizes = tuple(sorted(set(self.graph_batch_sizes)))
            if not sizes or sizes[0] < 1:
                raise ConfigError(f"graph_batch_sizes: {self.graph_batch_sizes} must be positive batch sizes")
            object.__setattr__(self, "graph_batch_sizes", sizes)

    def _check_snapshots(self) -> None:
        num = self.max_state_snapshots
        if num is None:
            return
        if isinstance(num, bool) or not isinstance(num, int) or num < 0:
            raise ConfigError(f"max_state_snapshots: {num!r} is not a number of snapshots; 0 keeps none")
        if num and not self.enable_prefix_caching:
            raise ConfigError(f"max_state_snapshots {num}: snapshots are for the prefix cache, and "
                              "enable_prefix_caching is off; turn it on or leave max_state_snapshots out")

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


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not a positive integer")
