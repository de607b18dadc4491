"""A LoRA adapter as PEFT writes it: which weight of a checkpoint changes, and by what. Knows no model and no platform.

The maths: W + s B A (arXiv 2106.09685), s = alpha / r, or alpha / sqrt(r) with rank-stabilised scaling (arXiv
2312.03732). DoRA (arXiv 2402.09353) takes the row norms of that from a vector m: m (W + s B A) / |W + s B A|.

O output features, I input features, R rank, V vocabulary, D hidden size.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open

from npu_runner.checkpoint.field_types import Fields, checked
from npu_runner.checkpoint.files import require_json
from npu_runner.checkpoint.patterns import matches
from npu_runner.errors import ModelError, WeightsError
from npu_runner.request.limits import shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_PAIR = ("lora_A.weight", "lora_B.weight")
_MAGNITUDE = ("lora_magnitude_vector", "lora_magnitude_vector.weight")
# Fields that ask for nothing when an adapter is loaded, whatever they hold: its tensors say which modules it changes,
# and settings of a way to begin training count only where init_lora_weights names that way.
_ASK_NOTHING = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "lora_dropout",
    "bias", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config"})
# Ways to begin training that leave the base as it is. After the others PEFT takes the first B A out of the base.
_KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_REMEDY = "merge it with PEFT (merge_and_unload) and save the model"
_Scale = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
_Rank = Annotated[int, Field(ge=1)]


class _Config(Fields):
    """The fields that a merge is computed from, with PEFT's defaults."""

    r: _Rank = 8
    lora_alpha: _Scale = 8
    use_rslora: bool | None = False
    use_dora: bool | None = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Scale] | None = None
    init_lora_weights: bool | str | None = True


@dataclass(frozen=True, kw_only=True)
class Change:
    """W + scale B A, in float32. left_OR, right_RI: B and A; of an embedding (V, R) and (R, D). I are all inputs that
    an output of a convolution sees. `magnitude_O`: of DoRA. `base_OI`: W, where the adapter brings it along, as PEFT
    saves embeddings and heads."""

    left_OR: torch.Tensor
    right_RI: torch.Tensor
    scale: float
    magnitude_O: torch.Tensor | None = None
    base_OI: torch.Tensor | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it changes a tensor of this shape."""
        return (len(self.left_OR), self.right_RI.shape[1]) == (shape[0], math.prod(shape[1:]))


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """`changes` and `replaced`: by the tensor's name as the adapter has it, with ".weight"; `replaced` were trained
    whole (modules_to_save, biases)."""

    path: Path
    changes: dict[str, Change]
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    fingerprint: str
    """A digest of both files, for the state of a job."""

    def has(self, suffix: str) -> bool:
        """Whether a tensor whose name ends so is changed or replaced."""
        return any(name.endswith(suffix) for name in (*self.changes, *self.replaced))


def read_adapter(folder: Path) -> Adapter:
    """Raises ModelError for a folder that is no LoRA adapter, or for one that asks for what is not merged; WeightsError
    for tensors that do not fit its config."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"lora {folder}: there is no {CONFIG}; name the folder of an adapter that PEFT has saved")
    config = require_json(folder, CONFIG)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"lora {folder}: peft_type is {shown(config.get('peft_type'))}; LORA is merged")
    fields = checked(_Config, config, f"lora {folder}: {CONFIG}")
    for name, value in config.items():
        if name not in _ASK_NOTHING and name not in _Config.model_fields and value not in (None, False, [], {}):
            raise ModelError(f"lora {folder}: {name} {shown(value)} is not merged; {_REMEDY}")
    if fields.init_lora_weights not in _KEEP_THE_BASE:
        raise ModelError(f"lora {folder}: init_lora_weights {shown(fields.init_lora_weights)} may change the base when "
                         f"PEFT loads the adapter, which is not merged; {_REMEDY}")
    tensors, digest = _tensors(folder)
    digest.update(json.dumps(config, sort_keys=True).encode())
    changes, replaced = _Reading(folder, fields, tensors).sorted_out()
    return Adapter(path=folder, changes=changes, replaced=replaced, fingerprint=digest.hexdigest())


def _tensors(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """By their names without PEFT's prefix, and a digest of the file."""
    path = folder / WEIGHTS
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("adapter_model.*"))
        hint = f"; {', '.join(others)} cannot be used, save it with safe_serialization" if others else ""
        raise WeightsError(f"lora {folder}: there is no {WEIGHTS}{hint}")
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        with safe_open(str(path), framework="pt") as opened:
            return {name.removeprefix(_PREFIX): opened.get_tensor(name) for name in opened.keys()}, digest  # noqa: SIM118
    except (SafetensorError, OSError) as broken:
        raise WeightsError(f"{path} cannot be read: {broken}") from broken


class _Reading:
    """Sorts an adapter's tensors: pairs, magnitudes, and what replaces a tensor."""

    def __init__(self, folder: Path, config: _Config, tensors: dict[str, torch.Tensor]):
        self._folder, self._config, self._left = folder, config, tensors
        self._problems: list[str] = []

    def sorted_out(self) -> tuple[dict[str, Change], dict[str, torch.Tensor]]:
        changes = {}
        for module in sorted({name.rpartition(".lora_")[0] for name in self._left if ".lora_" in name}):
            change = self._change(module)
            if change is not None:
                changes[f"{module}.weight"] = change
        unknown = sorted(name for name in self._left if "lora_" in name or "trainable_tokens" in name)
        self._problems += [f"{name}: not known" for name in unknown]
        if self._problems:
            raise WeightsError(f"lora {self._folder}: its tensors do not fit:\n  " + "\n  ".join(self._problems[:20]))
        return changes, {name.replace(".base_layer.", "."): tensor for name, tensor in self._left.items()}

    def _change(self, module: str) -> Change | None:
        """The change of one module; removes its tensors. None if they are no pair, which is recorded."""
        a, b = (self._left.pop(f"{module}.{kind}", None) for kind in _PAIR)
        left, right = b, a
        if a is None and b is None:
            a, b = (self._left.pop(f"{module}.{kind}", None) for kind in _EMBEDDING)
            left, right = (None if a is None else a.T), (None if b is None else b.T)
        if left is None or right is None:
            if a is not None or b is not None:
                self._problems.append(f"{module}: one of lora_A and lora_B is missing")
            return None
        left, right = left.flatten(1), right.flatten(1)  # of a convolution: whose stride is its size
        magnitudes = [self._left.pop(f"{module}.{kind}") for kind in _MAGNITUDE if f"{module}.{kind}" in self._left]
        rank = self._of_pattern("rank_pattern", module, self._config.r)
        if not left.shape[1] == len(right) == rank:
            self._problems.append(f"{module}: {list(left.shape)} and {list(right.shape)} are no pair of rank {rank}")
            return None
        alpha = self._of_pattern("alpha_pattern", module, self._config.lora_alpha)
        scale = alpha / (math.sqrt(rank) if self._config.use_rslora else rank)
        if bool(self._config.use_dora) != bool(magnitudes):
            self._problems.append(f"{module}: use_dora is {self._config.use_dora}, and its magnitudes are "
                                  f"{'there' if magnitudes else 'missing'}")
        return Change(left_OR=left.float(), right_RI=right.float(), scale=scale,
                      base_OI=self._left.pop(f"{module}.base_layer.weight", None),
                      magnitude_O=magnitudes[0].float().flatten() if magnitudes else None)

    def _of_pattern(self, field: str, module: str, otherwise: float) -> Any:
        """PEFT's rule: the first pattern that the end of the module's name matches, from a dot on."""
        for pattern, value in (getattr(self._config, field) or {}).items():
            if matches(rf"(.*\.)?({pattern})$", module, f"lora {self._folder}: {field}"):
                return value
        return otherwise
