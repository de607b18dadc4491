"""Any decoder of transformers as a network of ours: its modules as they are, its attention led to the paged cache.

Knows how a CausalLM of transformers is called (docs/generic.md); imports nothing of it. All rows of a step lie side by
side as one sequence: what tells them apart are positions and, inside attention, the step's metadata.

T tokens in the step, B rows that want logits, N query heads, K kv heads, H head dim, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from npu_runner.errors import ModelError
from npu_runner.layers.attention import PagedAttention
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.transformers_images import TowerOfTransformers
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.request.prompt_inputs import ImageInput

# Keyword arguments of an attention call that change nothing here. Whatever else arrives has a meaning and must be None.
HARMLESS = frozenset({
    "cache_position", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "sliding_window", "logits_to_keep",
})


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The attention settings of one module of a network."""

    name: str
    """The module's, within the network."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    """A token sees this many, itself included; None: all."""
    value_place: tuple[int, int, int] = (0, 0, 0)
    """Strides of values in the tensor that they are a view of: over tokens, the first one's place, over heads."""


class CurrentStep:
    """Which step is under way; all attention of a network reads the same one."""

    metadata: AttentionMetadata | None = None
    comparison: Any = None
    second_run: Any = None
    """The first or the second run of `transformers_check.compare_at_start`, while it is under way."""


class AttentionPort(nn.Module):
    """The replacement for the attention function that a module calls."""

    def __init__(self, index: int, call: AttentionCall, step: CurrentStep, context: LayerContext):
        super().__init__()
        self.call = call
        self.step = step
        num_kv_heads = context.tp.kv_head_share(call.num_kv_heads)[1]
        self.paged = PagedAttention(index, num_kv_heads, call.head_dim, context, scale=call.scale,
                                    window=call.window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None,
                **more: Any) -> tuple[Tensor, None]:
        """query (1, N, T, H), key and value (1, K, T, H) to (1, T, N, H), as transformers' functions have it."""
        check_call(self.call.name, mask, more)
        scale = self.call.head_dim**-0.5 if scaling is None else float(scaling)
        assert scale == self.call.scale, f"{self.call.name} scales by {scale}, at start by {self.call.scale}"
        if self.step.second_run is not None:
            return self.step.second_run.attend(self, query, key, value), None
        assert self.step.metadata is not None, "a step says where its tokens lie"
        q_TNH, k_TKH, v_TKH = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return self.paged(q_TNH, k_TKH, v_TKH, self.step.metadata)[None], None


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
           scaling: float | None = None, **more: Any) -> tuple[Tensor, None]:
    """The attention function that transformers calls: it forwards to the port of `module`."""
    port: Any = module.attention_port
    return port(query, key, value, attention_mask, scaling, **more)


def check_call(name: str, mask: Any, more: dict[str, Any]) -> None:
    """Raises ModelError for an argument that means something which paged attention does not do."""
    if mask is not None:
        raise ModelError(f"{name} brings an attention mask of its own; only causal attention and sliding windows are "
                         "supported")
    if more.pop("dropout", 0.0) not in (0, None):
        raise ModelError(f"{name} asks for dropout; a model that serves has none")
    if more.pop("is_causal", None) is False:
        raise ModelError(f"{name} attends in both directions; only causal attention is supported")
    unknown = sorted(key for key, given in more.items() if given is not None and key not in HARMLESS)
    if unknown:
        raise ModelError(f"{name} passes {', '.join(unknown)} to attention, which is not supported: the platform's "
                         "attention has causal masks, sliding windows and a scale")


def base_of(causal_lm: Any) -> nn.Module:
    """The network without its head."""
    base: nn.Module = causal_lm.get_decoder()
    return base


class TransformersModel(nn.Module):
    """A CausalLM of transformers behind models/contract.py, `calls` being what its modules ask of attention.

    Its forward runs in two halves. The first computes hidden states of every token. The second is the rest of
    CausalLM.forward (head, scalings, soft caps), for rows that need logits.
    """

    def __init__(self, causal_lm: nn.Module, calls: Sequence[AttentionCall], context: LayerContext,
                 image_token_id: int | None = None, *, uses_mrope: bool = False):
        """`image_token_id`: the token whose embedding a row of an image replaces; None: the network reads text only.
        `uses_mrope`: positions have three axes."""
        super().__init__()
        self.uses_mrope = uses_mrope
        self.calls = tuple(calls)
        self.context = context
        self.image_token_id = image_token_id
        self.step = CurrentStep()
        self.attach(causal_lm)

    def attach(self, causal_lm: nn.Module) -> None:
        """Take this network in the place of the one that is there: the same one, with weights."""
        self.causal_lm = causal_lm
        self.tower = None if self.image_token_id is None else TowerOfTransformers(causal_lm, self.image_token_id)
        base = self.base
        place = next(name for name, module in causal_lm.named_modules() if module is base)
        # In a tuple, because its modules are those of `causal_lm` and have their names there.
        self._given = (_GivenHiddenStates(),)
        self._head = _with_module(causal_lm, place, self._given[0]),
        for index, call in enumerate(self.calls):
            causal_lm.get_submodule(call.name).attention_port = AttentionPort(index, call, self.step, self.context)

    @property
    def base(self) -> nn.Module:
        return base_of(self.causal_lm)

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """The ids themselves: how a model embeds and scales them, and whether it looks at them again, is its own. With
        a tower (T, D): rows of images take the place of some."""
        if self.tower is None:
            return input_ids_T
        embedded_TD: Tensor = self.causal_lm.get_input_embeddings()(input_ids_T.long())
        return embedded_TD

    def encode(self, images: Sequence[ImageInput]) -> list[Tensor]:
        """(M, D) of each image, for all tokens in its placeholder's place: rows of the tower, and embeddings of the
        tokens around and between them."""
        assert self.tower is not None, "the network reads text only"
        device = self.context.device
        encoded = []
        for image, rows_RD in zip(images, self.tower.rows(images, device, self.context.dtype), strict=True):
            assert image.token_ids is not None, "transformers' processor has made the image"
            main_MD = self.embed(torch.from_numpy(image.token_ids).to(device))
            places_R = torch.from_numpy(np.flatnonzero(image.token_ids == self.image_token_id)).to(device)
            encoded.append(main_MD.index_copy(0, places_R, rows_RD.to(main_MD.dtype)))
        return encoded

    def forward(self, x: Tensor, positions: Tensor, metadata: AttentionMetadata | None,
                deepstack: Any = None) -> Tensor:
        """Final hidden states (T, D) of what `embed` returned, with the rows of images put in. `positions`: (T,), or
        (3, T) of a prefill where they have three axes."""
        self.step.metadata = metadata
        position_ids = positions.long().unsqueeze(-2)
        if self.uses_mrope and positions.dim() == 1:
            position_ids = position_ids.expand(3, 1, -1)
        given = {"input_ids": x[None].long()} if self.tower is None else {"inputs_embeds": x[None]}
        output = self.base(**given, position_ids=position_ids, use_cache=False)
        self.step.metadata = None
        if self._given[0].output_class is None:
            self._given[0].output_class = type(output)
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        logits_BV: Tensor = self._head[0](inputs_embeds=hidden_BD[None], use_cache=False).logits[0]
        return logits_BV


class _GivenHiddenStates(nn.Module):
    """The base of a CausalLM of which only the rest runs: the final hidden states are its `inputs_embeds`."""

    output_class: Any = None
    """The class of the base's own results."""

    def forward(self, *ids: Any, inputs_embeds: Tensor, **more: Any) -> Any:
        return self.output_class(last_hidden_state=inputs_embeds)


def _with_module(module: nn.Module, place: str, other: nn.Module) -> nn.Module:
    """A copy of `module` with `other` at `place`; all else is shared."""
    copied, (first, _, rest) = copy.copy(module), place.partition(".")
    within = module.get_submodule(first)
    copied._modules = {**module._modules, first: _with_module(within, rest, other) if rest else other}
    return copied
