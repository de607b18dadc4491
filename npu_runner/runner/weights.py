"""A rank's weights: whether they fit, then from the checkpoint into the network. Knows no format and no family."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import nn

from npu_runner.checkpoint.adapted_weights import AdaptedReader
from npu_runner.checkpoint.formats.reader import DequantisingReader, open_weights
from npu_runner.checkpoint.formats.rounding import TO_FP8, TO_INT8, RoundingReader
from npu_runner.checkpoint.quantization import AWQ, GPTQ
from npu_runner.checkpoint.renamed_weights import RenamedReader
from npu_runner.checkpoint.weights_reader import BY_ROW, GroupedForm, WeightsReader
from npu_runner.errors import ConfigError, ModelError, OutOfMemoryError
from npu_runner.layers.attention import load_kv_scales
from npu_runner.layers.grouped_weights import Held
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.weight_forms import (
    MADE_AT_LOAD,
    forms_of_random,
    hold_as_stored,
    how_stored,
    match_experts,
    names_in_blocks,
    names_to_round,
    turned_stacks,
)
from npu_runner.layers.weights_loader import fill_with_random_weights
from npu_runner.models.contract import LanguageModel
from npu_runner.platforms.devices import Memory
from npu_runner.platforms.quantised import FP8, FP8_ALIGNMENT, FP8_BLOCK, FP8_BLOCKS, INT8
from npu_runner.request.limits import size
from npu_runner.runner.memory import weights_bytes
from npu_runner.runner.settings import FP8_CACHE, Settings
from npu_runner.strategies import OpenedCheckpoint

logger = logging.getLogger(__name__)
_TARGETS = {INT8: TO_INT8, FP8: TO_FP8}


def load(checkpoint: OpenedCheckpoint, settings: Settings, context: LayerContext, memory: Memory,
         report: Callable[[str], None]) -> nn.Module:
    """The network with its weights; says what is dequantised. `report` is told how much was read.

    Raises OutOfMemoryError, before anything is read, where quantised weights become more than this rank's part of what
    is free, and ModelError for a network that no step can run.
    """
    def progress(num_read: int, num_bytes: int) -> None:
        report(f"loading weights: {size(num_read)} of {size(num_bytes)}")

    model = _load(checkpoint, settings, context, memory, progress)
    if not isinstance(model, LanguageModel):
        raise ModelError(f"{type(checkpoint.strategy).__name__} built a {type(model).__name__}, not to be run: a "
                         "network has embed, forward and compute_logits (npu_runner/models/contract.py)")
    return model


def _load(checkpoint: OpenedCheckpoint, settings: Settings, context: LayerContext, memory: Memory,
          progress: Callable[[int, int], None]) -> nn.Module:
    strategy, model_config = checkpoint.strategy, checkpoint.model_config
    made = MADE_AT_LOAD.get(checkpoint.config.quantization)
    if checkpoint.config.load_format == "dummy":
        how = _named_form(checkpoint, settings) if made is None else made
        forms = forms_of_random(how, settings.weight_forms, is_made=made is not None)
        context = dataclasses.replace(context, weight_forms=forms)
        model = strategy.build(model_config, settings.max_model_len, context)
        fill_with_random_weights(model, checkpoint.config.seed, how or BY_ROW)
        strategy.check_network(model, model_config)
        return model
    if made is not None or checkpoint.quantization is not None:
        context = dataclasses.replace(context, weight_forms=settings.weight_forms)
    with open_weights(checkpoint.path, checkpoint.quantization, progress) as stored:
        reader = strategy.named(stored)
        if checkpoint.adapter is not None:
            reader = adapted = AdaptedReader(reader, checkpoint.adapter, strategy.renamed(reader.names))
            logger.info("the adapter %s is merged into %d weights", checkpoint.adapter.path, adapted.num_changed)
        if made is not None or checkpoint.quantization is not None:
            reader = _in_forms(reader, checkpoint, settings, context, memory)
        model = strategy.build(model_config, settings.max_model_len, context)
        strategy.load_weights(model, reader, model_config)
        if settings.kv_cache_dtype == FP8_CACHE:
            num_scaled, num_layers = load_kv_scales(model, reader, strategy.renamed(reader.names),
                                                    context.device)
            logger.info("keys and values are kept in FP8: %d of %d layers with the checkpoint's scales, else with 1",
                        num_scaled, num_layers)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(f"{type(strategy).__name__}.load_weights leaves linears without weights; those whose weights "
                         "are quantised are filled by npu_runner.layers.weights_loader.load_weights")
    strategy.check_network(model, model_config)
    return model


def _named_form(checkpoint: OpenedCheckpoint, settings: Settings) -> Held | None:
    """The form of random weights by the config alone, for FP8, AWQ and GPTQ.

    Raises ConfigError for other formats, where the platform could hold such weights as they are stored.
    """
    quantization = checkpoint.quantization
    if quantization is None:
        return None
    if quantization.method not in (FP8, AWQ, GPTQ) and settings.weight_forms:
        raise ConfigError(f"load_format 'dummy': which weights of {quantization.method} are held how is said by their "
                          "tensors, and random weights are made of the config alone; take a checkpoint of fp8, AWQ or "
                          "GPTQ, one in 16 bits with quantization int8 or fp8, or load_format safetensors")
    if quantization.method in (AWQ, GPTQ):
        bits, size = (int(quantization.settings.get(name) or usual) for name, usual in (
            ("bits", 4), ("group_size", 128)))
        return GroupedForm(bits, max(size, 0), has_zeros=quantization.method == AWQ) if bits in (4, 8) else None
    if quantization.method != FP8:
        return None
    block = quantization.settings.get("weight_block_size")
    return FP8 if block is None else FP8_BLOCKS if list(block) == [FP8_BLOCK, FP8_BLOCK] else None


def _in_forms(reader: WeightsReader, checkpoint: OpenedCheckpoint, settings: Settings, context: LayerContext,
              memory: Memory) -> WeightsReader:
    """The reader that fills the network; logs which weights are multiplied in which form. Reads no weight."""
    asked = checkpoint.config.quantization
    planned, on_meta = _planned(reader, checkpoint, settings, context, asked)
    held = hold_as_stored(on_meta, planned, checkpoint.strategy.renamed(reader.names))
    _check_fit(reader, checkpoint, settings, context, memory, weights_bytes(on_meta))
    base = reader.base if isinstance(reader, RenamedReader) else reader
    if isinstance(base, DequantisingReader):
        stored = {reader.stored(name) if isinstance(reader, RenamedReader) else name
                  for name in held if how_stored(reader, name) is not None}
        logger.info("%s", base.describe(context.dtype, stored,
                                          uses_kv_scales=settings.kv_cache_dtype == FP8_CACHE))
    if isinstance(planned, RoundingReader):
        logger.info("quantization %s: %s", asked, planned.describe(context.dtype, is_multiplied=bool(held)))
    return planned


def _planned(reader: WeightsReader, checkpoint: OpenedCheckpoint, settings: Settings, context: LayerContext,
             asked: str) -> tuple[WeightsReader, nn.Module]:
    """The reader, over one that rounds if `asked`, the setting `quantization`, says so; and the network without
    memory."""
    on_meta = checkpoint.strategy.build(checkpoint.model_config, settings.max_model_len,
                                        dataclasses.replace(context, device=torch.device("meta")))
    how = MADE_AT_LOAD.get(asked)
    if how is None:
        return reader, on_meta
    renamed = checkpoint.strategy.renamed(reader.names)
    match_experts(on_meta, reader, renamed)
    meant, names = names_to_round(on_meta, renamed), names_to_round(on_meta, renamed, how)
    if not names:
        raise ConfigError(f"quantization {asked}: {type(checkpoint.strategy).__name__} builds no linears of ours that "
                          f"have matmuls for {asked} weights; leave it at auto")
    if meant - names:
        logger.info("quantization %s: %d weights of sizes that %d (of experts %d) does not divide, or of stacks that "
                    "lie the other way round, have no such matmuls and stay as they are", asked, len(meant - names),
                    FP8_ALIGNMENT, FP8_BLOCK)
    return RoundingReader(reader, names, turned_stacks(on_meta, renamed), _TARGETS[asked],
                          names_in_blocks(on_meta, renamed, how)), on_meta


def _check_fit(reader: WeightsReader, checkpoint: OpenedCheckpoint, settings: Settings, context: LayerContext,
               memory: Memory, need: int) -> None:
    """Raises OutOfMemoryError where the weights become more than this rank's part of what is free. The size of their
    files says nothing of it."""
    free = memory.free_bytes()
    # Where memory is no device's own, ranks share the host's.
    num_sharing = context.tp.size if memory.info() is None else 1
    if free is None or need * num_sharing <= free:
        return
    ranks = f" for each of {num_sharing} ranks" if num_sharing > 1 else ""
    stored, made = checkpoint.quantization, f"{checkpoint.config.quantization} is made of them"
    method = made if stored is None else stored.method
    multiplied = ", ".join(settings.weight_forms) or "none of quantised ones"
    remedies = ["raise tensor_parallel_size over more devices"]
    remedies += ["set dtype to 16 bits"] if settings.dtype == "float32" else []
    if _fits_as_int8(reader, checkpoint, settings, context, free // num_sharing):
        remedies.insert(0, "set quantization to int8")
    raise OutOfMemoryError(
        f"the weights are quantised ({method}) and take {size(need)} in {settings.dtype}{ranks}, as the platform has "
        f"matmuls for these forms only: {multiplied}; {size(free)} of memory is free. To load it, "
        f"{', '.join(remedies)}, or take a smaller model")


def _fits_as_int8(reader: WeightsReader, checkpoint: OpenedCheckpoint, settings: Settings, context: LayerContext,
                  room: int) -> bool:
    if INT8 not in settings.weight_forms or checkpoint.config.quantization == INT8:
        return False
    try:
        planned, on_meta = _planned(reader, checkpoint, settings, context, INT8)
    except ConfigError:  # of integers that are not made int8
        return False
    hold_as_stored(on_meta, planned, checkpoint.strategy.renamed(reader.names))
    return weights_bytes(on_meta) <= room
