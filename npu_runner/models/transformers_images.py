"""Images of a transformers network: through its own tower and projector, into the rows of a prompt's embeddings.

Knows how `get_image_features` is called; imports nothing of transformers.

M tokens that stand in a placeholder's place, R of them rows of the tower, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from npu_runner.errors import ModelError
from npu_runner.models.vision.scaling import scaled
from npu_runner.request.prompt_inputs import ImageInput


class TowerOfTransformers:
    """`causal_lm` has `get_image_features`. `image_token_id`: the token whose embedding a row of the tower replaces."""

    def __init__(self, causal_lm: Any, image_token_id: int):
        self.causal_lm, self.image_token_id = causal_lm, image_token_id
        self._features: Callable[..., Any] = features_function(causal_lm)
        self._accepted = inspect.signature(self._features).parameters
        self.has_batches = True
        """Images whose arrays have equal shapes go through the tower together."""

    def rows(self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """(R, D) of each image."""
        found: dict[int, Tensor] = {}
        for group in self._groups(images):
            together = [images[index] for index in group]
            wanted = [int(np.count_nonzero(image.token_ids == self.image_token_id)) for image in together]
            rows = self._rows(self._inputs(together, device, dtype))
            if len(rows) != sum(wanted):
                raise ModelError(f"the tower makes {len(rows)} rows for the {sum(wanted)} tokens {self.image_token_id} "
                                 f"of {len(group)} images")
            found.update(zip(group, rows.split(wanted), strict=True))
        return [found[index] for index in range(len(images))]

    @property
    def of_network(self) -> set[str]:
        """The names of arguments that the whole network takes."""
        return {name for module in (self.causal_lm, self.causal_lm.base_model)
                for name in inspect.signature(module.forward).parameters}

    def _inputs(self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments for images of equal shapes, image after image."""
        given = {}
        for name in images[0].tower_inputs:
            if name in self._accepted:
                arrays, scaling = [image.tower_inputs[name] for image in images], images[0].scaling
                x = torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays)).to(device)
                x = scaled(x, scaling) if scaling is not None and name in scaling.names else x
                given[name] = x.to(dtype) if x.is_floating_point() else x
        return given

    def _rows(self, given: dict[str, Tensor]) -> Tensor:
        output = self._features(**given, return_dict=True)
        parts = [part for part in tree_leaves(output.pooler_output) if isinstance(part, Tensor)]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

    def _groups(self, images: Sequence[ImageInput]) -> Iterable[list[int]]:
        """Indices of the images that go through the tower together."""
        by_shapes: dict[Any, list[int]] = {}
        for index, image in enumerate(images):
            shapes = tuple((name, array.shape, array.dtype) for name, array in sorted(image.tower_inputs.items()))
            can_join = self.has_batches and all(shape for _, shape, _ in shapes)
            by_shapes.setdefault((shapes, None if can_join else index), []).append(index)
        return by_shapes.values()


def features_function(causal_lm: Any) -> Callable[..., Any]:
    """`get_image_features` of the base model, or of the network. Raises ModelError where there is none."""
    for owner in (causal_lm.base_model, causal_lm):
        function: Callable[..., Any] | None = getattr(owner, "get_image_features", None)
        if function is not None:
            return function
    raise ModelError("it has no get_image_features, by which an image goes through its tower alone")

