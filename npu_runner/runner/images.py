"""The images of a step: each through the tower once, its rows kept in a cache and put into the embeddings.

The same image in ten prompts, or in two chunks of one, is encoded once. Knows no scheduler.

T tokens in the step, M image tokens in the step, D hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.core.batch import ScheduledBatch
from npu_runner.models.vision.patches import groups_within
from npu_runner.platforms.devices import Memory
from npu_runner.platforms.transfers import Download, SideResult, SideStream, upload
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

    max_tokens: most merged tokens in one call of the tower, unless it is one image; max_values: most numbers in arrays
    of transformers' processors, 0 for images without such. side_stream: uploads images and cuts them into patches while
    the step before runs. None: that is done in front of the tower.
    """

    def __init__(self, strategy: LoadStrategy, model: nn.Module, cache: VisionCache, max_tokens: int,
                 max_values: int = 0, side_stream: SideStream | None = None):
        self._strategy = strategy
        self._model = model
        self._side_stream = side_stream
        self.cache = cache
        self.max_tokens, self.max_values = max_tokens, max_values
        self.num_encoded = 0

    def stage(self, images: Sequence[ImageInput]) -> StepImages:
        """Look for a step's images in the cache, and upload the others ahead of the step.

        Called after the steps before have been submitted, before anything waits for them. Chunks that sample nothing
        are never synchronised, so this function limits uploads to one step's images ahead.
        """
        values = {image.content_hash: self.cache.get(image.content_hash) for image in images}
        # As a rule one. Only a chunk that must reach a boundary may touch more images than a step should.
        groups = groups_within([image for image in images if values[image.content_hash] is None],
                               self._share, self.max_tokens)
        found = {key: value for key, value in values.items() if value is not None}
        return StepImages(found, groups, self._send_ahead(groups[0]) if groups else None)

    def _share(self, image: ImageInput) -> int:
        """The tokens that count for it: tiles with few tokens take as much memory as others."""
        if not self.max_values:
            return image.num_tokens
        return max(image.num_tokens, image.num_tower_values * self.max_tokens // self.max_values)

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
    host_hits: int = 0
    """The hits that were in host memory."""
    host_bytes: int = 0


class HostTier:
    """Embeddings that the device's cache had no room for, in pageable host memory; the least recently used go first.
    A value that returns to the device stays, so that it is copied once.

    memory, device: what they are copied from and back to. A copy to the host is asynchronous and goes through pinned
    memory, which is given back at the next call behind its end.
    """

    def __init__(self, max_bytes: int, memory: Memory, device: torch.device):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._memory, self._device = memory, device
        self._under_way: dict[bytes, list[Download]] = {}
        self._values: OrderedDict[bytes, tuple[list[Tensor], list[np.ndarray]]] = OrderedDict()
        """Tensors without memory, which have the shapes and dtypes, and the bytes of each."""

    def put(self, content_hash: bytes, value: VisionEmbeddings) -> None:
        self._store_those_done()
        if content_hash in self._values:
            self._values.move_to_end(content_hash)
            return
        if value.num_bytes > self.max_bytes:
            return
        tensors = [value.main_MD, *value.deepstack]
        self._under_way[content_hash] = [
            self._memory.download(tensor.contiguous().view(torch.uint8)) for tensor in tensors]
        self._values[content_hash] = [torch.empty_like(tensor, device="meta") for tensor in tensors], []
        self.num_bytes += value.num_bytes
        while self.num_bytes > self.max_bytes:
            oldest, (forms, _) = self._values.popitem(last=False)
            self._under_way.pop(oldest, None)
            self.num_bytes -= sum(form.nbytes for form in forms)

    def get(self, content_hash: bytes) -> VisionEmbeddings | None:
        """A value on its way back to the device, or None; waits for its copy to the host."""
        if content_hash not in self._values:
            return None
        self._store(content_hash)
        self._values.move_to_end(content_hash)
        forms, arrays = self._values[content_hash]
        main_MD, *deepstack = (upload(array, self._device).view(form.dtype) for form, array in
                               zip(forms, arrays, strict=True))
        return VisionEmbeddings(main_MD, deepstack)

    def _store_those_done(self) -> None:
        for content_hash, downloads in list(self._under_way.items()):
            if all(download.is_done() for download in downloads):
                self._store(content_hash)

    def _store(self, content_hash: bytes) -> None:
        downloads = self._under_way.pop(content_hash, None)
        if downloads is not None:
            self._values[content_hash][1].extend(download.wait().copy() for download in downloads)


class VisionCache:
    """Least recently used goes first, to the host's tier if there is one. A value larger than the whole cache is not
    kept on the device.

    An image that a prefill chunk ends in is pinned until the next prefill step, even beyond the bound. So the tower
    does not run twice for one image of a prompt.
    """

    def __init__(self, max_bytes: int, host: HostTier | None = None):
        self.max_bytes = max_bytes
        self.counters = VisionCacheCounters()
        self._host = host
        self._values: OrderedDict[bytes, VisionEmbeddings] = OrderedDict()
        self._pinned: dict[bytes, VisionEmbeddings] = {}

    def get(self, content_hash: bytes) -> VisionEmbeddings | None:
        value = self._pinned.get(content_hash) or self._values.get(content_hash)
        if value is None and self._host is not None and (value := self._host.get(content_hash)) is not None:
            self.counters.host_hits += 1
            self.put(content_hash, value)
        if value is None:
            self.counters.misses += 1
            return None
        if content_hash in self._values:
            self._values.move_to_end(content_hash)
        self.counters.hits += 1
        return value

    def put(self, content_hash: bytes, value: VisionEmbeddings) -> None:
        assert content_hash not in self._values, "encoded twice"
        self._values[content_hash] = value
        self.counters.num_bytes += value.num_bytes
        while self.counters.num_bytes > self.max_bytes:
            # A value that is too large for the cache leaves alone.
            oldest = content_hash if value.num_bytes > self.max_bytes else next(iter(self._values))
            evicted = self._values.pop(oldest)
            self.counters.num_bytes -= evicted.num_bytes
            self.counters.evictions += evicted is not value
            if self._host is not None:
                self._host.put(oldest, evicted)
                self.counters.host_bytes = self._host.num_bytes

    def pin_only(self, values: dict[bytes, VisionEmbeddings]) -> None:
        """Hold `values` whatever happens, and none of those pinned before."""
        self._pinned = values

    def release(self) -> None:
        """Free the device's memory; a value that is needed and not on the host is computed again."""
        self.counters.evictions += len(self._values)
        self.counters.num_bytes = 0
        self._values.clear()
        self._pinned = {}
