"""Which rows of a step need which feature, so that a row costs other rows nothing. Knows slots and features, not
logits.

All of it is decided on the host; the device gets row numbers.

Shapes: S slots, B rows of the step, A of them whose logits are adjusted, P of those penalised, G of one group, F
that are followed for n-grams, E exempt ids.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from npu_runner.sampling.logit_rules import Additions, LogitRules, addition_arrays
from npu_runner.sampling.ngram_history import NgramBans, NgramRule, bans_of, exempt_ids_of

GREEDY = -1
_WHOLE, _WHOLE_ABOVE_MIN_P = 0, 1  # from the whole vocabulary, or from what min_p keeps of it; nothing is sorted
_TOP_K_CLASSES = (64, 1024)  # who keeps few tokens does not wait for those who sort more


def sampling_class(top_k: int, vocab_size: int, top_p: float, min_p: float) -> int:
    """Rows of one class are sampled together. A higher class sorts more."""
    if top_k >= vocab_size and top_p >= 1.0:
        return _WHOLE_ABOVE_MIN_P if min_p > 0.0 else _WHOLE
    return 1 + _WHOLE_ABOVE_MIN_P + sum(top_k > most for most in _TOP_K_CLASSES)


@dataclass(frozen=True)
class Rows:
    """Row numbers on the device, int64; None stands for all rows, which are then taken as they are."""

    index: Tensor | None = None

    def select(self, values: Tensor) -> Tensor:
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, values: Tensor, part: Tensor) -> Tensor:
        """`values` with `part` in these rows."""
        return part if self.index is None else values.index_copy(0, self.index, part)


@dataclass(frozen=True)
class SamplingGroup:
    """Rows that are sampled the same way. `rows` index the step, `places` the logits that they are sampled from."""

    rows: Rows
    places: Rows
    is_adjusted: bool
    """Sampled from the adjusted logits, not from the model's."""
    sorts: bool
    uses_min_p: bool
    least_k: int
    """Smallest and largest top_k, the vocabulary where there is none."""
    most_k: int

    @property
    def is_plain(self) -> bool:
        """Sampled from the whole of the model's own distribution."""
        return not (self.is_adjusted or self.sorts or self.uses_min_p)


@dataclass(frozen=True)
class FollowedRows:
    """Rows whose tokens go into the history of n-grams."""

    rows: Rows
    exempt_FE: Tensor


@dataclass(frozen=True)
class RepeatingRows:
    """The rows with enough tokens to repeat an n-gram. `rows` are rows of the step, `places` rows of the adjusted."""

    rows: Rows
    places: Rows
    bans: NgramBans


@dataclass(frozen=True)
class StepPlan:
    """The work of a step beyond the argmax; a field is None or empty if no row needs it."""

    adjusted: Rows | None
    penalised: Rows | None
    """Positions among the adjusted rows."""
    counted: Rows | None
    """Positions of the penalised rows among all."""
    uses_repetition: bool
    uses_frequency: bool
    additions: Additions | None
    followed: FollowedRows | None
    repeating: RepeatingRows | None
    masked: Rows | None
    """Among the adjusted, those that a mask leaves only some tokens."""
    groups: list[SamplingGroup]
    logprobs: Rows | None
    logprob_rows: np.ndarray
    """The same on the host."""
    num_logprobs: int

    @functools.cached_property
    def is_plain(self) -> bool:
        """All rows sample from the model's whole distribution or are greedy, and need nothing else."""
        return self.adjusted is None and self.logprobs is None and all(group.is_plain for group in self.groups)

    @functools.cached_property
    def masks_alone(self) -> bool:
        """Nothing but masks changes logits."""
        others = (self.penalised, self.additions, self.repeating)
        return self.masked is not None and all(other is None for other in others)

    @property
    def masks_all(self) -> bool:
        """The same, and they change those of every row."""
        return self.masks_alone and self.adjusted is not None and self.adjusted.index is None

    @functools.cached_property
    def is_plain_but_masked(self) -> bool:
        """As `is_plain`, of what masks leave of that distribution."""
        is_simple = self.masks_alone and self.logprobs is None
        return is_simple and not any(group.sorts or group.uses_min_p for group in self.groups)

    @functools.cached_property
    def is_plain_sampling(self) -> bool:
        """The same, and no row is greedy."""
        return self.is_plain and len(self.groups) == 1 and self.groups[0].rows.index is None


@dataclass(frozen=True, kw_only=True)
class RowsOfStep:
    """Sampling parameters of each row, on the host; (B,) each."""

    slots: np.ndarray
    uses_repetition: np.ndarray
    uses_frequency: np.ndarray
    is_biased: np.ndarray
    is_banned: np.ndarray
    """Tokens that are banned before `min_tokens`."""
    ngram_rules: list[NgramRule | None]
    """Empty where no sequence has one."""
    may_repeat: np.ndarray
    """Has tokens enough to break its rule."""
    is_masked: np.ndarray
    wants_logprobs: np.ndarray
    uses_min_p: np.ndarray
    classes: np.ndarray
    top_k: np.ndarray
    hits: list[tuple[int, int]] = field(default_factory=list)
    """(row, token) that would complete a bad word."""

    @functools.cached_property
    def is_penalised(self) -> np.ndarray:
        return self.uses_repetition | self.uses_frequency

    @functools.cached_property
    def is_adjusted(self) -> np.ndarray:
        wanted = self.is_penalised | self.is_biased | self.is_banned | self.may_repeat | self.is_masked
        wanted[[row for row, _ in self.hits]] = True
        return wanted

    @functools.cached_property
    def place(self) -> np.ndarray:
        """The index of each adjusted row among the adjusted."""
        return (np.cumsum(self.is_adjusted) - 1).astype(np.int32)

    def addition_arrays(self, rules: Mapping[int, LogitRules]) -> list[np.ndarray]:
        """The rules that hold in the step, for `Additions`; empty where none does. rules: by slot."""
        parts = [(self.place[row], rules[self.slots[row]].tokens, rules[self.slots[row]].values)
                 for row in np.flatnonzero(self.is_biased)]
        bans = [(self.place[row], rules[self.slots[row]].bans) for row in np.flatnonzero(self.is_banned)]
        bans += [(self.place[row], np.array([token])) for row, token in self.hits]
        parts += [(row, tokens, np.full(len(tokens), -np.inf)) for row, tokens in bans]
        return addition_arrays(parts, int(self.is_adjusted.sum())) if parts else []

    @property
    def _followed(self) -> list[int]:
        return [row for row, rule in enumerate(self.ngram_rules) if rule is not None]

    @property
    def ngram_arrays(self) -> list[np.ndarray]:
        """The rules of rows that are followed, and of those that may repeat something, for the device."""
        followed = [rule for rule in self.ngram_rules if rule is not None]
        if not followed:
            return []
        repeating = [rule for rule, may in zip(self.ngram_rules, self.may_repeat, strict=True) if rule and may]
        return [exempt_ids_of(followed), *bans_of(repeating)]

    @functools.cached_property
    def _groups(self) -> dict[str, np.ndarray]:
        """Rows of each group that is not empty, by its name."""
        classes = np.unique(self.classes[self.classes != GREEDY]).tolist()
        masks = {f"{kind} {'adjusted' if is_adjusted else 'plain'}":
                 (self.classes == kind) & (self.is_adjusted == is_adjusted)
                 for kind in classes for is_adjusted in (False, True)}
        return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}

    @functools.cached_property
    def indices(self) -> dict[str, np.ndarray]:
        """int32 row numbers for the device, by name; no entry where there are none, an empty one for all rows."""
        num_rows, num_adjusted = len(self.slots), int(self.is_adjusted.sum())
        wanted = {
            "adjusted": (np.flatnonzero(self.is_adjusted), num_rows),
            "penalised": (self.place[self.is_penalised], num_adjusted),
            "counted": (np.flatnonzero(self.is_penalised), num_rows),
            "followed": (np.array(self._followed, dtype=np.int32), num_rows),
            "repeating rows": (np.flatnonzero(self.may_repeat), num_rows),
            "repeating places": (self.place[self.may_repeat], num_adjusted),
            "masked": (self.place[self.is_masked], num_adjusted),
            "logprobs": (np.flatnonzero(self.wants_logprobs), num_rows),
        }
        for name, rows in self._groups.items():
            is_adjusted = bool(self.is_adjusted[rows[0]])
            wanted[f"{name} rows"] = (rows, num_rows)
            wanted[f"{name} places"] = (self.place[rows], num_adjusted) if is_adjusted else (rows, num_rows)
        return {name: np.zeros(0, dtype=np.int32) if len(rows) == count else rows.astype(np.int32)
                for name, (rows, count) in wanted.items() if len(rows)}

    def plan(self, on_device: Mapping[str, Tensor], additions: Sequence[Tensor], ngrams: Sequence[Tensor], *,
             num_logprobs: int) -> StepPlan:
        """on_device, additions, ngrams: `indices`, `addition_arrays` and `ngram_arrays`, there."""
        rows = {name: Rows(index.long() if len(index) else None) for name, index in on_device.items()}
        followed = repeating = None
        if "followed" in rows:
            followed = FollowedRows(rows["followed"], ngrams[0])
        if "repeating rows" in rows:
            repeating = RepeatingRows(rows["repeating rows"], rows["repeating places"], NgramBans(*ngrams[1:]))
        return StepPlan(
            adjusted=rows.get("adjusted"), penalised=rows.get("penalised"), counted=rows.get("counted"),
            uses_repetition=bool(self.uses_repetition.any()), uses_frequency=bool(self.uses_frequency.any()),
            additions=Additions(additions[0].long(), additions[1]) if additions else None,
            followed=followed, repeating=repeating, masked=rows.get("masked"),
            groups=[self._group(name, members, rows) for name, members in self._groups.items()],
            logprobs=rows.get("logprobs"), logprob_rows=np.flatnonzero(self.wants_logprobs), num_logprobs=num_logprobs)

    def _group(self, name: str, members: np.ndarray, rows: Mapping[str, Rows]) -> SamplingGroup:
        return SamplingGroup(
            rows=rows[f"{name} rows"], places=rows[f"{name} places"], is_adjusted=bool(self.is_adjusted[members[0]]),
            sorts=bool(self.classes[members[0]] > _WHOLE_ABOVE_MIN_P), uses_min_p=bool(self.uses_min_p[members].any()),
            least_k=int(self.top_k[members].min()), most_k=int(self.top_k[members].max()))
