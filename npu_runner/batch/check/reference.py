"""The network of transformers in float32, on the host: the reference of `npu-runner verify`.

One of the places that import transformers. It is imported when the reference is opened, for this command alone. Knows
nothing of rows or of the engine.

T tokens of a prompt and its answer, N of the answer, V words.
"""

from __future__ import annotations

import inspect
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import Quantization
from npu_runner.errors import ConfigError
from npu_runner.platforms import reference_platform
from npu_runner.request.limits import size
from npu_runner.request.prompt_inputs import ImageInput, PromptInputs

_FLOATS = ("F64", "F32", "F16", "BF16")


class Reference:
    """One checkpoint folder. `load` reads the weights; everything that can be refused is refused before.

    `quantization`: None reads the files as transformers does. A quantised checkpoint becomes tensors of float32 first,
    by our reader.
    """

    def __init__(self, path: Path, quantization: Quantization | None):
        """Raises ConfigError for a family that transformers cannot compute, and if memory does not suffice."""
        self._path, self._quantization = path, quantization
        try:
            from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

            self._config: Any = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of nearly two hundred classes, each with checks of its own
            raise ConfigError(f"verify: the reference is transformers, which does not open {path}: {error}") from error
        sees = getattr(self._config, "vision_config", None) is not None
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING
        if type(self._config) not in mapping:
            raise ConfigError(f"verify: the reference is transformers, which has no model for {path.name} "
                              f"({self._config.model_type})")
        self._class: Any = mapping[type(self._config)]
        need, free = self.num_bytes, reference_platform().memory.free_bytes()
        if free is not None and need > free:
            raise ConfigError(f"verify: the reference, transformers in float32 on the host, needs {need} bytes "
                              f"({size(need)}), and {free} ({size(free)}) are free; free memory, or use a larger host")

    @cached_property
    def num_bytes(self) -> int:
        """The memory of its weights; a dequantised copy is made one tensor at a time, and is held twice."""
        with open_weights(self._path, self._quantization) as reader:
            floats = [name for name in reader.names if reader.dtype(name) in _FLOATS]
            num_bytes = 4 * sum(math.prod(reader.shape(name)) for name in floats)
        return num_bytes * (1 if self._quantization is None else 2)

    @property
    def source(self) -> str:
        """Its weights, for a person."""
        files = "the files" if self._quantization is None else f"our dequantised copy ({self._quantization.method})"
        return f"transformers in float32, from {files}"

    def load(self) -> None:
        """Read the weights. Raises ConfigError if transformers finds some missing."""
        given: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
        folder: Path | None = self._path
        if self._quantization is not None:
            if hasattr(self._config, "quantization_config"):
                del self._config.quantization_config
            with open_weights(self._path, self._quantization) as reader:
                folder = None
                given["state_dict"] = {name: reader.read(name).float() for name in sorted(reader.names)}
        self._model, found = self._class.from_pretrained(folder, config=self._config, **given)
        if lost := sorted(found["missing_keys"]) + sorted(map(str, found["mismatched_keys"])):
            raise ConfigError(f"verify: transformers does not find {len(lost)} tensors of {self._path.name}, such as "
                              f"{', '.join(lost[:3])}")
        self._model.eval()

    @torch.inference_mode()
    def logprobs(self, prompt: PromptInputs, token_ids: list[int]) -> Tensor:
        """(N, V) float32: what each token of the answer was chosen from, by one forward. Raises ConfigError for an
        image that it cannot be shown."""
        inputs = {"input_ids": torch.tensor([[*prompt.token_ids, *token_ids]]), **self._images(prompt, len(token_ids))}
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            inputs["logits_to_keep"] = len(token_ids) + 1
        logits_NV = self._model(**inputs, use_cache=False).logits[0, -len(token_ids) - 1 : -1]
        return logits_NV.float().log_softmax(-1)

    def _images(self, prompt: PromptInputs, num_more: int) -> dict[str, Any]:
        if not prompt.images:
            return {}
        shown = [prompt.images[span.image_index] for span in prompt.spans]
        if any(image.tower_inputs or image.pixels_HWC.shape[-1] != 3 for image in shown):
            raise ConfigError("verify: of images, only those that this package prepares itself are compared, and no "
                              "videos")
        features = self._processor(list(map(_as_image, shown)), return_tensors="pt")
        grids = [tuple(grid) for grid in features["image_grid_thw"].tolist()]
        if grids != [image.grid_thw for image in shown]:
            raise ConfigError(f"verify: transformers resizes the row's images again, to {grids} patches; leave "
                              "settings of images out")
        ids = np.array([*prompt.token_ids, *[0] * num_more])
        kinds = np.zeros(len(ids), dtype=np.int64)
        for span in prompt.spans:
            kinds[span.start : span.start + span.num_tokens] = 1
        return {"pixel_values": features["pixel_values"], "image_grid_thw": features["image_grid_thw"],
                "mm_token_type_ids": torch.from_numpy(kinds)[None]}

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._path, backend="pil", local_files_only=True,
                                                  trust_remote_code=False)


def _as_image(image: ImageInput) -> Any:
    from PIL import Image

    return Image.fromarray(image.pixels_HWC)
