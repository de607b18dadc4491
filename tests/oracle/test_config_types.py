"""Config files of quantised weights and adapters that hold other types than they should, and patterns that would never
end: an error that names the field, or the same numbers as ever.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.checkpoint.patterns import matches
from npu_runner.errors import ModelError, NpuRunnerError
from scripts.quantised.formats import awq, compressed_int, fp8_block, gptq, modelslim_int8
from tests.full_set import examples, some_of
from tests.oracle.quantised_folders import of_module, read_all, weights, write_folder

NUMBERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (lambda weight: gptq(weight, 4, 32), {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq",
        "is_marlin_format": False, "dynamic": {"-:.*lm_head": {}}}),
    "awq": (lambda weight: awq(weight, 32), {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "fp8": (lambda weight: fp8_block(weight, (32, 32)), {
        "quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}),
    "compressed-tensors": (lambda weight: compressed_int(weight, 4, 32, packed=True), {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"], "sparsity_config": {"format": "dense"}, "transform_config": {},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": NUMBERS, "input_activations": None}}})}
LIES = [0, -1, -5, 3, 10**18, "x", "4", "9x-", 4.0, 4.5, None, True, False, [], {}, [1], ["x", 2], [0, 0], [True, 32],
        [32, 32, 32], {"a": 1}, {"a": {"bits": "x"}}, {"re:(": {}}, "re:(", ["re:("], ["Linear", 5], math.nan, 1e300,
        ["re:((.?){999}){999}x"], {"((.?){999}){999}x": {}}, "9" * 5000 + "x1"]


def places(config: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from places(value, (*before, name))


def put(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(config))
    inner = copied
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return copied


def outcome(path: Path) -> dict[str, Tensor] | str:
    try:
        return {name: tensor.nan_to_num() for name, tensor in read_all(path).items()}
    except NpuRunnerError as error:
        return str(error)


@pytest.mark.parametrize("method", CONFIGS)
def test_a_field_of_another_type_is_an_error_by_name_or_changes_nothing(method: str, tmp_path: Path) -> None:
    """All 900 of them take 20 s."""
    make, config = CONFIGS[method]
    path = write_folder(tmp_path, of_module(make(weights(64, 128))), config=config)
    right = outcome(path)
    assert isinstance(right, dict), right
    lies = [(place, value) for place in places(config) if place != ("quant_method",) for value in LIES]
    for place, value in some_of(lies, 40):
        (path / "config.json").write_text(json.dumps({"quantization_config": put(config, place, value)}))
        found = outcome(path)
        if isinstance(found, dict):
            assert found.keys() == right.keys(), (place, value)
            assert all(torch.equal(found[name], right[name]) for name in right), (place, value)


def test_a_lie_of_a_modelslim_folder_is_named(tmp_path: Path) -> None:
    parts, description = modelslim_int8(weights(64, 128)), {"group_size": "x"}
    path = write_folder(tmp_path, of_module(parts), description=description)
    with pytest.raises(ModelError, match=r"group_size 'x': Input should be a valid integer"):
        read_all(path)


def expression(rng: random.Random, depth: int) -> str:
    """A regular expression as configs may have them, and stranger ones."""
    kind = rng.randrange(13 if depth else 5)
    if kind < 3:
        return rng.choice("ab.q_1")
    if kind < 5:
        return rng.choice([r"\d", r"\w", r"\s", r"\D", r"\W", "[ab]", "[^a]", "[a-c1]", r"[^\d_]", r"[\w.]", r"\.",
                           r"\b", "^", "$", r"\Z", ""])
    one, two = expression(rng, depth - 1), expression(rng, depth - 1)
    if kind < 8:
        return one + two
    if kind < 10:
        return f"({one})" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "*?", "+?", "{2,}"])
    return rng.choice([f"(?:{one}|{two})", f"(?={one})", f"(?!{one})", f"{one}.*{two}", "(?<=a)", "(?<![ab]1)"])


def test_patterns_match_what_python_matches() -> None:
    rng = random.Random(7)
    for _ in range(examples(8000)):
        pattern = expression(rng, 4)
        for _ in range(3):
            name = "".join(rng.choice("ab.q_1 c\n") for _ in range(1 + rng.randrange(8)))
            for wrapped in (pattern, rf"(.*\.)?({pattern})$"):
                assert matches(wrapped, name, "here") == (re.match(wrapped, name) is not None), (wrapped, name)


@pytest.mark.parametrize("pattern", [r"([a-z._0-9]+)*X", r"((\w*)*)*X", r"(\w|\w\w)+$X", r"(.*.*.*.*.*)+X"])
def test_a_pattern_that_keeps_python_busy_for_years_ends(pattern: str) -> None:
    assert not matches(pattern, "model.layers.0.self_attn.q_proj", "here")


@pytest.mark.parametrize(("pattern", "reason"), [
    ("(", "missing"), ("((.?){999}){999}x", "it takes more than 20000 steps"), ("((?:){9999}){9999}", "20000 steps"),
    (r"(a*)(b)*\1{2,}", "groupref"), ("(?i)(a*)*(b*)*", "flags"), ("(" * 3000 + ")" * 3000 + "*", "depth"),
    ("(a*)*a{99999999999}", "repetition number")])
def test_a_pattern_that_is_not_matched_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"here has the pattern .*{reason}"):
        matches(pattern, "a" * 40, "here")


def test_usual_patterns_take_few_steps() -> None:
    """Names of 300 characters, which the bounded engine matches."""
    name = "model.layers.0." + "experts.7." * 28 + "down_proj"
    for pattern in (r".*\.experts\..*", r"^(?!.*lm_head).*(down|up)_proj$", r"(model\.)?layers\.\d+\..*down_proj"):
        assert matches(pattern, name, "here") == (re.match(pattern, name) is not None)
