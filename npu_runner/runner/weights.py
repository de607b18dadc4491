"""A rank's weights: whether they fit, then from the checkpoint into the network. Knows no format and no family."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import nn

from npu_runner.checkpoint.adapted_weights import AdaptedReader
from npu_runner.checkpoint.formats.reader import DequantisingReader, open_weights
from npu_runner.errors import OutOfMemoryError
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.weights_loader import fill_with_random_weights
from npu_runner.platforms.devices import Memory
from npu_runner.request.limits import size
from npu_runner.runner.memory import weights_bytes
from npu_runner.runner.settings import Settings
from npu_runner.strategies import OpenedCheckpoint

logger = logging.getLogger(__name__)


def check_quantised_fit(checkpoint: OpenedCheckpoint, settings: Settings, context: LayerContext, memory: Memory
                        ) -> None:
    """Raises OutOfMemoryError, before anything is read, where quantised weights become more than this rank's part of
    what is free. The size of their files says nothing of it."""
    free = memory.free_bytes()
    if checkpoint.quantization is None or free is None:
        return
    on_meta = dataclasses.replace(context, device=torch.device("meta"))
    need = weights_bytes(checkpoint.strategy.build(checkpoint.model_config, settings.max_model_len, on_meta))
    # Where memory is no device's own, ranks share the host's.
    num_sharing = context.tp.size if memory.info() is None else 1
    if need * num_sharing > free:
        ranks = f" for each of {num_sharing} ranks" if num_sharing > 1 else ""
        raise OutOfMemoryError(
            f"the weights are quantised ({checkpoint.quantization.method}) and take {size(need)} in {settings.dtype}"
            f"{ranks}, as this platform has no products of such weights; {size(free)} of memory is free. Raise "
            "tensor_parallel_size over more devices, set dtype to 16 bits, or take a smaller model")


def load(model: nn.Module, checkpoint: OpenedCheckpoint, dtype: torch.dtype,
         progress: Callable[[int, int], None]) -> None:
    """Fill `model`, and say what is dequantised. `progress`: bytes that were read, of all."""
    if checkpoint.config.load_format == "dummy":
        fill_with_random_weights(model, checkpoint.config.seed)
        return
    with open_weights(checkpoint.path, checkpoint.quantization, progress) as reader:
        if isinstance(reader, DequantisingReader):
            logger.info("%s", reader.describe(dtype))
        if checkpoint.adapter is not None:
            reader = AdaptedReader(reader, checkpoint.adapter, checkpoint.strategy.renamed(reader.names))
            logger.info("the adapter %s is merged into %d weights", checkpoint.adapter.path, reader.num_changed)
        checkpoint.strategy.load_weights(model, reader, checkpoint.model_config)
