"""The head for multi-token prediction in float64, over a whole sequence at once; and checkpoints that have one.

The oracle's transformers has no such head. Its states and embeddings are transformers' own; what is made of them is
written here by the published definition. T tokens, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle import reference

_OF_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


def with_head(path: Path, folder: Path, *, seed: int = 0, quiet: float = 1.0) -> Path:
    """A copy of the checkpoint with a random head, whose layer is shaped as the decoder's last one that attends.

    `quiet`: factor of what layers add to the stream, the head's too. With a small one a token decides what follows, in
    the decoder and in the head alike; what was random becomes a head that mostly agrees.
    """
    shutil.copytree(path, folder)
    tensors = load_file(folder / "model.safetensors")
    last = max(int(_OF_LAYER.match(name)[1]) for name in tensors  # type: ignore[index]
               if _OF_LAYER.match(name) and ".self_attn." in name)
    shapes = {f"mtp.layers.0.{_OF_LAYER.sub('', name)}": tensor.shape for name, tensor in tensors.items()
              if (found := _OF_LAYER.match(name)) and int(found[1]) == last}
    (norm,) = (tensor for name, tensor in tensors.items() if name in ("model.norm.weight",
                                                                      "model.language_model.norm.weight"))
    size, generator = len(norm), torch.Generator().manual_seed(seed)
    shapes["mtp.fc.weight"] = torch.Size((size, 2 * size))
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes.update({f"mtp.{name}.weight": norm.shape for name in norms})
    for name, shape in shapes.items():
        is_norm = "norm" in name
        values = torch.rand(shape, generator=generator) - 0.5 if is_norm else 0.15 * torch.randn(shape,
                                                                                                 generator=generator)
        tensors[name] = values.to(norm.dtype)
    if quiet != 1.0:
        tensors["mtp.fc.weight"] = torch.cat([torch.eye(size), 0.02 * torch.randn(size, size, generator=generator)], 1)
        for name, values in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                values.mul_(quiet)
            elif name in ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"):
                values.zero_()
        norm.zero_()
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Sequence64:
    """What transformers makes of a sequence, in float64: embedded tokens with pictures shown, hidden states behind the
    last norm and before it, (T, D) each, and positions (3, T) or (T,)."""

    embedded_TD: Tensor
    normed_TD: Tensor
    raw_TD: Tensor
    positions: Tensor


@lru_cache(maxsize=4)
def _model(path: Path) -> Any:
    model = reference.new_model(path, torch.float64)
    model.set_experts_implementation("eager")  # the product of groups knows no float64
    return model


@torch.inference_mode()
def run_target(path: Path, token_ids: Sequence[int], images: Sequence[Any] = ()) -> Sequence64:
    model, seen = _model(path), {}
    body = getattr(model.model, "language_model", model.model)

    def note_inputs(module: Any, arguments: Any, keywords: Any) -> None:
        seen["positions"] = keywords.get("position_ids")

    def note_layer(module: Any, arguments: Any) -> None:
        seen.setdefault("embedded", arguments[0])

    def note_norm(module: Any, arguments: Any, output: Tensor) -> None:
        seen["raw"], seen["normed"] = arguments[0], output

    hooks = [body.register_forward_pre_hook(note_inputs, with_kwargs=True),
             body.layers[0].register_forward_pre_hook(note_layer), body.norm.register_forward_hook(note_norm)]
    inputs = reference.model_inputs(path, token_ids, images)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    try:
        model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    positions = seen["positions"]
    positions = torch.arange(len(token_ids)) if positions is None else positions[-3:, 0] if positions.dim() == 3 else (
        positions[0])
    return Sequence64(seen["embedded"][0], seen["normed"][0], seen["raw"][0], positions)


class Head64:
    """`pairs` at places 0, 1, ... of a sequence; `more` goes on from what came out of one."""

    def __init__(self, path: Path):
        config = json.loads((path / "config.json").read_text())
        self.text = config.get("text_config", config)
        tensors = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
        self.weights = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()
                        if name.startswith("mtp.")}
        (self.embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
        self.output = tensors.get("lm_head.weight", self.embedding)

    def logits(self, made_TD: Tensor) -> Tensor:
        return made_TD @ self.output.T

    def __call__(self, next_TD: Tensor, hidden_TD: Tensor, positions: Tensor) -> Tensor:
        """(T, D), behind the head's last norm: of the embedded tokens 1, 2, ..., of the states of tokens 0, 1, ..., and
        where these stand."""
        x_TD = torch.cat([self._norm(next_TD, "pre_fc_norm_embedding"), self._norm(hidden_TD, "pre_fc_norm_hidden")], 1)
        x_TD = self._linear(x_TD, "fc")
        x_TD = x_TD + self._attend(self._norm(x_TD, "layers.0.input_layernorm"), positions)
        x_TD = x_TD + self._channels(self._norm(x_TD, "layers.0.post_attention_layernorm"))
        return self._norm(x_TD, "norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.text.get("rms_norm_eps", 1e-6)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + self.weights[f"{name}.weight"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return x @ self.weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def _attend(self, x_TD: Tensor, positions: Tensor) -> Tensor:
        size, num_heads = self.text["head_dim"], self.text["num_attention_heads"]
        num_kv_heads, at = self.text["num_key_value_heads"], "layers.0.self_attn"
        q_TNH, gate_TNH = self._linear(x_TD, f"{at}.q_proj").view(len(x_TD), num_heads, 2 * size).chunk(2, -1)
        k_TKH, v_TKH = (self._linear(x_TD, f"{at}.{name}").view(len(x_TD), num_kv_heads, size)
                        for name in ("k_proj", "v_proj"))
        q_TNH = self._turn(self._norm(q_TNH, f"{at}.q_norm"), positions)
        k_TKH = self._turn(self._norm(k_TKH, f"{at}.k_norm"), positions)
        k_TNH, v_TNH = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in (k_TKH, v_TKH))
        scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TNH) * size**-0.5
        is_later_TT = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).triu(1)
        weights_NTT = scores_NTT.masked_fill(is_later_TT, -torch.inf).softmax(-1)
        out_TNH = torch.einsum("nts,snh->tnh", weights_NTT, v_TNH)
        return self._linear((out_TNH * gate_TNH.sigmoid()).flatten(1), f"{at}.o_proj")

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.text["rope_parameters"]
        num_turning = int(self.text["head_dim"] * rope["partial_rotary_factor"])
        frequencies_F = rope["rope_theta"] ** (-torch.arange(0, num_turning, 2).double() / num_turning)
        if positions.dim() == 2:  # time, height and width by turns, as far as their sections go
            axis_F = torch.zeros(len(frequencies_F), dtype=torch.long)
            for axis in (1, 2):
                axis_F[axis : 3 * rope["mrope_section"][axis] : 3] = axis
            angles_TF = positions.double()[axis_F].T * frequencies_F
        else:
            angles_TF = positions.double()[:, None] * frequencies_F
        cos, sin = angles_TF.cos()[:, None], angles_TF.sin()[:, None]
        first, second, rest = x.tensor_split([num_turning // 2, num_turning], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _channels(self, x_TD: Tensor) -> Tensor:
        at = "layers.0.mlp"
        if f"{at}.gate.weight" not in self.weights:
            return self._mlp(x_TD, at)
        shares_TE = self._linear(x_TD, f"{at}.gate").softmax(-1)
        best_TE, chosen = shares_TE.topk(self.text["num_experts_per_tok"])
        shares_TE = torch.zeros_like(shares_TE).scatter(1, chosen, best_TE / best_TE.sum(-1, keepdim=True))
        out_TD = self._linear(x_TD, f"{at}.shared_expert_gate").sigmoid() * self._mlp(x_TD, f"{at}.shared_expert")
        for expert in range(self.text["num_experts"]):
            out_TD = out_TD + shares_TE[:, expert, None] * self._expert(x_TD, f"{at}.experts", expert)
        return out_TD

    def _mlp(self, x_TD: Tensor, at: str) -> Tensor:
        return self._linear(F.silu(self._linear(x_TD, f"{at}.gate_proj")) * self._linear(x_TD, f"{at}.up_proj"),
                            f"{at}.down_proj")

    def _expert(self, x_TD: Tensor, at: str, expert: int) -> Tensor:
        if f"{at}.gate_up_proj" not in self.weights:
            return self._mlp(x_TD, f"{at}.{expert}")
        gate, up = (x_TD @ self.weights[f"{at}.gate_up_proj"][expert].T).chunk(2, -1)
        return (F.silu(gate) * up) @ self.weights[f"{at}.down_proj"][expert].T
