"""What each running sequence asks of sampling, by slot: numpy on the host, tensors where the device needs them.

Whatever newcomers bring is staged in numpy and crosses in one copy with the next step; a step without newcomers copies
nothing, and what changes from step to step the device keeps up by itself. Knows nothing of logits.

Shapes: S slots, B rows of the step, F fields.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from npu_runner.errors import RequestError
from npu_runner.layers.logit_rules import RuleTable, logit_rules
from npu_runner.layers.token_counts import TokenCounts
from npu_runner.platforms.upload import upload_together
from npu_runner.sampling_params import SamplingParams

_REACHED = 1.0 - 2.0**-20  # a set that is short of top_p by rounding alone has reached it
_LEAST_TEMPERATURE = 1e-5  # a lower one could overflow the scaled logits; here only ties are still left to chance


class Feature(enum.IntFlag):
    """What a step must do beyond the argmax: whatever one of its rows needs."""

    DRAW = enum.auto()
    """From the whole vocabulary."""
    DRAW_FROM_TOP = enum.auto()
    """From what top_k and top_p keep."""
    MIN_P = enum.auto()
    REPETITION = enum.auto()
    FREQUENCY = enum.auto()
    """Frequency or presence penalty."""
    PREFIX_RULES = enum.auto()
    """Rules that look at the last tokens."""
    RULES = enum.auto()
    LOGPROBS = enum.auto()


class Field(enum.IntEnum):
    """Rows of the parameter table on the device."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6
    DRAWS = 7
    """1 where the row draws from the whole vocabulary, else 0."""
    DRAWS_FROM_TOP = 8
    """1 where the row draws from what top_k and top_p keep, else 0; a greedy row has 0 in both."""


class SamplingState:
    """Seeds, parameters, token counts and rules of every slot."""

    def __init__(self, *, vocab_size: int, max_num_seqs: int, eos_token_ids: Sequence[int], device: torch.device,
                 encode: Callable[[str], list[int]] | None):
        self.vocab_size, self.device = vocab_size, device
        self.counts = TokenCounts(max_num_seqs, vocab_size, device)
        self.rules = RuleTable(max_num_seqs, vocab_size, device)
        self._eos_token_ids = tuple(eos_token_ids)
        self._encode = encode
        self._features_S = np.zeros(max_num_seqs, dtype=np.int32)
        self._seeds_S = np.zeros(max_num_seqs, dtype=np.uint64)
        self._top_k_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._rules_until_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_generated_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._fields_FS = np.zeros((len(Field), max_num_seqs), dtype=np.float32)
        self._newcomers: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._device_fields_FS: Tensor

    def add(self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int],
            output_token_ids: Sequence[int], seed: int) -> None:
        """Register a sequence as it stands after `output_token_ids`. Raises RequestError, the slot then free."""
        self.remove(slot)
        rules = logit_rules(params, self._eos_token_ids, self._bad_word_ids(params))
        if len(rules) and int(rules.tokens.max()) >= self.vocab_size:
            raise RequestError(f"token id {int(rules.tokens.max())} is asked for, the model has {self.vocab_size} "
                               "tokens; correct logit_bias or stop_token_ids", code="invalid_sampling_parameter")
        features = _features(params, self.vocab_size)
        if rules.longest_prefix:
            features |= Feature.PREFIX_RULES
        self.rules.add(slot, rules)
        self._rules_until_S[slot] = rules.until.max(initial=0)
        self._features_S[slot] = features
        self._seeds_S[slot] = seed & 0xFFFF_FFFF_FFFF_FFFF
        self._num_generated_S[slot] = len(output_token_ids)
        self._top_k_S[slot] = _effective_top_k(params, self.vocab_size) if features & Feature.DRAW_FROM_TOP else 0
        self._num_logprobs_S[slot] = params.logprobs or 0
        self._fields_FS[:, slot] = _fields(params, features, self.vocab_size)
        self._newcomers[slot] = (prompt_token_ids, output_token_ids)

    def remove(self, slot: int) -> None:
        self._features_S[slot] = 0
        self._rules_until_S[slot] = 0
        self._newcomers.pop(slot, None)
        self.rules.remove(slot)

    def _bad_word_ids(self, params: SamplingParams) -> list[tuple[int, ...]]:
        if params.bad_words_token_ids or not params.bad_words:
            return [tuple(ids) for ids in params.bad_words_token_ids]
        if self._encode is None:
            raise RequestError("bad_words needs a tokenizer and this model comes without one; leave it out",
                               code="invalid_sampling_parameter", param="bad_words")
        spellings = (space + word for word in params.bad_words for space in ("", " "))
        return sorted({tuple(ids) for spelling in spellings if (ids := self._encode(spelling))})

    def features(self, host_slots: np.ndarray) -> Feature:
        """What the next step of these slots must do."""
        features = Feature(int(np.bitwise_or.reduce(self._features_S[host_slots])))
        if (self._num_generated_S[host_slots] < self._rules_until_S[host_slots]).any():
            features |= Feature.RULES
        return features

    def top_k_range(self, host_slots: np.ndarray) -> tuple[int, int]:
        """Smallest and largest top_k, the vocabulary where there is none, of those that draw from the top."""
        top_k_B = self._top_k_S[host_slots]
        return int(top_k_B[top_k_B > 0].min()), int(top_k_B.max())

    def num_logprobs(self, host_slots: np.ndarray) -> int:
        """Most top logprobs that one of these slots wants."""
        return int(self._num_logprobs_S[host_slots].max())

    def uniforms(self, host_slots: np.ndarray) -> np.ndarray:
        """float32 (B,) in [0, 1): a hash of each sequence's seed and the number of tokens it has generated."""
        steps_B = self._num_generated_S[host_slots].astype(np.uint64)
        bits_B = _mixed(_mixed(self._seeds_S[host_slots]) + steps_B)
        return ((bits_B >> np.uint64(40)) * 2.0**-24).astype(np.float32)

    def fields(self, slots_B: Tensor) -> Tensor:
        """Parameters of the rows on the device, (F, B, 1) float32, in the order of Field."""
        return self._device_fields_FS.index_select(1, slots_B)[..., None]

    def upload(self) -> None:
        """Bring what newcomers changed to the device."""
        if not self._newcomers:
            return
        penalised = {slot: history for slot, history in self._newcomers.items()
                     if self._features_S[slot] & (Feature.REPETITION | Feature.FREQUENCY)}
        outputs = {slot: output for slot, (_, output) in self._newcomers.items()}
        counts, rules = self.counts.stage(penalised), self.rules.stage(self._num_generated_S, outputs)
        self._device_fields_FS, *rest = upload_together([self._fields_FS, *counts, *rules], self.device)
        self.counts.install(rest[: len(counts)])
        self.rules.install(rest[len(counts):])
        self._newcomers.clear()

    def advance(self, features: Feature, slots_B: Tensor, tokens_B: Tensor, host_slots: np.ndarray) -> None:
        """Record one more generated token per row: all of it, or nothing where memory runs out."""
        recorders = []
        if features & (Feature.REPETITION | Feature.FREQUENCY):
            recorders.append(self.counts.prepare_advance(slots_B, tokens_B))
        if features & Feature.RULES:
            prefixes = Feature.PREFIX_RULES in features
            recorders.append(self.rules.prepare_advance(slots_B, tokens_B, match_prefixes=prefixes))
        for record in recorders:
            record()
        self._num_generated_S[host_slots] += 1


def _features(params: SamplingParams, vocab_size: int) -> Feature:
    wanted = {
        Feature.REPETITION: params.repetition_penalty != 1.0,
        Feature.FREQUENCY: params.frequency_penalty != 0.0 or params.presence_penalty != 0.0,
        Feature.LOGPROBS: params.logprobs is not None,
        Feature.MIN_P: not params.is_greedy and params.min_p > 0.0,
    }
    if not params.is_greedy:
        is_cut = params.top_p < 1.0 or _effective_top_k(params, vocab_size) < vocab_size
        wanted[Feature.DRAW_FROM_TOP if is_cut else Feature.DRAW] = True
    return Feature(sum(feature for feature, is_wanted in wanted.items() if is_wanted))


def _effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k or vocab_size, vocab_size)


def _fields(params: SamplingParams, features: Feature, vocab_size: int) -> list[float]:
    values = {
        Field.TEMPERATURE: max(params.temperature, _LEAST_TEMPERATURE),
        Field.TOP_K: _effective_top_k(params, vocab_size),
        Field.TOP_P: params.top_p * _REACHED if params.top_p < 1.0 else 1.0,
        Field.MIN_P: params.min_p,
        Field.REPETITION: params.repetition_penalty,
        Field.FREQUENCY: params.frequency_penalty,
        Field.PRESENCE: params.presence_penalty,
        Field.DRAWS: float(Feature.DRAW in features),
        Field.DRAWS_FROM_TOP: float(Feature.DRAW_FROM_TOP in features),
    }
    return [values[field] for field in Field]


def _mixed(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

