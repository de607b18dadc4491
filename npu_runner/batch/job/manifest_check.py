"""What made an output, held against what would go on with it: model, settings, length. Knows nothing of serving."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.input_file import InputIdentity
from npu_runner.batch.files.manifest import DECODERS, Manifest, differences, start_time
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, OutOfMemoryError
from npu_runner.serving.replica import ReplicaFacts

_LENGTH = "max_model_len"


def refuse_another_model(destination: Destination, model_files: Mapping[str, str]) -> None:
    """Before anything is loaded: by what can be read at once."""
    earlier = destination.earlier
    if earlier is not None and earlier.has_served:
        _refuse(destination, "model", differences(earlier.model_files, dict(model_files)))


def config_to_go_on_with(config: RunnerConfig, earlier: Manifest | None) -> RunnerConfig:
    """`config` with the length of the output's earlier runs, where the user asked for none.

    It was cut to the memory of that moment then. A shorter or longer one now would answer long rows otherwise.
    """
    if config.max_model_len is not None or earlier is None or _LENGTH not in earlier.settings:
        return config
    return config.replace(max_model_len=int(earlier.settings[_LENGTH]))


@contextmanager
def loading(given: RunnerConfig, taken: RunnerConfig, destination: Destination) -> Iterator[None]:
    """What a want of memory means for this output. `taken`: what became of the `given` settings above."""
    try:
        yield
    except OutOfMemoryError as error:
        if taken.max_model_len == given.max_model_len:
            raise
        raise OutOfMemoryError(
            f"output {destination.name} was begun with {_LENGTH} {taken.max_model_len} and goes on with no other: free "
            f"memory, or --overwrite to start afresh with what fits now. {error}"
        ) from error


def manifest_of(
    destination: Destination, facts: ReplicaFacts, *, model_name: str, model_files: dict[str, str],
    weights: dict[str, str], input: InputIdentity,
) -> Manifest:  # fmt: skip
    """The manifest of this output: the earlier one, if nothing that shapes answers has changed since."""
    settings = dict(facts.settings)
    if facts.weights is not None and (changes := differences({**model_files, **weights}, dict(facts.weights))):
        raise ConfigError(f"the replicas have loaded another model than this host sees: {'; '.join(changes)}")
    earlier = destination.earlier
    if earlier is None or not earlier.has_served:
        return Manifest(
            created=start_time(),
            model_name=model_name,
            model_files=model_files,
            weights=weights,
            settings=json.loads(json.dumps(settings)),
            input=input,
        )
    if earlier.weights:
        _refuse(destination, "model", differences(earlier.weights, weights))
    going_on = _with_decoders(earlier.settings, settings)
    _refuse(destination, "settings", differences(going_on, _with_decoders(settings, earlier.settings)))
    return replace(earlier, settings=going_on, input=input)


def _with_decoders(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """`settings`, and decoders that only `others` have: one that was installed since, or is gone. Without it whatever
    needs it fails by name, so no answer is of another one."""
    decoders = {**others.get(DECODERS, {}), **settings.get(DECODERS, {})}
    return {**settings, DECODERS: decoders} if decoders else settings


def manifest_without_model(
    destination: Destination, *, model_name: str, model_files: dict[str, str], input: InputIdentity
) -> Manifest:
    """For an input without a row to answer: no model is loaded."""
    earlier = destination.earlier
    if earlier is not None and earlier.has_served:
        return earlier.with_input(input)
    return Manifest(created=start_time(), model_name=model_name, model_files=model_files, settings={}, input=input)


def _refuse(destination: Destination, what: str, changes: list[str]) -> None:
    if changes:
        raise ConfigError(
            f"output {destination.name}: was begun with another {what}; answers of two would be mixed. Changed: "
            f"{'; '.join(changes)}. Choose another output, or --overwrite to start afresh"
        )
