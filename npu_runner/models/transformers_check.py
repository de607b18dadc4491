"""Compares a network of transformers as it is served with the same network under transformers' own attention and masks.

A start does this once, before the KV cache is measured. Knows no family and imports nothing of transformers.

T tokens of the prompt, N query heads, H head dim, V vocabulary, NB blocks of S tokens, K kv heads. A distance is
between G groups of R rows of X numbers. C tokens stand in both runs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from npu_runner.errors import ModelError
from npu_runner.layers.attention import PagedAttention, make_kv_cache, resolve_windows
from npu_runner.models.transformers_fusion import Fusion
from npu_runner.models.transformers_model import AttentionPort, TransformersModel, check_call
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.prompts.vision_prompts import mrope_positions
from npu_runner.request.prompt_inputs import ImageInput, ImageSpan

logger = logging.getLogger(__name__)

NUM_TOKENS = 65
OF_DECODER = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "cache_position"}
"""Arguments of a decoder whose effect the comparison covers; of others each tensor is refused."""
BY_TOKEN = {"attention_mask", "token_type_ids", "mm_token_type_ids"}
"""Arguments of a network with a number for each token, (1, T)."""


@dataclass(frozen=True, kw_only=True)
class Distances:
    """The largest distance of a row, relative to the RMS of all rows. docs/generic.md has those of 61 families."""

    attention: float
    """A row is one head of one token. The query, key and value are the same on both sides."""
    others: float
    """A row is one head of a token's query, key or value, or the token's logits."""


FLOAT32_BOUNDS = Distances(attention=1e-4, others=1e-3)
# Rounding may choose another expert for a token, which changes all that follows in its row.
HALF_BOUNDS = Distances(attention=0.05, others=0.25)


@dataclass(kw_only=True)
class Comparison:
    """The prompt's first run, under transformers' own attention. Each attention call is computed twice, by its function
    and by ours over a small cache; the network goes on with the first."""

    steps: list[tuple[slice, AttentionMetadata]]
    bound: float
    calls: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Query, key, value and output of each layer, (1, T, heads, H)."""
    worst: float = 0.0

    def attend(self, port: AttentionPort, own: Callable[..., Any], module: nn.Module, qkv: Sequence[Tensor],
               mask: Tensor | None, scaling: float | None, more: dict[str, Any]) -> tuple[Tensor, None]:
        """The output of `own`, transformers' function, in float32. Raises ModelError where ours is another."""
        check_call(port.call.name, None, dict(more))
        expected = own(module, *(x.float() for x in qkv), None if mask is None else mask.float(),
                       scaling=port.call.scale if scaling is None else scaling, **more)[0]
        q, k, v = (x.transpose(1, 2).contiguous() for x in qkv)
        found_TNH = torch.cat([port.paged(q[0, rows], k[0, rows], v[0, rows], metadata)
                               for rows, metadata in self.steps])
        error = distance_of_worst_row(found_TNH.transpose(0, 1), expected[0].transpose(0, 1))
        if not error <= self.bound:
            raise ModelError(f"{port.call.name}: attention differs from transformers' own by {error:.1%} for the same "
                             f"query, key and value, and {self.bound:.1%} is allowed (a mask of its own, or an "
                             "operator of this platform that is wrong); such a model needs a strategy of its own")
        self.worst = max(self.worst, error)
        output = expected.to(q.dtype)
        self.calls[port.paged.layer_index] = (q, k, v, output)
        return output, None


@dataclass(kw_only=True)
class SecondRun:
    """The second run, as it is served: tokens lie in another order, and some are others at any position. Attention
    returns the outputs of the first run."""

    first: Comparison
    compared_C: Tensor
    """Places of the tokens that both runs have."""
    bound: float
    worst: float = 0.0

    def attend(self, port: AttentionPort, *qkv: Tensor) -> Tensor:
        *expected, output = (x.flip(1) for x in self.first.calls[port.paged.layer_index])
        for found, right in zip(qkv, expected, strict=True):
            self.check(port.call.name, found.transpose(1, 2), right)
        return output

    def check(self, name: str, found: Tensor, expected: Tensor) -> None:
        """Raises ModelError where rows (1, T, groups, X) of the same tokens differ."""
        error = distance_of_worst_row(*(x[0].index_select(0, self.compared_C).transpose(0, 1)
                                        for x in (found, expected)))
        if not error <= self.bound:
            raise ModelError(
                f"{name}: a token changes by {error:.1%} with what else lies in its step, outside attention, and "
                f"{self.bound:.1%} is allowed (convolutions over tokens, states, positions that the model counts "
                "itself, a rotary embedding that depends on the longest position); such a model needs a strategy of "
                "its own")
        self.worst = max(self.worst, error)


def compared(own_of: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that transformers calls in `compare_at_start`. `own_of` gives its own one of a module."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
               scaling: float | None = None, **more: Any) -> tuple[Tensor, None]:
        port: Any = module.attention_port
        return port.step.comparison.attend(port, own_of(module), module, (query, key, value), attention_mask, scaling,
                                           more)

    return attend


@dataclass(frozen=True, kw_only=True)
class ComparedPrompt:
    """The prompt of a comparison. `given`: the arguments of the whole network beside its ids."""

    ids_2T: Tensor
    """The ids of both runs; those of the second one lie in reverse order, at T - 1 - t."""
    positions_2T: Tensor
    """(2, T), or (2, 3, T) where positions have three axes."""
    is_other_T: Tensor
    """Which tokens of the second run are not the first's."""
    given: dict[str, Tensor] = field(default_factory=dict)
    image: ImageInput | None = None
    image_start: int = 0


@torch.inference_mode()
def compare_at_start(model: TransformersModel, num_positions: int, prompt: ComparedPrompt,
                     own_attention: Callable[[nn.Module], AbstractContextManager[None]]) -> Distances:
    """Run one prompt under `own_attention`, which has transformers' masks and calls `compared`, then as it is served.

    Raises ModelError where the two differ: in an attention call, or in what other tokens change outside attention.
    """
    bounds = FLOAT32_BOUNDS if model.context.dtype == torch.float32 else HALF_BOUNDS
    device = model.context.device
    ids_2T, positions_2T, is_other_T = (x.to(device) for x in (prompt.ids_2T, prompt.positions_2T, prompt.is_other_T))
    compared_C = (~prompt.is_other_T).nonzero()[:, 0].to(device)
    resolve_windows(model, max(num_positions, ids_2T.shape[1]))
    steps, cache = _paged_steps(model, ids_2T.shape[1])
    layers = [module for module in model.modules() if isinstance(module, PagedAttention)]
    for layer in layers:
        layer.k_cache, layer.v_cache = cache
    comparison = model.step.comparison = Comparison(steps=steps, bound=bounds.attention)
    fusion = Fusion(model, steps, bounds.attention, distance_of_worst_row)
    given = {name: x.to(device, model.context.dtype if x.is_floating_point() else None)
             for name, x in prompt.given.items()}
    with own_attention(model.causal_lm), fusion.watch(), _checked_decoder(model):
        expected = model.causal_lm(input_ids=ids_2T[:1], **given, use_cache=False).logits
    for layer in layers:
        del layer.k_cache, layer.v_cache
    model.step.comparison = None

    def run_as_served() -> float:
        second = model.step.second_run = SecondRun(first=comparison, compared_C=compared_C,
                                                   bound=bounds.others)
        try:
            found_TV = model.compute_logits(model(_embedded(model, prompt, ids_2T, is_other_T), positions_2T[1], None))
            second.check("logits", found_TV[None, :, None], expected.flip(1)[:, :, None])
        finally:
            model.step.second_run = None
        return second.worst

    fusion.apply()
    try:
        others = run_as_served()
    except ModelError as difference:
        fusion.undo()
        others = run_as_served()
        logger.warning("all modules of transformers stay, as ours differ together: %s", difference)
    else:
        logger.info("%s", fusion.describe())
    if model.tower is not None and prompt.image is not None:
        model.tower.has_batches = _batch_equals_alone(model, prompt.image, bounds.attention)
    return Distances(attention=comparison.worst, others=others)


def _embedded(model: TransformersModel, prompt: ComparedPrompt, ids_2T: Tensor, is_other_T: Tensor) -> Tensor:
    """The tokens of the second run, as a step embeds them."""
    x_T = model.embed(ids_2T[0])
    if prompt.image is not None:
        (main_MD,) = model.encode([prompt.image])
        x_T[prompt.image_start : prompt.image_start + len(main_MD)] = main_MD
    x_T = x_T.flip(0)
    # Nothing is gathered by a mask: on some devices that waits for the host.
    return torch.where(is_other_T if x_T.dim() == 1 else is_other_T[:, None], model.embed(ids_2T[1]), x_T)


def _batch_equals_alone(model: TransformersModel, image: ImageInput, bound: float) -> bool:
    """Whether two images of one size have the same rows together as one after the other."""
    arrays = {name: x[..., ::-1].copy() if x.dtype.kind == "f" or x.dtype == np.uint8 else x
              for name, x in image.tower_inputs.items()}
    images = [image, replace(image, tower_inputs=arrays)]
    alone = torch.stack([model.encode([each])[0] for each in images])
    try:
        together = torch.stack(model.encode(images))
    except (ModelError, IndexError, RuntimeError, TypeError, ValueError) as error:
        logger.info("images go through the tower one by one: %s: %s", type(error).__name__, error)
        return False
    distance = distance_of_worst_row(together, alone)
    if not distance <= bound:
        logger.info("images go through the tower one by one: together their rows differ by %.1e", distance)
    return distance <= bound


@contextmanager
def _checked_decoder(model: TransformersModel) -> Iterator[None]:
    """Inside, a ModelError names what the network gives its decoder beside embeddings, positions and masks."""
    def check(decoder: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        named = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | more
        given = sorted(name for name, value in named.items() if name not in OF_DECODER and _has_tensors(value))
        if given:
            raise ModelError(f"{type(model.causal_lm).__name__} gives its {type(decoder).__name__} {', '.join(given)}, "
                             "which is not supported (embeddings for several layers, inputs by layer, types of "
                             "tokens); such a model needs a strategy of its own")

    hook = model.base.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def distance_of_worst_row(found_GRX: Tensor, expected_GRX: Tensor) -> float:
    """The largest RMS of a row's difference, relative to the RMS of all rows of its group."""
    # Some networks give tokens that are never sampled the lowest number of the dtype, whose square is infinite.
    is_out_GRX = (found_GRX == expected_GRX) & (expected_GRX.abs() > 1e30)
    found_GRX, expected_GRX = (x.float().masked_fill(is_out_GRX, 0.0) for x in (found_GRX, expected_GRX))
    errors_GR = (found_GRX - expected_GRX).square().mean(-1)
    sizes_G = expected_GRX.square().mean((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny)
    return (errors_GR / sizes_G[:, None]).max().sqrt().item()


def compared_text(num_positions: int, vocab_size: int) -> ComparedPrompt:
    """A prompt of random tokens."""
    num_tokens = min(NUM_TOKENS, num_positions)
    generator = torch.Generator().manual_seed(0)
    ids_2T = torch.randint(vocab_size, (2, num_tokens), generator=generator)
    positions_2T = torch.randint(num_positions, (2, num_tokens), generator=generator)
    positions_2T[0] = torch.arange(num_tokens)
    positions_2T[1, 3:4] = num_positions - 1
    return _with_second_run(ids_2T, positions_2T, given={"position_ids": positions_2T[:1]})


def compared_image(model: TransformersModel, num_positions: int, text_ids: Sequence[int], image: ImageInput,
                   prompt: Mapping[str, np.ndarray], merge_size: int) -> ComparedPrompt:
    """`prompt`, which shows `image` and is what the processor made for the whole network, within random tokens of
    `text_ids`. `merge_size`: patches of a side that one token stands for, where positions have three axes."""
    assert model.tower is not None, "the network reads text only"
    assert image.token_ids is not None, "transformers' processor has made the image"
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.from_numpy(array) for name, array in prompt.items()}
    shown_1T, beside = given.pop("input_ids"), NUM_TOKENS // 2
    num_tokens = shown_1T.shape[1] + 2 * beside
    ids_2T = torch.tensor(text_ids)[torch.randint(len(text_ids), (2, num_tokens), generator=generator)]
    ids_2T[0, beside:-beside] = shown_1T[0]
    for name, x_1T in given.items():
        if name in BY_TOKEN:
            given[name] = torch.cat([x_1T[:, :1].expand(1, beside), x_1T, x_1T[:, -1:].expand(1, beside)], dim=1)
    start = _find(ids_2T[0].tolist(), image.token_ids.tolist())
    axes = (3,) if model.uses_mrope else ()
    positions_2T = torch.randint(num_positions, (2, num_tokens), generator=generator)
    positions_2T = positions_2T.reshape(2, *[1] * len(axes), -1).expand(2, *axes, -1).clone()
    positions_2T[0] = torch.arange(num_tokens)
    if model.uses_mrope:
        _, rows, columns = (size // merge_size for size in image.grid_thw)
        if rows * columns != image.num_tokens:
            raise ModelError(f"an image has {image.num_tokens} tokens for {rows} x {columns} merged patches, so they "
                             "have other positions than one for each; such a model needs a strategy of its own")
        span = ImageSpan(start, image.num_tokens, 0)
        positions_2T[0] = torch.from_numpy(mrope_positions(num_tokens, [span], [image.grid_thw], merge_size)[0])
    return _with_second_run(ids_2T, positions_2T, image=image, image_start=start,
                            given={name: x for name, x in given.items() if name in model.tower.of_network})


def _find(ids: list[int], shown: list[int]) -> int:
    """Raises ModelError where `shown` is no part of `ids`."""
    for start in range(len(ids) - len(shown) + 1):
        if ids[start : start + len(shown)] == shown:
            return start
    raise ModelError("an image has other tokens within a text than alone; such a model needs a strategy of its own")


def _with_second_run(ids_2T: Tensor, positions_2T: Tensor, **more: Any) -> ComparedPrompt:
    is_other_T = torch.arange(ids_2T.shape[1]) % 4 == 3
    for x_2T in (ids_2T, positions_2T):
        x_2T[1] = torch.where(is_other_T, x_2T[1], x_2T[0].flip(-1))
    return ComparedPrompt(ids_2T=ids_2T, positions_2T=positions_2T, is_other_T=is_other_T, **more)


def _paged_steps(model: TransformersModel,
                 num_tokens: int) -> tuple[list[tuple[slice, AttentionMetadata]], tuple[Tensor, Tensor]]:
    """A prompt as two chunks and a decode step, and keys and values (NB, S, K, H) of a small cache for all layers."""
    context, call = model.context, model.calls[0]
    attention, device, block_size = context.attention, context.device, context.block_size
    assert block_size is not None, "a runner gives it"
    num_blocks = -(-num_tokens // block_size)
    num_kv_heads = context.tp.kv_head_share(call.num_kv_heads)[1]
    sizes = (1, 1 + num_blocks, block_size, num_kv_heads, call.head_dim)
    keys, values = make_kv_cache(sizes, context.dtype, device)
    tables_1W = np.arange(num_blocks, 0, -1, dtype=np.int32)[None]  # never block 0, and out of order
    places_T = np.arange(num_tokens)
    slots_T = (tables_1W[0, places_T // block_size] * block_size + places_T % block_size).astype(np.int32)
    slots, tables = (torch.from_numpy(array.copy()).to(device) for array in (slots_T, tables_1W))
    steps = []
    for start, stop in pairwise(sorted({0, num_tokens // 2, num_tokens - 1, num_tokens})):
        is_prefill = stop < num_tokens
        plan = (attention.plan_prefill([stop - start], [stop], tables_1W, device) if is_prefill
                else attention.plan_decode([stop], tables_1W, device))
        length = torch.tensor([stop], dtype=torch.int32, device=device)
        steps.append((slice(start, stop), AttentionMetadata(is_prefill, slots[start:stop], length, tables, plan)))
    return steps, (keys[0], values[0])
