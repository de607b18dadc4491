"""Sampling parameters and counts of each running sequence, by slot: numpy on the host, tensors on the device.

Entries of new sequences are staged in numpy and sent in one copy with the next step. A step of the same rows as the one
before copies nothing; the device updates what changes from step to step. Knows nothing of logits.

Shapes: S slots, B rows of the step, G of one group, F fields, V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_runner.errors import RequestError
from npu_runner.platforms.ops import AddAt
from npu_runner.platforms.transfers import upload_together
from npu_runner.request.sampling_params import SamplingParams, num_top_logprobs
from npu_runner.sampling.logit_rules import LogitRules, Watch, logit_rules
from npu_runner.sampling.ngram_history import NgramHistory, NgramRule, ngram_rule
from npu_runner.sampling.sampling_plan import GREEDY, RowsOfStep, StepPlan, sampling_class

_REACHED = 1.0 - 2.0**-20  # a set that is short of top_p by rounding alone has reached it
_WORD = 0xFFFF_FFFF_FFFF_FFFF
_NEVER = np.iinfo(np.int64).max
_IN_PROMPT = 0.5  # added once where the prompt holds the token, to the count of how often it was generated
_LEAST_TEMPERATURE = 1e-5  # a lower one could overflow the scaled logits; here only ties are still left to chance


class Feature(enum.IntFlag):
    """Features of a row beyond plain sampling."""

    MIN_P = enum.auto()
    REPETITION = enum.auto()
    FREQUENCY = enum.auto()
    """Frequency or presence penalty."""
    LOGPROBS = enum.auto()


_PENALTIES = int(Feature.REPETITION | Feature.FREQUENCY)


class Field(enum.IntEnum):
    """Rows of the parameter table on the device."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6


class TokenCounts:
    """Counts of generated tokens by slot, for penalties: (slots, vocabulary) int32 on the device.

    Each step adds its sampled tokens. The table is allocated when the first sequence with a penalty joins.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, add_at: AddAt):
        assert max_num_seqs * vocab_size < 2**31, "flat indices are int32"
        self._shape, self._device, self._add_at = (max_num_seqs, vocab_size), device, add_at
        self._counts_SV: Tensor | None = None
        self._joining: tuple[int, ...] = ()  # slots of the newcomers that `stage` prepared

    def stage(self, histories: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> list[np.ndarray]:
        """Arrays of 4-byte values for `install`. histories: newcomers that have penalties, (prompt, output so far)."""
        self._joining = tuple(histories)
        if not histories:
            return []
        indices, amounts = [], []
        for slot, (prompt, output) in histories.items():
            in_prompt = np.unique(np.asarray(prompt, dtype=np.int32))
            tokens, places = np.unique(np.concatenate([in_prompt, np.asarray(output, dtype=np.int32)]),
                                       return_inverse=True)
            indices.append(slot * self._shape[1] + tokens)
            amounts.append(np.bincount(places, np.repeat([_IN_PROMPT, 1.0], [len(in_prompt), len(output)])))
        return [np.concatenate(indices).astype(np.int32), np.concatenate(amounts).astype(np.float32)]

    def install(self, staged: Sequence[Tensor]) -> None:
        """Take over what `stage` prepared, now on the device."""
        if not staged:
            return
        indices_N, amounts_N = staged
        if self._counts_SV is None:
            self._counts_SV = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        for slot in self._joining:  # index_fill_ would copy the whole table on Ascend
            self._counts_SV[slot].zero_()
        self._add_at(self._counts_SV.view(-1), indices_N.long(), amounts_N)

    def rows(self, slots_B: Tensor) -> Tensor:
        """(B, V) float32: 0 for a token neither in prompt nor output; rounded down, how often it was generated."""
        assert self._counts_SV is not None, "no sequence with a penalty has joined"
        return self._counts_SV.index_select(0, slots_B)

    def prepare_advance(self, slots_B: Tensor, tokens_B: Tensor) -> Callable[[], object]:
        """A function that counts one generated token per row. Its memory is allocated now. Slots are unique."""
        assert self._counts_SV is not None, "no sequence with a penalty has joined"
        indices_B = slots_B * self._shape[1] + tokens_B
        ones_B = torch.ones_like(indices_B, dtype=torch.float32)
        return partial(self._add_at, self._counts_SV.view(-1), indices_B, ones_B)


class _SlotParams(NamedTuple):
    """The data of a slot that come from its SamplingParams alone."""

    rules: LogitRules
    ngram_rule: NgramRule | None
    features: int
    top_k: int
    fields_F: np.ndarray
    sampling_class: int
    num_logprobs: int


class SamplingState:
    """Seeds, parameters, token counts and rules of every slot."""

    def __init__(self, *, vocab_size: int, max_num_seqs: int, max_model_len: int, eos_token_ids: Sequence[int],
                 device: torch.device, add_at: AddAt):
        self.vocab_size, self.device = vocab_size, device
        self._max_model_len = max_model_len
        self.ngrams = NgramHistory(max_num_seqs, device)
        self.counts = TokenCounts(max_num_seqs, vocab_size, device, add_at)
        self._rules: dict[int, LogitRules] = {}
        self._eos_token_ids = tuple(eos_token_ids)
        self._features_S = np.zeros(max_num_seqs, dtype=np.int32)
        self._classes_S = np.full(max_num_seqs, GREEDY, dtype=np.int32)
        self._mixed_seeds_S = np.zeros(max_num_seqs, dtype=np.uint64)
        self._top_k_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._is_biased_S = np.zeros(max_num_seqs, dtype=np.bool_)
        self._banned_until_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._ngram_rules: dict[int, NgramRule] = {}
        self._repeats_from_S = np.full(max_num_seqs, _NEVER, dtype=np.int64)
        self._num_generated_S = np.zeros(max_num_seqs, dtype=np.int64)
        self._fields_FS = np.zeros((len(Field), max_num_seqs), dtype=np.float32)
        self._watches: dict[int, Watch] = {}
        self._last_watches: tuple[bytes, list[tuple[int, Watch]]] | None = None
        self._newcomers: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        # A dummy step may sample before a row is registered, and recorded sampling reads it in place.
        self._device_fields_FS = torch.zeros(self._fields_FS.shape, dtype=torch.float32, device=device)
        self._last_params: tuple[SamplingParams, _SlotParams] | None = None
        self._last_plan: tuple[bytes, StepPlan] | None = None

    def add(self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int],
            output_token_ids: Sequence[int], seed: int) -> None:
        """Register a sequence as it stands after `output_token_ids`. Raises RequestError, the slot then free."""
        self.remove(slot)
        shared = self._slot_params(params)
        rules = self._rules[slot] = shared.rules
        if rules.bad_words is not None:
            self._watches[slot] = Watch(rules.bad_words, output_token_ids)
            self._last_watches = None
        self._is_biased_S[slot] = len(rules.tokens) > 0
        self._banned_until_S[slot] = rules.banned_until
        if shared.ngram_rule is not None:
            self._ngram_rules[slot] = shared.ngram_rule
            self._repeats_from_S[slot] = shared.ngram_rule.size
        self._features_S[slot] = shared.features
        self._mixed_seeds_S[slot] = _mixed_seed(seed)
        self._num_generated_S[slot] = len(output_token_ids)
        self._classes_S[slot] = shared.sampling_class
        self._top_k_S[slot] = shared.top_k
        self._num_logprobs_S[slot] = shared.num_logprobs
        self._fields_FS[:, slot] = shared.fields_F
        self._newcomers[slot] = (prompt_token_ids, output_token_ids)

    def remove(self, slot: int) -> None:
        if slot in self._rules:
            self._features_S[slot] = 0
            self._classes_S[slot] = GREEDY
            self._is_biased_S[slot] = False
            self._banned_until_S[slot] = 0
            self._ngram_rules.pop(slot, None)
            self._repeats_from_S[slot] = _NEVER
            self._newcomers.pop(slot, None)
            if self._watches.pop(slot, None) is not None:
                self._last_watches = None
            del self._rules[slot]  # last: an interrupt may come between any two lines

    def _slot_params(self, params: SamplingParams) -> _SlotParams:
        """Made once for all rows with equal params that come one after the other. Raises RequestError."""
        if self._last_params is None or (self._last_params[0] is not params and self._last_params[0] != params):
            assert params.bad_words_token_ids or not params.bad_words, "bad_words are resolved before they are queued"
            rules = logit_rules(params, self._eos_token_ids)
            if rules.largest_token >= self.vocab_size:
                raise RequestError(f"token id {rules.largest_token} is asked for, the model has {self.vocab_size} "
                                   "tokens; correct logit_bias, bad_words or stop_token_ids",
                                   code="invalid_sampling_parameter")
            top_k = min(params.top_k or self.vocab_size, self.vocab_size)
            self._last_params = params, _SlotParams(
                rules=rules, ngram_rule=ngram_rule(params, self._max_model_len),
                features=_features(params), top_k=top_k, fields_F=np.array(_fields(params, top_k), dtype=np.float32),
                sampling_class=GREEDY if params.is_greedy else sampling_class(
                    top_k, self.vocab_size, params.top_p, params.min_p),
                num_logprobs=num_top_logprobs(params.logprobs or 0, self.vocab_size))
        return self._last_params[1]

    def samples_independently(self, host_slots: np.ndarray) -> bool:
        """True if the next tokens of these sequences change neither how later ones are sampled nor the host's work."""
        features_B = self._features_S[host_slots] & (Feature.REPETITION | Feature.FREQUENCY | Feature.LOGPROBS)
        is_banned_B = self._num_generated_S[host_slots] < self._banned_until_S[host_slots]
        follows = any(slot in self._ngram_rules or slot in self._watches for slot in host_slots.tolist())
        return not (features_B.any() or is_banned_B.any() or self._is_biased_S[host_slots].any() or follows)

    def advance(self, host_slots: np.ndarray, counts_B: np.ndarray) -> None:
        """Advance sequences whose tokens are independent by `counts_B` tokens."""
        self._num_generated_S[host_slots] += counts_B

    def uniforms(self, host_slots: np.ndarray, places: np.ndarray | int = 0) -> np.ndarray:
        """float32 (B,) in [0, 1): a hash of each sequence's seed and the number of tokens it has generated, and of
        `places` more."""
        if (self._classes_S[host_slots] == GREEDY).all():
            return np.zeros(len(host_slots), dtype=np.float32)  # they are not read
        steps_B = (self._num_generated_S[host_slots] + places).view(np.uint64)
        bits_B = _mixed(self._mixed_seeds_S[host_slots] + steps_B)
        return ((bits_B >> np.uint64(40)) * 2.0**-24).astype(np.float32)

    def fields(self, slots_G: Tensor) -> Tensor:
        """Parameters of the rows on the device, (F, G, 1) float32, in the order of Field."""
        return self._device_fields_FS.index_select(1, slots_G)[..., None]

    @property
    def temperatures_S(self) -> Tensor:
        """(S,) float32 on the device, where it stays; 0 for who takes the most probable token."""
        return self._device_fields_FS[Field.TEMPERATURE]

    def watches(self, host_slots: np.ndarray) -> list[tuple[int, Watch]]:
        """(row, watch) of the rows that must be told their token."""
        if not self._watches:
            return []
        key = host_slots.tobytes()
        if self._last_watches is None or self._last_watches[0] != key:
            self._last_watches = key, [(row, self._watches[slot]) for row, slot in enumerate(host_slots.tolist())
                                       if slot in self._watches]
        return self._last_watches[1]

    def plan(self, host_slots: np.ndarray, masked_rows: Sequence[int] = ()) -> StepPlan:
        """The plan of the next step for these slots. One copy sends its arrays to the device, new slots included.

        masked_rows: rows whose tokens a mask restricts.
        """
        is_masked_B = np.zeros(len(host_slots), dtype=np.bool_)
        is_masked_B[list(masked_rows)] = True
        is_banned_B = self._num_generated_S[host_slots] < self._banned_until_S[host_slots]
        may_repeat_B = self._num_generated_S[host_slots] >= self._repeats_from_S[host_slots]
        hits = [(row, token) for row, watch in self.watches(host_slots) for token in watch.banned]
        # In most steps it is the plan of the step before: no more than this is then looked at.
        key = host_slots.tobytes() + is_banned_B.tobytes() + may_repeat_B.tobytes() + is_masked_B.tobytes()
        if self._last_plan is not None and self._last_plan[0] == key and not self._newcomers and not hits:
            return self._last_plan[1]
        self._last_plan = None
        plan = self._make_plan(self._rows(host_slots, is_banned_B, may_repeat_B, is_masked_B, hits))
        if not hits:
            self._last_plan = key, plan
        return plan

    def _rows(self, host_slots: np.ndarray, is_banned_B: np.ndarray, may_repeat_B: np.ndarray, is_masked_B: np.ndarray,
              hits: list[tuple[int, int]]) -> RowsOfStep:
        features_B = self._features_S[host_slots]
        return RowsOfStep(
            slots=host_slots,
            uses_repetition=(features_B & Feature.REPETITION) != 0,
            uses_frequency=(features_B & Feature.FREQUENCY) != 0,
            is_biased=self._is_biased_S[host_slots], is_banned=is_banned_B, is_masked=is_masked_B,
            ngram_rules=[self._ngram_rules.get(slot) for slot in host_slots.tolist()] if self._ngram_rules else [],
            may_repeat=may_repeat_B,
            wants_logprobs=(features_B & Feature.LOGPROBS) != 0,
            uses_min_p=(features_B & Feature.MIN_P) != 0,
            classes=self._classes_S[host_slots], top_k=self._top_k_S[host_slots], hits=hits)

    def _make_plan(self, rows: RowsOfStep) -> StepPlan:
        sent = _upload_parts({
            **(self._stage_newcomers() if self._newcomers else {}),
            "indices": list(rows.indices.values()),
            "ngram rules": rows.ngram_arrays,
            "additions": rows.addition_arrays(self._rules),
        }, self.device)
        plan = rows.plan(dict(zip(rows.indices, sent["indices"], strict=True)), sent["additions"], sent["ngram rules"],
                         num_logprobs=int(self._num_logprobs_S[rows.slots].max(initial=0)))
        # Last: what fails for want of memory changes nothing that a second call would not make again.
        if self._newcomers:
            self._device_fields_FS.copy_(sent["fields"][0])
            self.counts.install(sent["counts"])
            self.ngrams.install(sent["ngrams"])
            self._newcomers.clear()
        return plan

    def _stage_newcomers(self) -> dict[str, list[np.ndarray]]:
        penalised = {slot: history for slot, history in self._newcomers.items()
                     if int(self._features_S[slot]) & _PENALTIES}
        followed = {slot: (self._ngram_rules[slot], output) for slot, (_, output) in self._newcomers.items()
                    if slot in self._ngram_rules}
        return {"fields": [self._fields_FS], "counts": self.counts.stage(penalised),
                "ngrams": self.ngrams.stage(followed)}

    def prepare_advance(self, plan: StepPlan, slots_B: Tensor, tokens_B: Tensor,
                        host_slots: np.ndarray) -> Callable[[], None]:
        """A function that records one generated token per row. Its memory is allocated now."""
        count = None
        if plan.counted is not None:
            count = self.counts.prepare_advance(plan.counted.select(slots_B), plan.counted.select(tokens_B))
        follow = None
        if plan.followed is not None:
            rows = plan.followed.rows
            follow = self.ngrams.prepare_advance(rows.select(slots_B), rows.select(tokens_B), plan.followed.exempt_FE)

        def record() -> None:
            if count is not None:
                count()
            if follow is not None:
                follow()
            self._num_generated_S[host_slots] += 1

        return record


def _upload_parts(parts: Mapping[str, list[np.ndarray]], device: torch.device) -> dict[str, list[Tensor]]:
    """Arrays of several parts in one copy, or in none where there are no arrays."""
    arrays = [array for part in parts.values() for array in part]
    on_device = iter(upload_together(arrays, device) if arrays else ())
    return {name: [next(on_device) for _ in part] for name, part in parts.items()}


def _features(params: SamplingParams) -> int:
    wanted = {
        Feature.REPETITION: params.repetition_penalty != 1.0,
        Feature.FREQUENCY: params.frequency_penalty != 0.0 or params.presence_penalty != 0.0,
        Feature.LOGPROBS: params.logprobs is not None,
        Feature.MIN_P: not params.is_greedy and params.min_p > 0.0,
    }
    return sum(feature for feature, is_wanted in wanted.items() if is_wanted)


def _fields(params: SamplingParams, top_k: int) -> list[float]:
    values = {
        Field.TEMPERATURE: 0.0 if params.is_greedy else max(params.temperature, _LEAST_TEMPERATURE),
        Field.TOP_K: top_k,
        Field.TOP_P: params.top_p * _REACHED if params.top_p < 1.0 else 1.0,
        Field.MIN_P: params.min_p,
        Field.REPETITION: params.repetition_penalty,
        Field.FREQUENCY: params.frequency_penalty,
        Field.PRESENCE: params.presence_penalty,
    }
    return [values[field] for field in Field]


def _mixed(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mixed_seed(seed: int) -> int:
    """`_mixed` of one number, in Python's integers: an array of one number takes twenty times as long."""
    word = seed + 0x9E3779B97F4A7C15 & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
