"""What schemas cost a decode step: sequences with a schema each, all different, against the same ones without.

A part of bench.device. The model has random weights and a made-up byte-level vocabulary of the shape's size.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.common import in_turn, median_ratio
from bench.ours import WARM_UP_STEPS, Settings, finish, start_decoding, timed_steps
from bench.shapes import TEXT, make_text_model
from bench.work import Sizes
from npu_runner import LLM, SamplingParams

_MARGIN = 40


def measure_structured(sizes: Sizes, settings: Settings, repeats: int) -> dict[str, Any]:
    """(h): the median step of the largest batch, in which every sequence decodes, by turns with and without schemas."""
    batch_size = max(sizes.decode_batches)
    with tempfile.TemporaryDirectory() as name:
        path = make_text_model(Path(name), sizes.decode_model)
        write_vocabulary(path, TEXT[sizes.decode_model])
        with LLM(path, load_format="dummy", max_model_len=sizes.context + 2 * sizes.decode_steps + 2 * _MARGIN,
                 max_num_seqs=batch_size, **settings) as llm:
            started = time.perf_counter()
            _steps(llm, replace(sizes, decode_steps=2), batch_size, "first", has_schema=True)
            first_seconds = time.perf_counter() - started
            milliseconds = in_turn({
                "without": lambda repeat: _steps(llm, sizes, batch_size, f"without-{repeat}", has_schema=False),
                "with": lambda repeat: _steps(llm, sizes, batch_size, f"with-{repeat}", has_schema=True)}, repeats)
    return {"batch_size": batch_size, "milliseconds": milliseconds, "first_batch_seconds": first_seconds,
            "ratio": median_ratio(milliseconds["with"], milliseconds["without"])}


def _steps(llm: LLM, sizes: Sizes, batch_size: int, name: str, *, has_schema: bool) -> float:
    """The median milliseconds of a step."""
    params = [llm.engine.processor.resolve_params(SamplingParams(
        temperature=0.6, seed=index, ignore_eos=not has_schema,
        max_tokens=WARM_UP_STEPS + sizes.decode_steps + _MARGIN,
        structured_outputs={"json": _schema(index)} if has_schema else None)) for index in range(batch_size)]
    start_decoding(llm, batch_size, sizes, name, params)
    steps = timed_steps(llm, sizes.decode_steps)
    assert llm.stats().num_running == batch_size, "every sequence decodes in every measured step"
    finish(llm)
    return 1e3 * statistics.median(steps)


def _schema(index: int) -> dict[str, Any]:
    """A table whose columns no other row has, longer than any answer."""
    columns = {f"{word}_{index}": kind for word, kind in (
        ("name", {"type": "string"}), ("kind", {"enum": [f"{letter}{index}" for letter in "abcdef"]}),
        ("amount", {"type": "number"}), ("is_new", {"type": "boolean"}))}
    row = {"type": "object", "properties": columns, "required": list(columns), "additionalProperties": False}
    return {"type": "array", "items": row, "minItems": 1000}


def write_vocabulary(folder: Path, config: dict[str, Any], *, spells_once: bool = False,
                     special: dict[int, str] | None = None) -> None:
    """Writes a tokenizer of all the config's tokens: all bytes, then pairs of bytes, then pairs with one byte more.

    `special`: its special tokens by id; None: those that the config names. With `spells_once` such pairs hold only
    bytes outside ASCII, so a text in ASCII has one spelling.
    """
    special = special or {config["bos_token_id"]: "<|endoftext|>", config["eos_token_id"]: "<|im_end|>"}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined = [letter for letter in letters if not (spells_once and letter.isascii())]
    pairs = [(first, second) for first in joined for second in joined]
    merges = [*pairs, *((first + second, third) for third in joined for first, second in pairs)]
    merges = merges[: config["vocab_size"] - len(letters) - len(special)]
    tokens = iter([*letters, *(first + second for first, second in merges)])
    vocabulary = {special[index] if index in special else next(tokens): index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
