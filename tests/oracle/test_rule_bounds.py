"""Rules that lead far, are wide or force much: refused by name before the library sees them, or served whole."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from npu_runner import LLM, SamplingParams, StructuredOutputsParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import RequestError
from npu_runner.grammars import compile as compiling
from npu_runner.grammars.compile import place_of, with_grammar
from npu_runner.prompts.text.tool_parsers import forced_calls
from tests import zygote
from tests.full_set import examples, is_fast, only_full
from tests.oracle.chained_rules import CHAINS, chained
from tests.oracle.rule_fuzz import follow

SETTINGS: dict[str, Any] = {"platform": "cpu", "max_num_seqs": 8, "max_model_len": 512, "preprocessing_workers": 0,
                            "kv_cache_bytes": 32 << 20}  # fmt: skip
CLOSED = {"type": "object", "additionalProperties": False}
BOOLEAN = {"type": "boolean"}


def refusal(**asked: Any) -> str:
    with pytest.raises(RequestError) as error:
        with_grammar(StructuredOutputsParams.from_value(asked))
    assert error.value.code == "invalid_structured_outputs"
    return error.value.message


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_is_refused_with_its_place_and_one_of_five_hundred_is_served(kind: str) -> None:
    for length in (1000,) if is_fast else (1000, 2494, 2672):
        said = refusal(**chained(kind, length))
        assert "lead to each other, at most 512 are allowed" in said
        assert "#/$defs/d0" in said or "start" in said
    assert with_grammar(StructuredOutputsParams.from_value(chained(kind, 500))).compiled


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(("schema", "place", "what"), [
    ({**INTEGER, "minimum": -(10**21), "maximum": -(10**20)}, "#/minimum", "beyond 64 bits"),
    ({**INTEGER, "minimum": 10**20, "maximum": 10**21}, "#/minimum", "beyond 64 bits"),
    ({**INTEGER, "exclusiveMinimum": 2**63 - 1, "maximum": 2**64}, "#/", "beyond 64 bits"),
    ({**INTEGER, "maximum": 2**53 + 1}, "#/maximum", "exact up to 2**53"),
    ({"const": 2**53 + 1}, "#/const", "exact up to 2**53"),
    ({"enum": [True, -(2**63)]}, "#/enum", "beyond 64 bits"),
    ({"type": "number", "minimum": 1e300}, "#/minimum", "beyond 64 bits"),
    ({"properties": {"enum": {"minimum": 1e20}}}, "#/properties/enum", "beyond 64 bits"),
    ({"items": {"enum": [1, [{"a": -(10**19)}]]}}, "#/items/enum", "beyond 64 bits"),
    ({"properties": {"a": {"const": 10**30}}}, "#/properties/a/const", "beyond 64 bits"),
    ({"type": "string", "minLength": 2**31}, "#/minLength", "at most 2,147,483,647"),
    ({"type": "array", "maxItems": 10**10}, "#/maxItems", "at most 2,147,483,647"),
    ({"type": "integer", "multipleOf": 99991}, "#/multipleOf", "at most 16,384"),
    ({"allOf": [{"multipleOf": 16381}, {"multipleOf": 16381000}]}, "#/multipleOf", "at most 4,294,967,295"),
    ({"properties": {"p": {"type": "number", "multipleOf": 0.1, "minimum": 0.05, "maximum": 0.15}}}, "#/properties/p",
     "nothing that can be written fits it"),
    ({"items": {**CLOSED, "properties": {f"p{number}": {} for number in range(5000)}}}, "#/items",
     "5,001 alternatives and properties at one place, at most 2,048"),
    ({"properties": {"a": {"anyOf": [{**CLOSED, "properties": {"k": {}, "l": {}}}] * 1000}}}, "#/properties/a",
     "3,000 alternatives"),
    ({"anyOf": [{"multipleOf": 16381}, {"multipleOf": 16379}]}, "#/anyOf/1/multipleOf",
     "is the least common multiple of all values without the point and the factors 2 and 5, at most 1,048,576"),
    ({"prefixItems": [{"type": "number", "multipleOf": 16381, "minimum": number} for number in range(9)]},
     "#/prefixItems/8", "147,429 is the sum of what is asked for in multiples between bounds"),
    ({"items": {"pattern": "a?" * 513}}, "#/items/pattern", "513 parts of an expression that may be left out"),
    ({"prefixItems": [{"pattern": f"{number}{'a*' * 500}"} for number in range(9)]}, "#/prefixItems/8/pattern",
     "4,500 parts of all expressions that may be left out, at most 4,096"),
    ({"properties": {"a": {"required": [f"r{number}" for number in range(10_000)]}}}, "#/properties/a",
     "parts of the whole rule, at most 10,000"),
    ({"prefixItems": [{"items": {}, "minItems": 10**6 + number} for number in range(500)]}, "#/prefixItems/454",
     "parts of the whole rule"),
    ({"prefixItems": [True] * 10_000}, "#", "10,001 parts"), ({"const": [1] * 10_000}, "#/const", "10,001 parts"),
    ({"items": {"enum": [[number % 10 for number in range(40)]] * 300}}, "#/items/enum", "parts of the whole rule"),
    ({"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(9)]}, "#",
     "9 expressions that one text has to match, at most 8"),
    ({"patternProperties": {f"^{number}$": {} for number in range(65)}}, "#/patternProperties", "at most 64"),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!a)"}]}, "#/anyOf/1", "look-around"),
    ({"oneOf": [{"type": "null"}, {"type": "number"}, {"type": "string", "format": "x"}]}, "#/oneOf/2", "format"),
])  # fmt: skip
def test_what_the_library_cannot_be_given_is_refused_with_its_place(schema: Any, place: str, what: str) -> None:
    said = refusal(json=schema)
    assert f"cannot be served at {place}" in said
    assert what in said


@pytest.mark.parametrize(("asked", "what"), [
    ({"grammar": 'start: "x" r\nr: ' + " | ".join(f'"a{number}" s' for number in range(5000)) + '\ns: "b"'},
     "r: 5,000 alternatives at one place"),
    ({"grammar": "start: T\nT: " + " & ".join(f"/a.{{{number}}}b/" for number in range(9))}, "T: 9 expressions"),
    ({"grammar": 'start: "a" x\nx: %json {"type": "integer", "minimum": -1000000000000000000000}'},
     "x: %json #/minimum: -1000000000000000000000 is beyond 64 bits"),
    ({"grammar": 'start: %json {"a": ' + '{"a": ' * 70 + "1" + "}" * 71}, "more than 60 levels deep"),
    ({"grammar": "start: " + "(" * 40 + '"a"' + ")" * 40}, "more than 30 groups"),
    ({"grammar": 'start: "a"{3000000000}'}, "3,000,000,000 times"),
    ({"grammar": 'start: "a" <|im_end|>'}, "<|im_end|> stands for a token of the model"),
    ({"regex": "(?:a|b\\?[*?])?" + "(|a)" * 300 + r"\w{0,3}" * 300}, "601 parts of an expression that may be left out"),
    ({"grammar": "start: " + " ".join(f"/{'a?' * 500}{number}/" for number in range(9))}, "4,500 parts of all"),
    ({"grammar": "start: T0\n" + "\n".join(f"T{n}: T{n + 1} T{n + 1}" for n in range(13)) + '\nT13: "a"?'},
     "parts of an expression that may be left out, at most 512"),
    ({"grammar": "start: " + '%json {"type": "object"} ' * 200}, "start: 10,009 parts"),
    ({"grammar": "start: " + '%lark {\nstart: "a"\n} ' * 200}, "parts of the whole rule"),
    ({"grammar": "start: " + '("a" "b"){3,9} ' * 1700}, "start: 10,002 parts of the whole rule"),
    ({"grammar": "start: " + '("a" | "b") ' * 10_001}, "start: 10,001 parts"),
    ({"json": False}, "json: false is the schema that nothing fits"), ({"json": "false"}, "json: false is the schema"),
])  # fmt: skip
def test_other_rules_are_refused_by_name(asked: dict[str, Any], what: str) -> None:
    assert what in refusal(**asked)


SERVED: dict[str, dict[str, Any]] = {
    "optional": {**CLOSED, "properties": {f"p{number}": BOOLEAN for number in range(1000)}},
    "enum": {"enum": [f"value {number}" for number in range(2000)]},
    "objects": {"enum": [{"a": number} for number in range(2000)]},
    "definitions": {**CLOSED, "$defs": {f"d{number}": BOOLEAN for number in range(500)},
                    "properties": {f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in range(500)}},
    "alternatives": {"type": "array", "maxItems": 2, "items": {"anyOf": [
        {**CLOSED, "properties": {"k": {"const": number}, "a": BOOLEAN, "b": BOOLEAN}} for number in range(300)]}},
    "true": {},
}  # fmt: skip
LARGEST = ("optional", "alternatives")


@pytest.mark.parametrize("name", [*(name for name in SERVED if name not in LARGEST), *only_full(
    "a second or two each; other rules of as many parts stay", *LARGEST)])
def test_sizes_that_programs_write_are_served(name: str) -> None:
    from llguidance import LLTokenizer

    compiled = with_grammar(StructuredOutputsParams(json=SERVED[name] if name != "true" else True)).compiled
    texts = []
    for seed in range(examples(3)):
        what, text = follow(compiled, LLTokenizer("byte"), random.Random(seed))
        assert what in ("finished", "not finished")
        texts += [text] if what == "finished" else []
    for text in texts:
        jsonschema.validate(json.loads(text), SERVED[name])
    assert texts or name == "true"


def test_the_place_is_looked_for_a_bounded_number_of_times() -> None:
    schema: Any = {"pattern": "("}
    for depth in range(25):
        schema = {f"p{number}": {"type": "null"} for number in range(40)} | {f"q{depth}": schema}
        schema = {"properties": schema}
    asked: list[Any] = []

    def failure(candidate: Any) -> str | None:
        asked.append(candidate)
        return "wrong" if '"("' in json.dumps(candidate) else None

    assert place_of(schema, "wrong", failure).startswith("#/properties/q24/properties/q23")
    assert len(asked) <= 110


def test_the_place_is_looked_for_in_a_bounded_time() -> None:
    """The clock is the caller's: each time that is asked for takes a fifth of a second of it."""
    asked: list[Any] = []

    def failure(candidate: Any) -> str | None:
        asked.append(candidate)
        return "wrong" if '"("' in json.dumps(candidate) else None

    schema = {"properties": {"a": {f"p{number}": {"type": "null"} for number in range(40)} | {"q": {"pattern": "("}}}}
    assert place_of(schema, "wrong", failure) == "#/properties/a/q"
    asked.clear()
    assert place_of(schema, "wrong", failure, spent=lambda: len(asked) / 5) == "#/properties/a"
    assert len(asked) == 3


# -- text that a rule forces -------------------------------------------------------------------------------------------

LONG: list[dict[str, Any]] = [
    {"choice": ["which " * 10_000]}, {"json": {"const": "which " * 10_000}},
    {"grammar": "start: " + " ".join(f'"1_{number}"' for number in range(20_000))},
    {"json": {"type": "array", "minItems": 9000, "items": {"const": True}}},
    {"json": {**CLOSED, "properties": {"a": {"enum": ["a b " * 9000]}}, "required": ["a"]}},
    {"json": {"$defs": {f"d{number}": {"type": "array", "minItems": 2, "items": {"$ref": f"#/$defs/d{number + 1}"}}
                        for number in range(60)} | {"d60": {"const": 1}}, "$ref": "#/$defs/d0"}},
]  # fmt: skip


class Room:
    longest_token = 16

    def __init__(self, max_model_len: int):
        self.max_model_len = max_model_len


@pytest.mark.parametrize("asked", [*LONG[:2], *only_full("a grammar of 20,000 pieces", LONG[2]), *LONG[3:]],
                         ids=range(len(LONG)))
def test_text_longer_than_the_model_has_room_for_is_refused_and_served_where_there_is_room(asked: Any) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHAPES_VL / "tokenizer.json"))
    params = with_grammar(StructuredOutputsParams.from_value(asked))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    said = r"takes \d+.* tokens in one piece, and the model has room for 4096; .*max_model_len"
    with pytest.raises(RequestError, match=said):
        compiling.with_room(params, encode, Room(4096))
    if asked is not LONG[-1]:  # which doubles sixty times
        assert compiling.with_room(params, encode, Room(200_000)).compiled
    fitting = with_grammar(StructuredOutputsParams(choice=["which " * 800]))
    counted = compiling.with_room(fitting, encode, Room(4096))
    assert counted.forced_tokens == len(encode("which " * 800)) <= 4096 < fitting.forced_tokens


@pytest.mark.parametrize("asked", [
    {"json": {"type": "array", "minItems": 9000, "items": {"type": "boolean"}}},
    {"json": {"type": "array", "minItems": 9000, "items": {**CLOSED, "properties": {"a": {"const": "a b"}}}}},
    {"json": {"enum": ["a b " * 9000, "c"]}}, {"json": {"type": "string", "minLength": 50_000}},
    {"grammar": 'start: ("a" | "b" "c"){20000}'}, {"grammar": f'start: "{"a " * 9000}"?'},
], ids=range(6))  # fmt: skip
def test_what_an_answer_need_not_say_is_not_forced(asked: Any) -> None:
    params = with_grammar(StructuredOutputsParams.from_value(asked))
    assert params.forced_tokens < 100


def test_a_mask_is_as_much_work_whatever_is_forced() -> None:
    """What is forced is never written out in advance: with no forcing there are no tokens to fast-forward over."""
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

    tokens = LLTokenizer(Tokenizer.from_file(str(SHAPES_VL / "tokenizer.json")).to_str())
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"const": "which"}}}}}
    rules = [StructuredOutputsParams.from_value(asked) for asked in (
             {"choice": ["which"]}, {"json": {"const": "which"}},
             {"regex": "which"}, {"grammar": 'start: "wh" "ich"'}, {"grammar": 'root ::= "which"'},
             {"grammar": '%llguidance {"no_forcing": false}\nstart: "which"'})]  # fmt: skip
    compiled = [with_grammar(rule).compiled for rule in rules]
    compiled += [forced_calls(name, [tool], name="f", is_parallel=False).compiled for name in ("hermes", "qwen3_coder")]
    for grammar in compiled:
        assert LLMatcher(tokens, grammar, log_level=0).compute_ff_tokens() == []
    assert LLMatcher(tokens, 'start: "which"', log_level=0).compute_ff_tokens() != []


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SHAPES_VL, **SETTINGS) as llm:
        yield llm


CONTROL = "<|im_end|>"


@pytest.mark.parametrize(("asked", "expected"), [
    ({"json": {"const": CONTROL}}, json.dumps(CONTROL)), ({"choice": [CONTROL]}, CONTROL),
    ({"json": {"enum": [CONTROL]}}, json.dumps(CONTROL)), ({"regex": r"<\|im_end\|>x"}, CONTROL + "x"),
    ({"json": {**CLOSED, "properties": {CONTROL: {"const": 1}}, "required": [CONTROL]}, "disable_any_whitespace": True},
     json.dumps({CONTROL: 1}, separators=(",", ":"))),
    ({"grammar": 'start: "a<|im_end|>" "<|endoftext|>"'}, "a<|im_end|><|endoftext|>"),
])  # fmt: skip
def test_the_text_of_a_control_token_is_characters(llm: LLM, asked: dict[str, Any], expected: str) -> None:
    (output,) = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=90, structured_outputs=asked))
    assert (output.text, output.finish_reason) == (expected, "stop")


def test_a_forced_call_holds_the_text_of_a_control_token(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        **CLOSED, "properties": {"shape": {"enum": [CONTROL]}}, "required": ["shape"]}}}  # fmt: skip
    rule = forced_calls("hermes", [tool], name="f", is_parallel=False)
    (output,) = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=400, structured_outputs=rule))
    assert output.finish_reason == "stop"
    assert json.loads(output.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))["arguments"] == {
        "shape": CONTROL}  # fmt: skip


# -- in every way in, with any stack -----------------------------------------------------------------------------------


def check_ways(ways: str, stack: str, tmp_path: Any) -> None:
    command = f"ulimit -s {stack}; exec {sys.executable} -m tests.oracle.chained_rules {tmp_path} {ways}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    assert f"{len(ways.split())} ways" in done.stdout


@pytest.mark.full("a process that loads a model; chains are refused here before the library sees them")
def test_chains_are_errors_of_their_rows(tmp_path: Any) -> None:
    """6 s: a process that loads a model. Its threads have less stack than where there is no limit to it."""
    check_ways("chat", "8192", tmp_path)


@pytest.mark.full("Ray Data's class, jobs and replicas, which start processes; chains are refused here before the "
                  "library sees them")
@pytest.mark.parametrize("stack", ["8192", "unlimited"])
def test_chains_are_errors_of_their_rows_every_way_in_whatever_the_stack(stack: str, tmp_path: Any) -> None:
    check_ways("chat predictor job replicas", stack, tmp_path)


# -- anything at all ---------------------------------------------------------------------------------------------------


def check_fuzz(count: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.oracle.rule_fuzz", "--count", str(count), "--seed", str(seed)]
    done = zygote.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["refused"] + found["finished"] + found["not finished"] + found.get("failed later", 0) == count
    assert found["refused"] > count / 5
    assert found["finished"] > count / 5
    assert found.get("failed later", 0) < count / 50
    assert found["most"]["mib"][0] <= 200, found["most"]
    assert found["most"]["seconds"][0] <= 2, f"{found['most']}: of the processor, whatever else it does"


def test_fifty_random_rules_are_enforced_or_refused() -> None:
    check_fuzz(50, seed=11)


@pytest.mark.full("five thousand rules take minutes; fifty stay")
def test_five_thousand_random_rules_are_enforced_or_refused() -> None:
    check_fuzz(5000, seed=12)
