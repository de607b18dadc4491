"""Settings of speculative decoding: `speculative_config`, under vLLM's names. Knows no model and no step.

A step samples the token of each drafted position as it would without the draft, and rejects a draft that differs. So no
value here changes an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.request.limits import shown

NAME = "speculative_config"
FORCED, NGRAM, SUFFIX, MTP = "forced", "ngram", "suffix", "mtp"
_METHODS = (NGRAM, SUFFIX, MTP, FORCED)
_NOT_SERVED = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "ngram_gpu")
_OF_NGRAM = ("prompt_lookup_max", "prompt_lookup_min")
_OF_SUFFIX = ("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
              "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")
_OF_ALL = ("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size")
_FIELDS = {FORCED: _OF_ALL, NGRAM: (*_OF_ALL, *_OF_NGRAM), SUFFIX: (*_OF_ALL, *_OF_SUFFIX), MTP: _OF_ALL}
MOST_TOKENS = 32
"""The most drafts of one row, as in vLLM."""
_MOST_OF_HEAD = 3
"""A head is trained for the token after next; its own states, from which it drafts on, tell it ever less."""
_MOST_LOOKED_UP = 64
_DEFAULT_LOOKED_UP, _DEFAULT_FORCED = 5, 8
_MOST_DEPTH, _DEFAULT_DEPTH = 64, 24
_MOST_CACHED, _DEFAULT_CACHED = 100_000, 10_000
_MOST_FACTOR = 16.0


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The settings, checked. `prompt_lookup_*` and `suffix_decoding_*` are 0 with other methods."""

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 0
    prompt_lookup_min: int = 0
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """(from, to, tokens): drafts per row in steps of `from` to `to` rows. Other steps have num_speculative_tokens."""
    suffix_decoding_max_tree_depth: int = 0
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: float = 0.0
    suffix_decoding_min_token_prob: float = 0.0

    @classmethod
    def from_mapping(cls, given: Any) -> SpeculativeConfig:
        """Raises ConfigError that names the field for what is not served."""
        if not isinstance(given, Mapping):
            raise ConfigError(f'{NAME}: {shown(given)} is no object like {{"method": "ngram", '
                              '"num_speculative_tokens": 4}')
        method = _method(given.get("method"))
        for name in given:
            if name not in _FIELDS[method] and given[name] is not None:
                raise ConfigError(f"{NAME}.{shown(name)}: not served with method {method}, which has "
                                  f"{', '.join(_FIELDS[method])}; leave it out")
        own = _lookup(given) if method == NGRAM else _suffix(given) if method == SUFFIX else {}
        default = _DEFAULT_FORCED if method == FORCED else own.get(_OF_SUFFIX[0])
        most = _count(given, "num_speculative_tokens", _MOST_OF_HEAD if method == MTP else MOST_TOKENS,
                      default and min(default, MOST_TOKENS))
        return cls(method=method, num_speculative_tokens=most,
                   num_speculative_tokens_per_batch_size=_by_batch_size(given, most), **own)

    @property
    def has_head(self) -> bool:
        """The model's own head proposes: it is to be loaded, and computed in every step."""
        return self.method == MTP

    def most_drafts(self, num_rows: int) -> int:
        """Drafts that each row of a step may have."""
        for first, last, count in self.num_speculative_tokens_per_batch_size:
            if first <= num_rows <= last:
                return count
        return self.num_speculative_tokens

    def most_tokens(self, most_rows: int) -> int:
        """The most tokens of a step of up to `most_rows` rows, drafts included."""
        return max(num_rows * (1 + self.most_drafts(num_rows)) for num_rows in range(1, most_rows + 1))

    def most_drafts_of_step(self, most_rows: int) -> int:
        """The most drafts of a step of up to `most_rows` rows, for all rows together."""
        return max(num_rows * self.most_drafts(num_rows) for num_rows in range(1, most_rows + 1))

    def rows_for(self, num_tokens: int, most_rows: int) -> int | None:
        """The fewest rows, up to `most_rows`, of a step with drafts and `num_tokens` tokens; None if there is none."""
        return next((num_rows for num_rows in range(1, min(most_rows, num_tokens - 1) + 1)
                     if self.most_drafts(num_rows) and num_rows * (1 + self.most_drafts(num_rows)) >= num_tokens), None)

    def to_json(self) -> dict[str, Any]:
        """The settings as `of` reads them, without fields that are unset."""
        values = {name: getattr(self, name) for name in _FIELDS[self.method]}
        by_size = [list(entry) for entry in values.pop("num_speculative_tokens_per_batch_size")]
        return values | ({"num_speculative_tokens_per_batch_size": by_size} if by_size else {})

    def describe(self) -> str:
        """The settings in one line, for manifests."""
        return json.dumps(self.to_json(), sort_keys=True)


def _method(method: Any) -> str:
    if method in _METHODS:
        return str(method)
    served = f"{', '.join(_METHODS[:-1])} and {_METHODS[-1]} are served"
    if method in _NOT_SERVED:
        raise ConfigError(f"{NAME}.method {method}: there is no draft model here; {served}")
    raise ConfigError(f"{NAME}.method: {shown(method)} is none; {served}")


def _lookup(given: Mapping[str, Any]) -> dict[str, Any]:
    """prompt_lookup_max and _min; one that is not given is the other."""
    longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    either = _DEFAULT_LOOKED_UP if longest is None and shortest is None else None
    longest = _count(given, "prompt_lookup_max", _MOST_LOOKED_UP, either or shortest)
    shortest = _count(given, "prompt_lookup_min", _MOST_LOOKED_UP, longest)
    if shortest > longest:
        raise ConfigError(f"{NAME}.prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}; lower it")
    return {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}


def _suffix(given: Mapping[str, Any]) -> dict[str, Any]:
    depth, cached, factor, prob = _OF_SUFFIX
    return {
        depth: _count(given, depth, _MOST_DEPTH, _DEFAULT_DEPTH),
        cached: _count(given, cached, _MOST_CACHED, _DEFAULT_CACHED, least=0),
        factor: _share(given, factor, _MOST_FACTOR, 1.0),
        prob: _share(given, prob, 1.0, 0.1),
    }


def _by_batch_size(given: Mapping[str, Any], most: int) -> tuple[tuple[int, int, int], ...]:
    name = "num_speculative_tokens_per_batch_size"
    entries = given.get(name)
    if entries is None:
        return ()
    problem = ConfigError(f"{NAME}.{name}: {shown(entries)} is no list like [[1, 8, 4], [9, 64, 0]]: first and last "
                          f"number of rows, and drafts per row, 0 to num_speculative_tokens {most}; sizes rise")
    if not isinstance(entries, (list, tuple)):
        raise problem
    found, before = [], 0
    for entry in entries:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or any(type(value) is not int for value in entry):
            raise problem
        first, last, count = entry
        if not before < first <= last or not 0 <= count <= most:
            raise problem
        found.append((first, last, count))
        before = last
    return tuple(found)


def _share(given: Mapping[str, Any], name: str, most: float, default: float) -> float:
    value = default if given.get(name) is None else given[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ConfigError(f"{NAME}.{name}: {shown(value)} is no number from 0 to {most:g}")
    return float(value)


def _count(given: Mapping[str, Any], name: str, most: int, default: Any, least: int = 1) -> int:
    value = default if given.get(name) is None else given[name]
    if value is None:
        raise ConfigError(f"{NAME}.{name}: say how many, {least} to {most}")
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{NAME}.{name}: {shown(value)} is no whole number from {least} to {most}")
    return value
