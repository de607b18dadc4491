"""Random rules, one after the other, in one process: each is refused by name or enforced.

`python -m tests.oracle.rule_fuzz --count 5000 --seed 1` prints a line of JSON: how many were what, the longest
processor time and the most memory of one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from npu_runner.errors import RequestError
from npu_runner.grammars.compile import with_grammar
from npu_runner.grammars.stack import GRAMMAR_STACK_BYTES, call_with_stack, parser_limits
from npu_runner.request.structured_outputs import StructuredOutputsParams
from tests.oracle.random_rules import random_rule

_MOST_TOKENS = 80
_STRUCTURAL = frozenset(b'0123456789"{}[],:')
_CODES = {"invalid_structured_outputs", "limit_exceeded", "nested_too_deep", "invalid_value", "structured_outputs"}


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def follow(grammar: str, tokens: Any, rng: random.Random) -> tuple[str, str]:
    """What became of it, and what was said."""
    from llguidance import LLMatcher

    matcher = call_with_stack(GRAMMAR_STACK_BYTES, LLMatcher, tokens, grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), f"checked, and not to be built: {matcher.get_error()[:200]}"
    said = bytearray()
    for _ in range(_MOST_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if matcher.is_error() or not allowed:
            return "failed later", matcher.get_error()[:200]
        if tokens.eos_token in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return "finished", said.decode("utf-8", "replace")
        allowed = [token for token in allowed if token != tokens.eos_token]
        structural = [token for token in allowed if token in _STRUCTURAL]
        token = rng.choice(structural if structural and rng.random() < 0.7 else allowed)
        assert token < 256, f"token {token} stands for no character"
        matcher.consume_token(token)
        said.append(token)
    return "not finished", ""


def check_fit(schema: Any, text: str) -> None:
    """Numbers as they are written: what is a multiple in decimal is none in binary."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = jsonschema.Draft202012Validator
    try:
        kind(exact, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text, parse_float=Decimal))
    except (RecursionError, re.error):
        pass  # jsonschema's own: where references are many, and for expressions that Python lacks
    except (ValueError, jsonschema.ValidationError) as error:
        raise AssertionError(f"{text[:200]!r} does not fit: {str(error)[:200]}") from error


def run(count: int, seed: int) -> dict[str, Any]:
    from llguidance import LLTokenizer

    rng, tokens = random.Random(seed), LLTokenizer("byte")
    found: Counter[str] = Counter()
    wrong: list[str] = []
    most = {"seconds": (0.0, ""), "mib": (0.0, "")}
    for number in range(count):
        rule = random_rule(rng)
        name = f"{number} {str(rule)[:150]}"
        memory, began = resident_mib(), time.process_time()
        try:
            params = with_grammar(StructuredOutputsParams.from_value(rule))
            what, text = follow(params.compiled, tokens, rng)
            if what == "finished" and "json" in rule:
                check_fit(rule["json"], text)
            elif what == "finished" and "choice" in rule:
                assert text in rule["choice"], text
        except RequestError as error:
            what = "refused"
            if error.code not in _CODES or not error.message:
                wrong.append(f"{name}: {error.code}")
        except AssertionError as error:
            what = "wrong"
            wrong.append(f"{name}: {error}")
        found[what] += 1
        most["seconds"] = max(most["seconds"], (round(time.process_time() - began, 2), name))
        most["mib"] = max(most["mib"], (round(resident_mib() - memory, 1), name))
    return {"count": count, "seed": seed, **found, "wrong": wrong, "most": most}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    import llguidance

    print(json.dumps({"llguidance": llguidance.get_version()[:60] if hasattr(llguidance, "get_version") else "",
                      **run(given.count, given.seed)}))  # fmt: skip


if __name__ == "__main__":
    main()
