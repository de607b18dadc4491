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
    """What a strategy's tower makes of pictures, kept in `cache` as far as that goes.

    max_tokens: the tower takes no more merged tokens at once, unless it is one picture.
    """

    def __init__(self, strategy: LoadStrategy, model: nn.Module, cache: VisionCache[VisionEmbeddings], max_tokens: int):
        self._strategy = strategy
        self._model = model
        self.cache = cache
        self.max_tokens = max_tokens
        self.num_encoded = 0

    def encode(self, images: Sequence[ImageInput]) -> dict[bytes, VisionEmbeddings]:
        """Embeddings by content hash; those not cached go through the tower together."""
        found = {image.content_hash: self.cache.get(image.content_hash) for image in images}
        missing = [image for image in images if found[image.content_hash] is None]
        for together in self._groups(missing):
            for image, value in zip(together, self._strategy.encode_images(self._model, together), strict=True):
                self.cache.put(image.content_hash, value)
                found[image.content_hash] = value
            self.num_encoded += len(together)
        return {key: value for key, value in found.items() if value is not None}

    def _groups(self, images: Sequence[ImageInput]) -> list[list[ImageInput]]:
        """As a rule one: only a chunk that has to reach a boundary may touch more pictures than a step should."""
        groups: list[list[ImageInput]] = []
        room = 0
        for image in images:
            if not groups or image.num_tokens > room:
                groups.append([])
                room = self.max_tokens
            groups[-1].append(image)
            room -= image.num_tokens
        return groups

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
