"""Compares model, settings and input of an output with those of the run that continues it. Knows nothing of serving."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.input_identity import RowChange, first_change
from npu_runner.batch.files.manifest import (
    DECODERS,
    RENDERER,
    Manifest,
    SettingChange,
    StateFile,
    differences,
)
from npu_runner.batch.files.row_book import InputScan
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, OutOfMemoryError
from npu_runner.serving.replica import ReplicaFacts

_LENGTH = "max_model_len"
# First choices of kernels, which 0.6.0 recorded on CANN 8.5. Now `fallbacks` has others, and these are not recorded.
_FIRST_KERNELS = {"cache_write": "npu_scatter_pa_kv_cache", "tower_attention": "npu_fused_infer_attention_score"}
CheckSettings = Callable[[Mapping[str, Any]], None]


def refuse_another_model(destination: Destination, model_files: Mapping[str, str]) -> None:
    """Before anything is loaded: by what can be read at once."""
    earlier = destination.earlier
    if earlier is not None and earlier.has_served:
        _refuse_model(destination, _changed_files(earlier.model_files, model_files))


def _changed_files(earlier: Mapping[str, str], now: Mapping[str, str]) -> list[SettingChange]:
    """Earlier versions named every safetensors file of the folder, also those that no loader opens."""
    opened = {name: line for name, line in earlier.items() if name in now or not name.endswith(".safetensors")}
    return differences(opened, now)


def refuse_another_input(destination: Destination, file: InputFile, rows: InputScan, *, retry: Flaw) -> None:
    """Rows may be added at the end. With `retry` one that is to be served may be another one of the same name."""
    earlier = destination.earlier
    if earlier is None or rows.continues_earlier:
        return
    known, now = earlier.input.rows, rows.identity.rows
    assert now is not None, "a scan has records of its rows"
    if known is None:
        what = ("rows may be added at its end, not changed: the version that began the output kept no digests of rows, "
                "so changed rows cannot be found")
    else:
        may_change = ~destination.finished(rows) & bool(retry)
        change = first_change(known, now, may_change, rows.lines, may_be_named=Flaw.ERRORS in retry)
        if change is None:
            return
        what = _changed_row(destination, file, rows, change)
    raise ConfigError(f"input {file.name}: it is not the input that {destination.name} was begun with: {what}. Restore "
                      "it, choose another output, or --overwrite to start afresh")


def _changed_row(destination: Destination, file: InputFile, rows: InputScan, change: RowChange) -> str:
    here = change.place_now
    custom_id = destination.custom_id(change.name)
    if here is not None:
        (row,) = rows.run(np.array([0]), np.array([here])).rows()
        custom_id = file.source.name(row)
    name = f"row {change.place + 1}" + ("" if custom_id is None else f" (custom_id {custom_id!r})")
    if here is None:
        return f"{name} is not there any more, and no row may be removed"
    if here != change.place:
        return f"{name} is row {here + 1} now (line {rows.lines[here]}); rows keep their order, new ones go to the end"
    name = f"{name}, line {rows.lines[here]},"
    flaws = destination.flaws_of(rows.keys[here])
    if flaws is None or Flaw.ERRORS in flaws:
        return f"{name} was changed; it has no answer, so with --retry-errors it may be"
    if flaws:
        return f"{name} was changed, and its answer is not whole; with --retry {','.join(flaws.names)} it may be"
    return f"{name} was changed and has an answer; ask it under a new custom_id at the end"


def renderer_of(manifest: Manifest | None) -> dict[str, str]:
    """The renderer of the output's pages of PDFs (PageFacts.renderer); {}: it has answers to none."""
    decoders = {} if manifest is None else manifest.settings.get(DECODERS, {})
    return {name: decoders[name] for name in RENDERER if name in decoders}


def check_renderer(state: StateFile, name: str, renderer: Mapping[str, str]) -> None:
    """Record the renderer of the output's first answer to a page of a PDF, before this is written. Raises ConfigError
    for another one. `name`: the replica's that has answered."""
    manifest = state.manifest
    recorded = renderer_of(manifest)
    if manifest is None or recorded == renderer:
        return
    if recorded:
        raise ConfigError(
            f"{name}: renders pages of PDFs with other fonts or another PDFium than those that were answered before: "
            f"{_listed(differences(recorded, renderer))}. Install the same on every host, or go on knowingly with "
            f"--accept-changed {DECODERS}")
    state.update(settings=_with_decoders(manifest.settings, renderer))


def _with_decoders(settings: Mapping[str, Any], found: Mapping[str, str]) -> dict[str, Any]:
    decoders = {**settings.get(DECODERS, {}), **found}
    return {**settings, **({DECODERS: decoders} if decoders else {})}


def refuse_other_settings(destination: Destination, known: Mapping[str, Any], *, accept: Collection[str],
                          is_retry: bool, renderer: Mapping[str, str]) -> None:
    """Before the weights are loaded. `known`: settings that are known by then, all that have a dot in their names.
    `renderer`: this host's, if the output has a record of one."""
    earlier = destination.earlier
    if earlier is not None and earlier.has_served:
        known = _with_decoders(known, renderer)
        before = {name: value for name, value in earlier.settings.items() if "." in name or name in known}
        accepted_changes(destination.name, before, known, accept=accept, is_retry=is_retry)


def config_to_go_on_with(config: RunnerConfig, earlier: Manifest | None) -> RunnerConfig:
    """`config` with the length of the output's earlier runs, where the user asked for none.

    It was cut to the memory of that moment then. A shorter or longer one now would answer long rows otherwise.
    """
    if config.max_model_len is not None or earlier is None or _LENGTH not in earlier.settings:
        return config
    return config.replace(max_model_len=int(earlier.settings[_LENGTH]))


@contextmanager
def explain_memory(given: RunnerConfig, continued: RunnerConfig, destination: Destination) -> Iterator[None]:
    """Tell a user who runs out of memory about this output's length. `continued`: the `given` settings after
    `config_to_go_on_with`."""
    try:
        yield
    except OutOfMemoryError as error:
        if continued.max_model_len == given.max_model_len:
            raise
        raise OutOfMemoryError(
            f"output {destination.name} was begun with {_LENGTH} {continued.max_model_len} and goes on with no other: "
            f"free memory, --overwrite to start afresh with what fits now, or go on knowingly with a shorter one and "
            f"--accept-changed {_LENGTH}. {error}") from error


def manifest_of(destination: Destination, new: Manifest, facts: ReplicaFacts, *, accept: Collection[str] = (),
                is_retry: bool = False, renderer: Mapping[str, str] = MappingProxyType({})) -> Manifest:
    """The manifest of this output: the earlier one with `accepted_changes`, or `new`, with the settings of `facts`.
    `renderer`: as of `refuse_other_settings`."""
    settings = json.loads(json.dumps(dict(facts.settings)))
    if facts.weights is not None and (changes := differences({**new.model_files, **new.weights}, dict(facts.weights))):
        raise ConfigError(f"the replicas have loaded another model than this host sees: {_listed(changes)}")
    earlier = destination.earlier
    if earlier is None or not earlier.has_served:
        return replace(new, settings=settings)
    if earlier.weights:
        _refuse_model(destination, _changed_files(earlier.weights, new.weights))
    settings = _with_decoders(settings, renderer)
    changes = accepted_changes(destination.name, earlier.settings, settings, accept=accept, is_retry=is_retry)
    # A message may name the decoders before a page is answered, and so before any is recorded.
    _refuse_unknown_names(accept, {DECODERS, *earlier.settings, *settings,
                                   *(change["name"] for change in earlier.changes)})
    completed = _completed(settings, earlier.settings)
    if DECODERS in accept and not renderer:  # it is not known here: that of the next page is recorded
        completed[DECODERS] = {name: value for name, value in completed.get(DECODERS, {}).items()
                               if name not in RENDERER}
    return earlier.with_input(new.input).changed(completed, changes)


def accepted_changes(output: str, earlier: Mapping[str, Any], now: Mapping[str, Any], *, accept: Collection[str],
                     is_retry: bool) -> list[SettingChange]:
    """The settings that differ, where they may. Raises ConfigError for one that may not.

    The two may be parts of the settings, as long as they have the same names. `accept`: names that the user has given.
    """
    changes = differences(_completed(earlier, now), _completed(now, earlier))
    refused = [change for change in changes
               if change.name not in accept and not (is_retry and change.leaves_whole_answers)]
    if refused:
        limits = " and ".join(change.name for change in refused if change.leaves_whole_answers)
        also = f". With --retry {limits} may differ: it changes no whole answer" if limits else ""
        flags = " ".join(f"--accept-changed {change.name}" for change in refused)
        raise ConfigError(
            f"output {output}: was begun with other settings; answers of both would be mixed. Changed: "
            f"{_listed(refused)}. Restore them, choose another output, --overwrite to start afresh, or go on knowingly "
            f"with {flags}{also}")
    return changes


def _refuse_unknown_names(accept: Collection[str], known: Collection[str]) -> None:
    for name in accept:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or sorted(known)
            raise ConfigError(f"accept_changed: {name!r} is no setting of this output (a file of the model never is); "
                              f"did you mean {', '.join(near)}?")


def _completed(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, and two kinds that only `others` have: decoders that were installed since, or are gone, without which
    whatever needs them fails by name; and kernels that only an earlier version recorded."""
    kernels = {name: kernel for name, kernel in _FIRST_KERNELS.items()
               if others.get(name) == kernel and "fallbacks" not in settings}
    return {**kernels, **_with_decoders(settings, {**others.get(DECODERS, {}), **settings.get(DECODERS, {})})}


def manifest_without_model(destination: Destination, new: Manifest) -> Manifest:
    """The same where no model is loaded."""
    earlier = destination.earlier
    return earlier.with_input(new.input) if earlier is not None and earlier.has_served else new


def _refuse_model(destination: Destination, changes: list[SettingChange]) -> None:
    if changes:
        raise ConfigError(
            f"output {destination.name}: was begun with another model; answers of two would be mixed. Changed: "
            f"{_listed(changes)}. Choose another output, or --overwrite to start afresh")


def _listed(changes: list[SettingChange]) -> str:
    return "; ".join(map(str, changes))
