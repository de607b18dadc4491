"""Finds the attention settings of a transformers network by running it without weights. Does not import transformers.

The network is on the meta device, where tensors have shapes and no values. A run costs no memory, so a model is refused
before any is allocated.

T tokens of the run, N query heads, K kv heads, H head dim, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_runner.errors import ModelError
from npu_runner.models.transformers_model import AttentionCall, base_of, check_call
from npu_runner.platforms.transfers import HOST

# A prime that no width equals: a tensor with this size in two dims is a mask, or a bias, over all pairs of tokens.
NUM_TOKENS = 1013
# A convolution or a shift over tokens makes tensors that are a little longer or shorter.
_NEAR = range(1, 9)
_MOST_POSITIONS = 1 << 20
_COPIES = ("aten::_to_copy", "aten::copy_")


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One forward: its attention calls in order, the width of its hidden states, the tokens that it has logits for."""

    calls: tuple[AttentionCall, ...]
    hidden_size: int
    vocab_size: int
    halved: frozenset[str]
    """Linears whose outputs are used as two halves, one behind the other."""
    blocks_capture: str | None
    """Why no graph can be captured of it, with the module's name; None where nothing is known."""


class Recorder:
    """Stands in every module while a network is observed, and notes what each asks of attention."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def of(self, name: str) -> Callable[..., tuple[Tensor, None]]:
        def port(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any,
                 **more: Any) -> tuple[Tensor, None]:
            self.calls.append(_call(name, query, key, value, mask, scaling, more))
            return query.transpose(1, 2), None

        return port


def observe(causal_lm: nn.Module) -> Observed:
    """Run `causal_lm`, which stands on the meta device and calls `transformers_model.attend` with `claim_mask`.

    Raises ModelError, with the module's name, for what paged attention does not do.
    """
    recorder = Recorder()
    modules: list[Any] = list(causal_lm.named_modules())
    of_decoder = {id(module) for module in base_of(causal_lm).modules()}
    convolutions = [name for name, module in modules if isinstance(module, nn.Conv1d) and id(module) in of_decoder]
    if convolutions:
        raise ModelError(f"{convolutions[0]} mixes neighbouring tokens outside attention: it keeps a state that our "
                         "cache does not hold")
    for name, module in modules:
        object.__setattr__(module, "attention_port", recorder.of(name))
    hidden: list[Tensor] = []
    hook = base_of(causal_lm).register_forward_hook(lambda _, args, output: hidden.append(output.last_hidden_state))
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    outputs = _Outputs()
    watch = _Watch(outputs)
    with torch.no_grad(), outputs.hooked(modules), watch, watch.entering(modules):
        logits = causal_lm(input_ids=tokens, position_ids=tokens, attention_mask=torch.ones_like(tokens),
                           use_cache=False).logits
    hook.remove()
    for _, module in modules:
        object.__delattr__(module, "attention_port")
    _check_halves(causal_lm, hidden, logits)
    _check_calls(recorder.calls)
    return Observed(calls=tuple(recorder.calls), hidden_size=hidden[0].shape[-1], vocab_size=logits.shape[-1],
                    halved=frozenset(name for name, starts in outputs.starts.items() if starts == {0, 1}),
                    blocks_capture=watch.blocks_capture)


def claim_mask(*, mask_function: Callable[..., Tensor], config: Any = None, **sizes: Any) -> Tensor:
    """The mask function that transformers calls. It makes no mask and records its window for `Recorder`."""
    longest = min(getattr(config, "max_position_embeddings", None) or 1 << 17, _MOST_POSITIONS)
    claim: Any = torch.empty(1, 1, 1, 1, device="meta")
    claim.window = _window_of(mask_function, longest)
    return claim


def _window_of(mask_function: Callable[..., Tensor], longest: int) -> int | None:
    """The sliding window that a mask function describes, None where a token sees all before it."""
    with HOST:
        zero, places_L = torch.tensor(0), torch.arange(longest + 1)
        seen = int(mask_function(zero, zero, torch.tensor(longest - 1), places_L).sum())
        for last in {0, 1, longest // 3, longest // 2, longest - 1}:
            found_L = mask_function(zero, zero, torch.tensor(last), places_L)
            if not torch.equal(found_L, (places_L <= last) & (places_L > last - seen)):
                raise ModelError("it masks attention in a way of its own (in chunks, blocks or both directions); only "
                                 "causal attention and sliding windows are supported")
    return None if seen == longest else seen


def _call(name: str, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any,
          more: dict[str, Any]) -> AttentionCall:
    is_claim = hasattr(mask, "window")
    check_call(name, None if is_claim else mask, more)
    if not isinstance(scaling, (int, float, type(None))):
        raise ModelError(f"{name} scales attention by a tensor, which is not supported; one number is")
    sizes = {tuple(x.shape[:1] + x.shape[2:]) for x in (query, key, value)}
    if len(sizes) > 1 or query.shape[2] != NUM_TOKENS or query.shape[1] % key.shape[1] or key.shape != value.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ModelError(f"{name}: query, key and value of shapes {shapes} are not supported; key and value have one "
                         "head dim, the query's, and a key for each token (latent and cross attention do not)")
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise ModelError(f"{name}: query, key and value of {query.dtype}, {key.dtype} and {value.dtype} are not "
                         "supported; one dtype is")
    window = mask.window if is_claim else more.get("sliding_window")
    # A view of one head says nothing of the way to the next.
    to_next = value.stride(1) if value.shape[1] > 1 else value.shape[3]
    return AttentionCall(name=name, num_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim=query.shape[3],
                         value_place=(value.stride(2), value.storage_offset(), to_next),
                         scale=query.shape[3] ** -0.5 if scaling is None else float(scaling), window=window)


def _check_calls(calls: list[AttentionCall]) -> None:
    if not calls:
        raise ModelError("its attention does not go through transformers' attention interface, so it cannot be led to "
                         "the paged cache")
    names = [call.name for call in calls]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ModelError(f"{', '.join(twice)} attends more than once in a forward, which is not supported")
    for what in ("num_heads", "num_kv_heads", "head_dim"):
        sizes = sorted({getattr(call, what) for call in calls})
        if len(sizes) > 1:
            raise ModelError(f"{what} differs by layer ({', '.join(map(str, sizes))}), which is not supported")


def _check_halves(causal_lm: nn.Module, hidden: list[Tensor], logits: Tensor) -> None:
    name = type(causal_lm).__name__
    if len(hidden) != 1 or hidden[0].shape[:2] != (1, NUM_TOKENS):
        raise ModelError(f"{name} does not run its {type(base_of(causal_lm)).__name__} once for all tokens, which is "
                         "not supported")
    if logits.shape[:2] != (1, NUM_TOKENS):
        raise ModelError(f"{name} has logits of shape {list(logits.shape)} for {NUM_TOKENS} tokens")


class _Outputs:
    """Notes which halves of the outputs of linears are used by themselves."""

    def __init__(self) -> None:
        self.starts: dict[str, set[int]] = {}
        self._names: dict[int, tuple[str, Tensor]] = {}

    @contextmanager
    def hooked(self, modules: list[Any]) -> Iterator[None]:
        hooks = [module.register_forward_hook(partial(self._note, name)) for name, module in modules
                 if type(module) is nn.Linear]
        yield
        for hook in hooks:
            hook.remove()

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._names[output.untyped_storage()._cdata] = name, output  # its storage lives as long as this

    def look_at(self, made: Tensor) -> None:
        name, output = self._names.get(made.untyped_storage()._cdata, ("", made))
        width = made.shape[-1] if made.dim() else 0
        if name and width < output.shape[-1]:
            is_half = 2 * width == output.shape[-1] and made.stride()[-1] == 1
            self.starts.setdefault(name, set()).add(made.storage_offset() // width if is_half else -1)


class _Watch(TorchDispatchMode):
    """Looks at the shape of every tensor that is made, and for copies from the host, which stop a capture."""

    blocks_capture: str | None = None
    _module: str = ""

    @contextmanager
    def entering(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Notes inside which of `modules` is at work."""
        names = {id(module): name for name, module in modules}

        def enter(module: nn.Module, args: Any) -> None:
            self._module = names.get(id(module), self._module)

        handle = register_module_forward_pre_hook(enter)
        try:
            yield
        finally:
            handle.remove()

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        is_on_host = [not each.is_meta for each in tree_leaves((args, output)) if isinstance(each, Tensor)]
        if len(set(is_on_host)) == 2 and function._schema.name in _COPIES and self.blocks_capture is None:
            self.blocks_capture = f"{self._module} makes a tensor on the host and copies it to the device in each step"
        for made in tree_leaves(output):
            if isinstance(made, Tensor):
                _check_shape(function, made)
                self._outputs.look_at(made)
        return output


def _check_shape(function: Any, made: Tensor) -> None:
    sizes = list(made.shape)
    if sizes.count(NUM_TOKENS) > 1:
        raise ModelError(f"it makes a mask or bias over all pairs of tokens ({function} of shape {sizes}), which is "
                         "not supported")
    if any(abs(size - NUM_TOKENS) in _NEAR for size in sizes):
        raise ModelError(f"it mixes neighbouring tokens outside attention ({function} makes a tensor of shape {sizes} "
                         f"from {NUM_TOKENS} tokens): it keeps a state that our cache does not hold")
