"""What was built for rules is kept by bytes, in threads with a stack of a stated size, and forces no text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from npu_runner.assets import SHAPES_VL
from npu_runner.grammars.matchers import Matchers, expected_bytes
from tests.full_set import only_full

MIB = 1 << 20
TOKENIZER = SHAPES_VL / "tokenizer.json"


def grammar(number: int, num_words: int) -> str:
    """Of words that follow each other, which no other number has. It forces nothing."""
    words = " ".join(f'("{number}_{word}"|"a")' for word in range(num_words))
    return f'%llguidance {{"no_forcing": true}}\nstart: {words}'


def made_matchers() -> Iterator[Matchers]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    matchers = Matchers(tokenizer, tokenizer.get_vocab_size(), [0], max_bytes=4 * expected_bytes(grammar(0, 400)))
    yield matchers
    matchers.close()


@pytest.fixture
def several() -> Iterator[Matchers]:
    yield from made_matchers()


def test_what_was_asked_for_longest_ago_is_put_out(several: Matchers) -> None:
    prepared = []
    for number in range(6):
        several.prepare(grammar(0, 400))  # everybody asks for the first
        prepared.append(several.prepare(grammar(number, 400)))
        assert prepared[-1].failure() is None
    assert several.prepare(grammar(0, 400)) is prepared[0]
    assert several.prepare(grammar(5, 400)) is prepared[5]
    assert several.kept_bytes <= 4 * expected_bytes(grammar(0, 400))
    assert several.prepare(grammar(1, 400)) is not prepared[1]


def test_what_somebody_follows_is_not_put_out(several: Matchers) -> None:
    """It takes its memory all the same, and would be built twice. Once nobody does it goes."""
    followed = several.prepare(grammar(0, 400))
    followed.num_users += 1
    for number in range(1, 9):
        assert several.prepare(grammar(number, 400)).failure() is None
    assert several.prepare(grammar(0, 400)) is followed
    followed.num_users -= 1
    for number in range(9, 15):
        assert several.prepare(grammar(number, 400)).failure() is None
    assert several.prepare(grammar(0, 400)) is not followed


def check_growth() -> None:
    """The automaton of an expression grows with every token that is tried: copies share it."""
    several = next(made_matchers())
    wide = several.prepare('start: /(.|\\n)*[a-f].{60}[0-9].*/')
    wide.num_users += 1
    assert wide.failure() is None
    before = wide.num_bytes
    words_1W = np.zeros((1, several.num_words), dtype=np.int32)
    for seed in range(4):
        copy, generator = wide.copy(), np.random.default_rng(seed)
        for _ in range(150):
            with several.counting([wide]):
                several.fill([(copy, 0)], words_1W)
                allowed = np.unpackbits(words_1W.view(np.uint8)[0], bitorder="little").nonzero()[0]
                copy.consume_token(int(generator.choice(allowed)))
    assert wide.num_bytes > before + 4 * MIB
    assert several.kept_bytes == wide.num_bytes
    wide.num_users -= 1
    small = several.prepare(grammar(0, 3))
    assert several.kept_bytes == small.num_bytes, "alone it is more than may be kept"


def run_alone(code: str) -> str:
    """What a fresh process prints. One that has freed memory before may grow without taking more of the system."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root,
                          env={**os.environ, "PYTHONPATH": str(root)}, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_what_copies_make_it_grow_by_is_counted() -> None:
    """2 s."""
    run_alone("from tests.core.test_matchers_kept import check_growth; check_growth()")


_KEEPING = """
import resource, sys
from tests.core.test_matchers_kept import MIB, TOKENIZER, Matchers, Tokenizer, grammar
from npu_runner.grammars.matchers import _resident_bytes
tokenizer = Tokenizer.from_file(str(TOKENIZER))
matchers = Matchers(tokenizer, tokenizer.get_vocab_size(), [0], max_bytes=8 * MIB)
matchers.prepare(grammar(0, 10)).failure()
before = _resident_bytes()
for number in range(40):
    assert matchers.prepare(grammar(number, 1000)).failure() is None
print(_resident_bytes() - before)
"""


@pytest.mark.full("forty grammars in a process of its own; that copies are counted stays, and who is dropped")
def test_resident_memory_stays_within_the_limit() -> None:
    """Forty grammars of some 1.8 MiB each, of which 8 MiB may be kept: 3 s. What is freed is not all given back."""
    assert int(run_alone(_KEEPING)) < 40 * MIB


_DEEP = """
from tests.core.test_matchers_kept import TOKENIZER, Matchers, Tokenizer
tokenizer = Tokenizer.from_file(str(TOKENIZER))
matchers = Matchers(tokenizer, tokenizer.get_vocab_size(), [0])
chain = "".join(f"r{number}: r{number + 1}\\n" for number in range(2400))
print(matchers.prepare("start: r0\\n" + chain + 'r2400: "a"').failure())
"""


@pytest.mark.parametrize("limit", ["unlimited", *only_full("a stack of the usual size", "8192")])
def test_a_deep_grammar_is_built_whatever_stack_the_process_was_given(limit: str) -> None:
    """The builder recurses. Threads have 2 MiB where the process's stack has no end, which is not enough: 2 s."""
    root = Path(__file__).parents[2]
    command = f'ulimit -S -s {limit} && exec "$0" -c "$1"'
    done = subprocess.run(["bash", "-c", command, sys.executable, _DEEP], capture_output=True, text=True, cwd=root,
                          env={**os.environ, "PYTHONPATH": str(root)}, timeout=300)  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr[-2000:]


def test_no_text_is_made_for_a_mask_where_nothing_is_forced(several: Matchers) -> None:
    """What a rule forces is found token by token: a mask costs the same however long that is."""
    text = "x" * 20_000
    free = several.prepare(f'%llguidance {{"no_forcing": true}}\nstart: "{text}"').copy()
    assert len(several.prepare(f'start: "{text}"').copy().compute_ff_tokens()) > 1000, "the library's own way"
    assert free.compute_ff_tokens() == []
    words_1W = np.zeros((1, several.num_words), dtype=np.int32)
    for _ in range(20):
        several.fill([(free, 0)], words_1W)
        (*_, last) = np.unpackbits(words_1W.view(np.uint8)[0], bitorder="little").nonzero()[0]
        assert free.consume_token(int(last))
        assert free.compute_ff_tokens() == []
