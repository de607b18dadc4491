"""The pictures of a step: each through the tower once, and its rows into the embeddings. Knows no scheduler.

T tokens in the step, M picture tokens in the step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.core.batch import ScheduledBatch
from npu_runner.multimodal.inputs import ImageInput
from npu_runner.multimodal.vision_cache import VisionCache
from strategies import LoadStrategy, VisionEmbeddings


class Pictures:
    """What a strategy's tower makes of pictures, kept in `cache` as far as that goes."""

    def __init__(self, strategy: LoadStrategy, model: nn.Module, cache: VisionCache[VisionEmbeddings]):
        self._strategy = strategy
        self._model = model
        self.cache = cache
        self.num_encoded = 0

    def encode(self, images: Sequence[ImageInput]) -> dict[bytes, VisionEmbeddings]:
        """Embeddings by content hash; those not cached go through the tower together."""
        found = {image.content_hash: self.cache.get(image.content_hash) for image in images}
        missing = [image for image in images if found[image.content_hash] is None]
        if missing:
            for image, value in zip(missing, self._strategy.encode_images(self._model, missing), strict=True):
                self.cache.put(image.content_hash, value)
                found[image.content_hash] = value
            self.num_encoded += len(missing)
        return {key: value for key, value in found.items() if value is not None}

    def show(self, batch: ScheduledBatch, x_TD: Tensor, rows_T: Tensor) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """Put the pictures' rows into the embeddings; returns those and what the first layers add.

        `rows_T` says which row each token shows. Tokens gather, nothing is scattered: that sorts on some devices.
        """
        embeddings = self.encode(batch.images)
        self.cache.pin_only({s.content_hash: embeddings[s.content_hash] for s in batch.image_slices if not s.is_last})
        cuts = [(embeddings[s.content_hash], slice(s.first_row, s.first_row + s.num_rows)) for s in batch.image_slices]
        zero_1D = x_TD.new_zeros((1, x_TD.shape[1]))
        main_MD = torch.cat([*(value.main_MD[cut] for value, cut in cuts), zero_1D])
        is_shown_T1 = (rows_T < len(main_MD) - 1)[:, None]
        x_TD = torch.where(is_shown_T1, F.embedding(rows_T, main_MD), x_TD)
        num_levels = len(cuts[0][0].deepstack)
        levels = [torch.cat([*(value.deepstack[level][cut] for value, cut in cuts), zero_1D])
                  for level in range(num_levels)]
        return x_TD, (rows_T, levels)
