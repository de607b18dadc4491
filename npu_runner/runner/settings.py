"""Decides the settings the user left open, by checkpoint and platform. Knows nothing of loading or running."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from npu_runner.checkpoint.model_config import MLPConfig, ModelConfig, MoEConfig
from npu_runner.checkpoint.quantization import Quantization, kv_cache_scheme
from npu_runner.config import DEFAULT_MAX_MODEL_LEN, CacheConfig, GraphConfig, RunnerConfig, SchedulerConfig
from npu_runner.core.state_snapshots import state_alignment
from npu_runner.errors import ConfigError
from npu_runner.layers.gated_delta import gated_delta_shape
from npu_runner.layers.parallel import TensorParallel
from npu_runner.platforms.facts import AttentionFacts
from npu_runner.platforms.gated_delta import GatedDeltaShape, ring_length
from npu_runner.platforms.platform import ModelNeeds, Platform
from npu_runner.request.speculative import SpeculativeConfig
from npu_runner.runner.buckets import bucket_sizes, most_padding
from npu_runner.runner.states import StateNeeds, StateShape

MAX_COUNTED_TOKENS = 2**31 - 1
FP8_CACHE = "float8_e4m3fn"
SHORT_TOKENS = 1024
"""Prefills up to this size are always recorded; they do not keep a device busy."""
# Close together, as the device computes the padding, too.
_SHORT_SIZES = (16, 32, *range(64, 512, 64), *range(512, SHORT_TOKENS + 1, 128))
_MOST_LONG_SIZES, _LONG_MULTIPLE = 8, 128
# The hidden size up to which a model is narrow. A prefill of 8,192 tokens of a 0.8B qwen3_5 took 56 to 74 ms on three
# hosts of an H200, and one of 16,384 took 108 ms.
_NARROW = 1536


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved settings that a RunnerConfig leaves open."""

    dtype: str
    attention_backend: str
    max_model_len: int
    max_model_len_is_given: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    graph_mode: str
    graph_cache_dir: Path | None
    """None means that compiled graphs are not kept."""
    kv_cache_dtype: str
    """torch's name of the dtype that keys and values are kept in."""
    weight_forms: tuple[str, ...]
    """Forms of quantised weights that are multiplied as they are."""
    speculative: SpeculativeConfig | None = None
    """None means one token a step."""
    graphs_accept_drafts: bool = True
    """Else steps with drafts run without a graph: the model has layers with a state, and no graph of the platform takes
    several tokens of a sequence through them."""
    prefill_sizes: tuple[int, ...] = ()
    """Tokens of the prefills that graphs are made for."""
    long_prefill_sizes: tuple[int, ...] = ()
    """Tokens of further ones, in ascending order, as far as launching them takes the host long enough."""
    state_ring_length: int = 0
    """Tokens of a ring; 0: there are no rings."""

    @property
    def makes_graphs(self) -> bool:
        """`graph_mode` is that of decode steps, which a model that pools has none of: its prefills may be recorded."""
        return self.graph_mode != "eager" or bool(self.prefill_sizes)

    @property
    def torch_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The model's and its KV cache's."""
        return getattr(torch, self.dtype), getattr(torch, self.kv_cache_dtype)

    @property
    def most_drafted_rows(self) -> int:
        """Tokens of the largest step with drafts; 0: there are none."""
        if self.speculative is None:
            return 0
        return min(self.max_num_batched_tokens, self.speculative.most_tokens(self.max_num_seqs))

    @property
    def ring_drafts(self) -> int:
        """Drafts of a row that go into its ring, and leave no states. 0 without rings."""
        return self.speculative.num_speculative_tokens if self.speculative and self.state_ring_length else 0

    @property
    def most_graph_rows(self) -> int:
        """Tokens of the largest step with drafts that a graph may run; 0: none does."""
        return self.most_drafted_rows if self.graphs_accept_drafts else 0

    def describe(self) -> dict[str, str]:
        """The resolved settings that shape an answer."""
        drafts = {} if self.speculative is None else {"speculative_config": self.speculative.describe()}
        cache = {} if self.kv_cache_dtype == self.dtype else {"kv_cache_dtype": self.kv_cache_dtype}
        return {"dtype": self.dtype, "graph_mode": self.graph_mode, **cache, **drafts}


def check_expert_parallel(config: RunnerConfig, model_config: ModelConfig) -> None:
    """Raises ConfigError where experts cannot be shared out whole over the ranks. One rank holds all of them."""
    if not config.parallel.enable_expert_parallel:
        return
    experts = [layer.channel.num_experts for layer in model_config.all_layers
               if isinstance(layer.channel, MoEConfig)]
    if not experts:
        raise ConfigError(f"enable_expert_parallel: {model_config.model_type} has no layers of experts; leave it out")
    if min(experts) < config.parallel.tensor_parallel_size:
        raise ConfigError(f"enable_expert_parallel: {min(experts)} experts are fewer than the "
                          f"{config.parallel.tensor_parallel_size} ranks of tensor_parallel_size, and each rank holds "
                          "one at least; lower that, or leave enable_expert_parallel out")


def resolve_settings(config: RunnerConfig, model_config: ModelConfig, platform: Platform,
                     quantization: Quantization | None) -> Settings:
    """Decide every open setting. `quantization`: of the checkpoint.

    Raises ConfigError for combinations that this model or platform cannot do.
    """
    scheduler, speculative = config.scheduler, _speculative(config.scheduler, model_config, platform)
    check_expert_parallel(config, model_config)
    max_num_seqs = _max_num_seqs(scheduler, model_config, platform)
    attention_backend = _attention_backend(config, platform)
    facts = platform.attention_backends[attention_backend]
    block_size = _block_size(config.cache, platform, facts)
    graphs_accept_drafts = not model_config.state_layers or platform.state_facts.drafts_in_graphs
    drafts = speculative if graphs_accept_drafts else None
    most_rows = max_num_seqs if drafts is None else drafts.most_tokens(max_num_seqs)
    graph_mode = prefill_mode = _graph_mode(config.graphs, model_config, platform, facts, most_rows)
    if model_config.pooling is not None:
        graph_mode = "eager"  # nothing is decoded
    max_num_batched_tokens = scheduler.max_num_batched_tokens or _batched_tokens(model_config, platform)
    _check_states(config.cache, model_config, max_num_batched_tokens, block_size)
    dtype = config.dtype if config.dtype != "auto" else (platform.defaults.dtype or model_config.dtype)
    max_model_len = _max_model_len(config, model_config, platform, facts)
    most_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    kv_cache_dtype = _kv_cache_dtype(config, platform, facts, dtype, kv_cache_scheme(quantization))
    prefill_sizes, long_prefill_sizes = _prefill_sizes(config, model_config, platform, facts, prefill_mode, most_tokens,
                                                       is_fp8=kv_cache_dtype == FP8_CACHE)
    return Settings(
        dtype=dtype,
        attention_backend=attention_backend,
        max_model_len=max_model_len,
        max_model_len_is_given=config.max_model_len is not None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        graph_mode=graph_mode,
        graph_cache_dir=_graph_cache_dir(config.graphs, platform, graph_mode),
        prefill_sizes=prefill_sizes,
        long_prefill_sizes=long_prefill_sizes,
        kv_cache_dtype=kv_cache_dtype,
        weight_forms=_weight_forms(config, platform, dtype, graph_mode),
        speculative=speculative,
        graphs_accept_drafts=graphs_accept_drafts,
        state_ring_length=_state_ring_length(model_config, platform, speculative))


def _attention_backend(config: RunnerConfig, platform: Platform) -> str:
    """Its name. Raises ConfigError where the platform has no backend of the name that is asked for."""
    backends, name = tuple(platform.attention_backends), config.attention_backend
    if name not in ("auto", *backends):
        raise ConfigError(f"attention_backend {name!r}: {platform.name} has {', '.join(backends)}")
    return backends[0] if name == "auto" else name


def state_needs(config: RunnerConfig, settings: Settings, max_num_seqs: int) -> StateNeeds:
    """The slots that a model with states needs for `max_num_seqs` sequences."""
    cache, speculative, most_tokens = config.cache, settings.speculative, settings.max_num_batched_tokens

    def padding_of(num_seqs: int) -> int:
        if settings.graph_mode == "eager":
            return 0
        # Rows of steps with drafts share these, as many as there are.
        least = 1 if speculative is not None and settings.graphs_accept_drafts else 0
        return max(least, most_padding(bucket_sizes(num_seqs, config.graphs.graph_batch_sizes)))

    needs = StateNeeds(max_num_seqs=max_num_seqs, is_given=config.scheduler.max_num_seqs is not None,
                       padding_of=padding_of,
                       max_snapshots=cache.max_state_snapshots if cache.enable_prefix_caching else 0)
    return needs if speculative is None or settings.ring_drafts else replace(
        needs, drafts_of_row=min(most_tokens - 1, speculative.num_speculative_tokens),
        drafts_of=lambda num_seqs: min(most_tokens - 1, speculative.most_drafts_of_step(num_seqs)))


def state_shape(settings: Settings, config: ModelConfig, layer: GatedDeltaShape, max_num_seqs: int) -> StateShape:
    """The states of a model whose layers have the rank's share `layer`."""
    num_beside, speculative = 0, settings.speculative
    if config.mtp is not None and speculative is not None and settings.ring_drafts:
        num_beside = min(settings.max_num_batched_tokens, speculative.most_drafts_of_step(max_num_seqs))
    return StateShape(
        num_layers=len(config.state_layers), layer=layer, element_bytes=settings.torch_dtypes[0].itemsize,
        ring_length=settings.state_ring_length, ring_drafts=settings.ring_drafts,
        hidden_size=0 if config.mtp is None else config.hidden_size, num_beside=num_beside)


def model_needs(settings: Settings, config: ModelConfig, tp: TensorParallel, forms: tuple[str, ...]) -> ModelNeeds:
    """The needs of a model's rank. `forms`: those that its weights may be multiplied in."""
    windows = {layer.sliding_window for layer in config.attention_layers}
    vision, channels = config.vision, [layer.channel for layer in config.all_layers]
    widths = [channel.intermediate_size for channel in channels if isinstance(channel, MLPConfig)]
    experts = next((channel for channel in channels if isinstance(channel, MoEConfig)), None)
    cut = 1 if tp.has_whole_experts else tp.size
    return ModelNeeds(
        dtype=settings.dtype, graph_mode=settings.graph_mode, hidden_size=config.hidden_size, head_dim=config.head_dim,
        num_heads=tp.share(config.num_heads, "num_attention_heads")[1],
        num_kv_heads=tp.kv_head_share(config.num_kv_heads)[1],
        num_drafts=settings.speculative.num_speculative_tokens if settings.speculative else 0,
        windows=tuple(sorted(window for window in windows if window is not None and window < settings.max_model_len)),
        tower=None if vision is None else (vision.num_heads, vision.hidden_size // vision.num_heads),
        mlp_width=max(widths) // tp.size if widths else None,
        experts=None if experts is None else (experts.num_experts * cut // tp.size, experts.top_k,
                                              experts.intermediate_size // cut),
        states=gated_delta_shape(config, tp), forms=forms)


def _block_size(config: CacheConfig, platform: Platform, facts: AttentionFacts) -> int:
    block_size, allowed = config.block_size or platform.defaults.block_size, facts.block_sizes
    if allowed is not None and block_size not in allowed:
        raise ConfigError(f"block_size {block_size}: platform {platform.name} supports {', '.join(map(str, allowed))}")
    return block_size


def _kv_cache_dtype(config: RunnerConfig, platform: Platform, facts: AttentionFacts, dtype: str,
                    scheme: str | None) -> str:
    """`scheme`: the checkpoint's. auto takes it where it is fp8 and the platform keeps that."""
    asked = config.cache.kv_cache_dtype
    if asked not in ("auto", dtype) and not asked.startswith("fp8"):
        raise ConfigError(f"kv_cache_dtype {asked}: keys and values are kept in the model's dtype, {dtype}, or in fp8; "
                          "leave it at auto")
    problem = platform.why_no_fp8_cache()
    if facts.fp8_prompt_room is None:
        keeper = "platform {0} keeps them" if config.attention_backend == "auto" else (
            "attention_backend {1} keeps keys and values")
        problem = f"{keeper.format(platform.name, config.attention_backend)} in the model's dtype"
    if not asked.startswith("fp8"):
        return FP8_CACHE if (asked, scheme, problem) == ("auto", "fp8", None) else dtype
    if problem is None and scheme not in (None, "fp8"):
        problem = f"the checkpoint's keys and values are to be kept otherwise ({scheme})"
    if problem is not None:
        raise ConfigError(f"kv_cache_dtype {asked}: {problem}; leave it at auto")
    return FP8_CACHE


def _check_states(config: CacheConfig, model_config: ModelConfig, max_num_batched_tokens: int, block_size: int) -> None:
    """Raises ConfigError for snapshots of a model without states, and for chunks too short for one with them."""
    snapshots = config.max_state_snapshots
    if snapshots is not None and not model_config.state_layers:
        raise ConfigError(f"max_state_snapshots {snapshots}: {model_config.model_type} has no layers "
                          "with state; leave it out")
    if model_config.state_layers and max_num_batched_tokens < state_alignment(block_size):
        raise ConfigError(f"max_num_batched_tokens {max_num_batched_tokens}: chunks of this model's prompts begin at "
                          f"multiples of {state_alignment(block_size)} tokens (64 and block_size); raise it to that")


def _state_ring_length(model_config: ModelConfig, platform: Platform, speculative: SpeculativeConfig | None) -> int:
    least = platform.state_facts.ring_length
    if not model_config.state_layers or model_config.pooling is not None or not least:
        return 0
    return ring_length(least, speculative.num_speculative_tokens if speculative else 0)


def _weight_forms(config: RunnerConfig, platform: Platform, dtype: str, graph_mode: str) -> tuple[str, ...]:
    forms = platform.forms_with(dtype, graph_mode)
    if config.quantization in platform.fallbacks:
        raise ConfigError(f"quantization {config.quantization!r}: the matmuls of this device are wrong, as the "
                          "warning above says; leave it at auto")
    if config.quantization not in ("auto", *forms) and not platform.rounds_weights:
        has = ", ".join(forms) or "none of quantised ones"
        raise ConfigError(f"quantization {config.quantization!r}: platform {platform.name} has no matmuls for such "
                          f"weights with inputs of {dtype} (it has {has}); leave it at auto")
    return forms


def _batched_tokens(model_config: ModelConfig, platform: Platform) -> int:
    defaults, is_recorded = platform.defaults, not (model_config.state_layers or model_config.vision)
    if defaults.narrow_batched_tokens is None or is_recorded or model_config.hidden_size > _NARROW:
        return defaults.max_num_batched_tokens
    return defaults.narrow_batched_tokens


def _max_num_seqs(config: SchedulerConfig, model_config: ModelConfig, platform: Platform) -> int:
    max_num_seqs = config.max_num_seqs or platform.defaults.max_num_seqs
    limit = MAX_COUNTED_TOKENS // model_config.vocab_size
    if max_num_seqs > limit:
        raise ConfigError(f"max_num_seqs {max_num_seqs} is more than {limit}: the sampler counts each of the "
                          f"{model_config.vocab_size} tokens of the vocabulary for each sequence, with 32-bit indices; "
                          f"lower it to at most {limit}")
    return max_num_seqs


def _graph_mode(config: GraphConfig, model_config: ModelConfig, platform: Platform, facts: AttentionFacts,
                most_rows: int) -> str:
    """The mode of decode steps. A model that pools has none, and its prefills are recorded in every mode but eager."""
    graph_mode = "eager" if config.enforce_eager else config.graph_mode
    if model_config.pooling is not None and config.graph_batch_sizes is not None:
        raise ConfigError(f"graph_batch_sizes {config.graph_batch_sizes}: the model pools its prompts, nothing is "
                          "decoded; leave it out")
    if model_config.pooling is not None and not facts.records_prefills:
        if graph_mode not in ("auto", "eager"):
            raise ConfigError(f"graph_mode {graph_mode!r}: the model pools its prompts, nothing is decoded, no graph "
                              "has a use; leave it at auto")
        graph_mode = "eager"
    if "graphs" in platform.fallbacks and graph_mode != "eager":
        if graph_mode != "auto":
            raise ConfigError(f"graph_mode {graph_mode!r}: a replayed graph computes otherwise on this device, as the "
                              "warning above says; leave it at auto, or set it to eager")
        graph_mode = "eager"
    graph_mode = platform.defaults.graph_mode if graph_mode == "auto" else graph_mode
    if graph_mode not in platform.graph_modes:
        raise ConfigError(f"graph_mode {graph_mode!r}: {platform.name} supports {', '.join(platform.graph_modes)}")
    platform.check_graph_mode(graph_mode)
    if graph_mode == "eager" and config.graph_batch_sizes is not None:
        raise ConfigError(f"graph_batch_sizes {config.graph_batch_sizes} has no use in eager mode; set graph_mode")
    if config.graph_batch_sizes is not None and config.graph_batch_sizes[-1] > most_rows:
        raise ConfigError(f"graph_batch_sizes {config.graph_batch_sizes}: no step has more than {most_rows} rows, "
                          "those of max_num_seqs and their drafts; raise max_num_seqs or leave the larger sizes out")
    return graph_mode


def _prefill_sizes(config: RunnerConfig, model_config: ModelConfig, platform: Platform, facts: AttentionFacts,
                   graph_mode: str, most_tokens: int, *, is_fp8: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`prefill_sizes` and `long_prefill_sizes`. Raises ConfigError for sizes that are asked for where nothing makes
    such graphs, or where no step has them. `most_tokens`: the most that a prefill can have. `is_fp8`: of the KV cache.
    """
    given, problem = config.graphs.graph_prefill_sizes, None
    if graph_mode == "eager":
        problem = "it has no use in eager mode"
    elif not facts.records_prefills:
        problem = f"platform {platform.name} records no prefills of attention_backend {config.attention_backend}"
    elif model_config.state_layers:
        problem = f"prefills of {model_config.model_type}, which has layers with state, are not recorded"
    elif given is not None and given[-1] > most_tokens:
        problem = (f"no step has more than {most_tokens} tokens, by max_num_batched_tokens and by max_num_seqs prompts "
                   "of max_model_len")
    elif given is not None and is_fp8 and given[-1] > SHORT_TOKENS:
        problem = f"prefills of more than {SHORT_TOKENS} tokens over an FP8 cache are not recorded"
    if problem is None:
        sizes = tuple(size for size in (_SHORT_SIZES if given is None else given) if 0 < size <= most_tokens)
        return sizes, () if given is not None or is_fp8 else _long_sizes(most_tokens)
    if given is not None and any(given):
        raise ConfigError(f"graph_prefill_sizes {given}: {problem}; leave it out")
    return (), ()


def _long_sizes(most_tokens: int) -> tuple[int, ...]:
    """Equally far apart: a step is padded with at most an eighth of `most_tokens`."""
    apart = -(-most_tokens // (_MOST_LONG_SIZES * _LONG_MULTIPLE)) * _LONG_MULTIPLE
    return tuple(size for size in (*range(apart, most_tokens, apart), most_tokens) if size > SHORT_TOKENS)


def _speculative(config: SchedulerConfig, model_config: ModelConfig, platform: Platform) -> SpeculativeConfig | None:
    """Refuses models whose drafts are not verified, and more drafts a row than are."""
    speculative = config.speculative
    if speculative is None:
        return None
    problem, most = None, platform.state_facts.most_drafts
    if model_config.pooling is not None:
        problem = "the model pools its prompts and samples no token; leave it out"
    elif model_config.state_layers and most is not None and speculative.num_speculative_tokens > most:
        has_states = f"{model_config.model_type} has layers with state, and platform {platform.name} verifies"
        problem = (f"{has_states} at most {most} drafts of a row for such, not {speculative.num_speculative_tokens}; "
                   f"set num_speculative_tokens to {most} or less") if most else (
                   f"{has_states} no drafts for such; leave it out")
    if problem is not None:
        raise ConfigError(f"speculative_config: {problem}")
    return speculative


def _graph_cache_dir(config: GraphConfig, platform: Platform, graph_mode: str) -> Path | None:
    keeps = graph_mode in platform.keeps_graphs
    if config.use_graph_cache and not keeps:
        modes = ", ".join(platform.keeps_graphs) or "none"
        raise ConfigError(f"use_graph_cache: platform {platform.name} keeps no graphs in graph_mode {graph_mode} "
                          f"(modes that do: {modes})")
    if not keeps or config.use_graph_cache is False:
        return None
    return Path(config.graph_cache_dir).expanduser().resolve()


def _max_model_len(config: RunnerConfig, model_config: ModelConfig, platform: Platform, facts: AttentionFacts) -> int:
    limit, longest = model_config.max_position_embeddings, facts.longest_context
    if config.max_model_len is not None and longest is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len {config.max_model_len}: the attention of platform {platform.name} reads at "
                          f"most {longest} tokens of a sequence; lower it to that")
    if config.max_model_len is not None and config.max_model_len > limit and model_config.rope.kind == "default":
        raise ConfigError(f"max_model_len {config.max_model_len} is more than the checkpoint's {limit} positions")
    return config.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)
