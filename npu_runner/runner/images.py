"""The images of a step: each through the tower once, its rows kept in a cache and put into the embeddings.

The same image in ten prompts, or in two chunks of one, is encoded once. Knows no scheduler.

T tokens in the step, M image tokens in the step, D hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.core.batch import ScheduledBatch
from npu_runner.models.vision.patches import groups_within
from npu_runner.platforms.transfers import SideResult, SideStream
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.strategies import LoadStrategy, StagedImages, VisionEmbeddings


@dataclass(frozen=True)
class StepImages:
    """A step's images before the tower: `found`, the cached ones by content hash, and `groups`, which go through it
    together. `ahead` is the first group, if it was uploaded ahead."""

    found: dict[bytes, VisionEmbeddings]
    groups: list[list[ImageInput]]
    ahead: SideResult[Sequence[ImageInput]] | None


class ImageEncoder:
    """Computes embeddings of images by a strategy's tower, and keeps them in `cache`.

    max_tokens: most merged tokens in one call of the tower, unless it is one image. side_stream: uploads images and
    cuts them into patches while the step before runs. None: that is done in front of the tower.
    """

    def __init__(self, strategy: LoadStrategy, model: nn.Module, cache: VisionCache, max_tokens: int,
                 side_stream: SideStream | None = None):
        self._strategy = strategy
        self._model = model
        self._side_stream = side_stream
        self.cache = cache
        self.max_tokens = max_tokens
        self.num_encoded = 0

    def stage(self, images: Sequence[ImageInput]) -> StepImages:
        """Look for a step's images in the cache, and upload the others ahead of the step.

        Called after the steps before have been submitted, before anything waits for them. Chunks that sample nothing
        are never synchronised, so this function limits uploads to one step's images ahead.
        """
        values = {image.content_hash: self.cache.get(image.content_hash) for image in images}
        # As a rule one. Only a chunk that must reach a boundary may touch more images than a step should.
        groups = groups_within([image for image in images if values[image.content_hash] is None],
                               lambda image: image.num_tokens, self.max_tokens)
        found = {key: value for key, value in values.items() if value is not None}
        return StepImages(found, groups, self._send_ahead(groups[0]) if groups else None)

    def _send_ahead(self, images: Sequence[ImageInput]) -> SideResult[Sequence[ImageInput]] | None:
        if self._side_stream is None:
            return None
        return self._side_stream.run(lambda: self._strategy.stage_images(self._model, images))

    def encode(self, images: StepImages) -> dict[bytes, VisionEmbeddings]:
        """Embeddings by content hash of all of a step's; those not cached go through the tower together.

        Uses `images` up: the step keeps it until it is collected, and no image's memory.
        """
        found = dict(images.found)
        images.found.clear()
        for index, together in enumerate(images.groups):
            # Only the first group was sent ahead: as a rule there is one.
            ahead = images.ahead if index == 0 else None
            values = self._strategy.encode_images(self._model, together if ahead is None else _joined(ahead))
            if ahead is not None and self._side_stream is not None:
                self._side_stream.mark_read()
            for image, value in zip(together, values, strict=True):
                self.cache.put(image.content_hash, value)
                found[image.content_hash] = value
            self.num_encoded += len(together)
        return found

    def show(self, batch: ScheduledBatch, images: StepImages, x_TD: Tensor,
             rows_T: Tensor) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """Put the images' rows into the embeddings; returns those and what the first layers add.

        `rows_T` says which row each token shows. Tokens gather, nothing is scattered: that sorts on some devices.
        """
        embeddings = self.encode(images)
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


def _joined(ahead: SideResult[Sequence[ImageInput]]) -> Sequence[ImageInput]:
    images = ahead.result
    return ahead.join(images.tensors if isinstance(images, StagedImages) else ())


@dataclass
class VisionCacheCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    num_bytes: int = 0


class VisionCache:
    """Least recently used goes first. A value larger than the whole cache is not kept.

    An image that a prefill chunk ends in is pinned until the next prefill step, even beyond the bound. So the tower
    does not run twice for one image of a prompt.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.counters = VisionCacheCounters()
        self._values: OrderedDict[bytes, VisionEmbeddings] = OrderedDict()
        self._pinned: dict[bytes, VisionEmbeddings] = {}

    def get(self, content_hash: bytes) -> VisionEmbeddings | None:
        value = self._pinned.get(content_hash) or self._values.get(content_hash)
        if value is None:
            self.counters.misses += 1
            return None
        if content_hash in self._values:
            self._values.move_to_end(content_hash)
        self.counters.hits += 1
        return value

    def put(self, content_hash: bytes, value: VisionEmbeddings) -> None:
        assert content_hash not in self._values, "encoded twice"
        if value.num_bytes > self.max_bytes:
            return
        self._values[content_hash] = value
        self.counters.num_bytes += value.num_bytes
        while self.counters.num_bytes > self.max_bytes:
            _, evicted = self._values.popitem(last=False)
            self.counters.num_bytes -= evicted.num_bytes
            self.counters.evictions += 1

    def pin_only(self, values: dict[bytes, VisionEmbeddings]) -> None:
        """Hold `values` whatever happens, and none of those pinned before."""
        self._pinned = values

    def release(self) -> None:
        """Evicts every value; one that is needed is computed again."""
        self.counters.evictions += len(self._values)
        self.counters.num_bytes = 0
        self._values.clear()
        self._pinned = {}

    def clear(self) -> None:
        """Forget everything, counters included."""
        self._values.clear()
        self._pinned.clear()
        self.counters = VisionCacheCounters()
