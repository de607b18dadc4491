"""Incremental text against the tokenizer's own decode of everything, stop strings against str.find."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from npu_runner.engine.detokenizer import IncrementalDetokenizer, token_text
from tests.full_set import examples

TEXTS = [
    "Hello, world! Two  spaces,\n\ta tab, and a trailing one ",
    "日本語とemoji 👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈 mixed; combining: e\u0301 n\u0303 Z\u0351\u036b, flags 🇩🇪🇯🇵",
    "한국어, עברית, ελληνικά, Việt Nam, မြန်မာ",
    " leading space and 🦜🦜🦜 parrots; zero\u200bwidth \u202eoverride",
    "\ufffd a genuine replacement character \ufffd\ufffd, twice \ufffd",
    "naïve café — “quotes” … 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
]


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXTS * 2, trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.add_tokens([AddedToken("<not special>", special=False)])
    return tokenizer


@functools.cache
def sentencepiece_like(num_stripped: int = 1) -> Tokenizer:
    """What Llama 2 ships: metaspace, byte fallback, one leading space stripped."""
    words = ["▁", "▁Hello", ",", "▁world", "a", "e", "▁the", "END", "▁E", "N", "D", "日", "本", "\ufffd", "▁▁", "\n"]
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", num_stripped, 0)])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS * 2, trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False))
    return tokenizer


TOKENIZERS = pytest.mark.parametrize("make", [byte_level, sentencepiece_like, metaspace])


def random_ids(tokenizer: Tokenizer, length: int, rng: random.Random) -> list[int]:
    """Any tokens in any order, which real text never shows: broken characters, special tokens, ids without a token."""
    size = tokenizer.get_vocab_size()
    return [rng.randrange(rng.choice([0, size - 16]), size + 3) for _ in range(length)]


def read_one_by_one(tokenizer: Tokenizer, ids: list[int], **settings: object) -> str:
    """Feed token by token; what is given out may only grow, and never ends in half a character."""
    detokenizer = IncrementalDetokenizer(tokenizer, **settings)
    shown = ""
    for token_id in ids:
        assert detokenizer.append([token_id]) is None
        text = detokenizer.text
        assert text.startswith(shown)
        shown = text
    final = detokenizer.finish()
    assert final.startswith(shown)
    assert detokenizer.text == final
    return final


@TOKENIZERS
@pytest.mark.parametrize("text", TEXTS)
def test_text_equals_decoding_everything(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert read_one_by_one(tokenizer, ids) == tokenizer.decode(ids)
    assert read_one_by_one(tokenizer, ids, stop=["never there"]) == tokenizer.decode(ids)


@TOKENIZERS
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_arbitrary_tokens_decode_alike_piece_by_piece(make, skip_special_tokens):
    tokenizer, rng = make(), random.Random(1)
    for length in [1, 2, 3, 5, 8, 20, 60] * 12:
        ids = random_ids(tokenizer, length, rng)
        expected = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert read_one_by_one(tokenizer, ids, skip_special_tokens=skip_special_tokens) == expected
        assert read_one_by_one(tokenizer, ids, skip_special_tokens=skip_special_tokens, stop=["\0never"]) == expected


@functools.cache
def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Token id of each byte, as the vocabulary spells it."""
    spellings = pre_tokenizers.ByteLevel.alphabet() if tokenizer is byte_level() else None
    if spellings is None:
        return {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    printable = [byte for byte in range(256) if chr(byte) in spellings]
    others = sorted(char for char in spellings if ord(char) > 255)
    unprintable = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | dict(zip(unprintable, others, strict=True))
    return {byte: tokenizer.token_to_id(char) for byte, char in characters.items()}


def ids_of_bytes(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    alphabet = byte_tokens(tokenizer)
    return [alphabet[byte] for byte in raw]


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_bytes_one_by_one_show_whole_characters_only(make):
    tokenizer = make()
    detokenizer = IncrementalDetokenizer(tokenizer)
    for char in "é日🦜":
        ids = ids_of_bytes(tokenizer, char.encode())
        for token_id in ids[:-1]:
            detokenizer.append([token_id])
            assert "\ufffd" not in detokenizer.text
        detokenizer.append(ids[-1:])
    assert detokenizer.finish() == "é日🦜"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_random_bytes_match_the_decoder(make):
    """Truncated, overlong, stray and surrogate bytes: the number of U+FFFD is the decoder's."""
    tokenizer, rng = make(), random.Random(2)
    pool = [b"\xf0\x9f", b"\xa6\x9c", b"\xe6", b"\x97", b"\xa5", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"a", b"\xc3"]
    for _ in range(150):
        ids = ids_of_bytes(tokenizer, b"".join(rng.choices(pool, k=rng.randrange(1, 12))))
        assert read_one_by_one(tokenizer, ids) == tokenizer.decode(ids)


@TOKENIZERS
@pytest.mark.parametrize("token", ["ÿ", "\ufffd", "</s>", "<0xFF>", "<0x41>", "a"])
def test_work_per_token_is_bounded(make, token):
    """Tokens decoded in all grow with the text, not with its square: bytes that never form a character included."""
    tokenizer = make()
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        token_id = tokenizer.get_vocab_size() - 1
    decoded = 0

    class Counting:
        """The tokenizer, with a count of what it is asked to decode."""

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, skip_special_tokens=True):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = IncrementalDetokenizer(Counting(), stop=["\0never"], skip_special_tokens=False)
    for _ in range(2000):
        detokenizer.append([token_id])
    detokenizer.finish()
    assert decoded < 2000 * 60


# -- stop strings --------------------------------------------------------------------------------------------------


def first_completed(text: str, stops: list[str]) -> tuple[str, str] | None:
    """By the definition: grow the text letter by letter until one of the stops is its end."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: text.find(stop)], stop
    return None


@TOKENIZERS
def test_stop_string_found_across_token_boundaries(make):
    tokenizer, rng = make(), random.Random(3)
    found = 0
    for _ in range(150):
        ids = random_ids(tokenizer, 40, rng)
        text = tokenizer.decode(ids)
        starts = [rng.randrange(len(text) - 8) for _ in range(3)]
        stops = [text[at : at + rng.randrange(1, 8)] for at in starts]
        stops = [stop for stop in stops if "\ufffd" not in stop]
        if not stops:
            continue
        detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
        reason = None
        used: list[int] = []
        while reason is None and len(used) < len(ids):
            assert not any(stop in detokenizer.text for stop in stops)
            used.append(ids[len(used)])
            reason = detokenizer.append(used[-1:])
        if make is not sentencepiece_like:  # there a stop may be complete that later bytes would have undone
            expected = first_completed(text, stops)
            assert expected is not None
            assert (detokenizer.finish(), reason) == expected
        assert reason is not None
        seen = tokenizer.decode(used)
        assert detokenizer.finish() == seen[: seen.find(reason)]
        assert detokenizer.finish() == detokenizer.text
        found += 1
    assert found > 80


@pytest.mark.parametrize("num_stripped", [0, 1, 3])
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_stop_in_fallback_bytes_is_where_the_decoder_puts_it(num_stripped, data):
    """After each token, against decoding all of them: spaces dropped at the start, U+FFFD spelled and made of bytes."""
    tokenizer = sentencepiece_like(num_stripped)
    tokens = ["<0x20>", "<0x41>", "<0xC3>", "<0xA9>", "<0xFF>", "<s>", "▁", "▁▁", "a", "END", "▁E", "日", "\ufffd"]
    ids = [tokenizer.token_to_id(token) for token in data.draw(st.lists(st.sampled_from(tokens), max_size=9))]
    stops = data.draw(st.lists(st.text(" AéaEND日", min_size=1, max_size=3), min_size=1, max_size=3))
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
    for end in range(1, len(ids) + 1):
        reason = detokenizer.append(ids[end - 1 : end])
        expected = first_completed(tokenizer.decode(ids[:end]), stops)
        assert reason == (expected and expected[1])
        if expected is not None:
            assert detokenizer.finish() == expected[0]
            return


def test_stop_is_reported_with_the_token_that_completes_it():
    tokenizer = byte_level()
    ids = ids_of_bytes(tokenizer, "日本END!".encode())
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["本EN", "Z"])
    reasons = [detokenizer.append([token_id]) for token_id in ids[:8]]
    assert reasons == [None] * 7 + ["本EN"]
    assert detokenizer.text == "日"


def test_stop_in_bytes_is_found_before_the_run_of_bytes_ends():
    tokenizer = sentencepiece_like()
    ids = ids_of_bytes(tokenizer, "ab🦜c".encode())
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["🦜"])
    assert [detokenizer.append([token_id]) for token_id in ids[:6]] == [None] * 5 + ["🦜"]
    assert detokenizer.text == "ab"


def test_several_tokens_at_once_stop_where_one_by_one_would():
    tokenizer = byte_level()
    ids = ids_of_bytes(tokenizer, b"x: abcd")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["abcd", "bc"])
    assert detokenizer.append(ids) == "bc"
    assert detokenizer.text == "x: a"


def test_stop_of_two_ending_together_is_the_longer():
    detokenizer = IncrementalDetokenizer(byte_level(), stop=["c", "abc"])
    assert detokenizer.append(ids_of_bytes(byte_level(), b"xabc")) == "abc"
    assert detokenizer.text == "x"


def test_text_holds_back_what_may_begin_a_stop():
    detokenizer = IncrementalDetokenizer(byte_level(), stop=["END"])
    detokenizer.append(ids_of_bytes(byte_level(), b"the EN"))
    assert detokenizer.text == "the "
    detokenizer.append(ids_of_bytes(byte_level(), b"G"))
    assert detokenizer.text == "the ENG"
    detokenizer.append(ids_of_bytes(byte_level(), b"E"))
    assert detokenizer.text == "the ENG"
    assert detokenizer.finish() == "the ENGE"


def test_stops_do_not_count_before_they_are_allowed():
    """min_tokens: a stop completed too early stays text; one that only begins early counts."""
    ids = ids_of_bytes(byte_level(), b"aENDbEND")
    detokenizer = IncrementalDetokenizer(byte_level(), stop=["END"])
    for token_id in ids[:7]:
        assert detokenizer.append([token_id], stops_allowed=False) is None
    assert detokenizer.append(ids[7:]) == "END"
    assert detokenizer.text == "aENDb"


def test_special_tokens_between_bytes_do_not_break_the_character():
    tokenizer = byte_level()
    special = tokenizer.token_to_id("<|end|>")
    ids = [i for byte in ids_of_bytes(tokenizer, "é🦜".encode()) for i in (byte, special)]
    assert read_one_by_one(tokenizer, ids) == "é🦜" == tokenizer.decode(ids)


# -- single tokens -------------------------------------------------------------------------------------------------


@TOKENIZERS
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    raw = b"".join(token_text(tokenizer, i)[1] for i in ids)
    expected = tokenizer.decode(ids).encode()
    assert raw in (expected, b" " + expected)  # decoding drops the space that SentencePiece puts in front


def test_token_text_shows_spaces_and_partial_characters():
    tokenizer = byte_level()
    assert token_text(tokenizer, tokenizer.token_to_id("Ġ")) == (" ", b" ")
    assert token_text(tokenizer, tokenizer.token_to_id("<|end|>")) == ("<|end|>", b"<|end|>")
    assert token_text(tokenizer, tokenizer.token_to_id("<not special>")) == ("<not special>", b"<not special>")
    assert token_text(tokenizer, ids_of_bytes(tokenizer, b"\xe6")[0]) == ("\ufffd", b"\xe6")
    assert token_text(tokenizer, 10**6) == ("", b"")
    sentencepiece = sentencepiece_like()
    assert token_text(sentencepiece, sentencepiece.token_to_id("▁world")) == (" world", b" world")
    assert token_text(sentencepiece, sentencepiece.token_to_id("<0xE6>")) == ("\ufffd", b"\xe6")
    assert token_text(sentencepiece, sentencepiece.token_to_id("日")) == ("日", "日".encode())
