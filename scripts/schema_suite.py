"""Runs the official JSON Schema test suite (draft 2020-12) through our rules: how many schemas are served, and how many
of the instances that the suite forbids are admitted. Prints a line and each such instance, then one JSON line.

The suite comes from the source distribution of the package jsonschema, fetched through pip into .cache. Every instance
is tried as json.dumps writes it, and with each character of its keys and of all its texts escaped as \\uXXXX.

    python scripts/schema_suite.py
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache/json-schema-suite"
_FOLDER = "json/tests/draft2020-12/"
_PLACES = ("", "optional/", "optional/format/")

Admits = Callable[[str], bool]
"""True for a text that the rule admits as a whole answer."""


Group = tuple[str, Any, list[dict[str, Any]]]
"""(name, schema, tests) of a group of the suite; each test has `data` and `valid`."""


class Refused(Exception):
    """The compiler does not serve a schema."""


def fetch() -> Path:
    """The source distribution, downloaded once. Raises OSError where pip cannot fetch it."""
    name = f"jsonschema-{version('jsonschema')}.tar.gz"
    if not (CACHE / name).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", "jsonschema", "--no-deps",
                   "--dest", str(CACHE), f"jsonschema=={version('jsonschema')}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise OSError(f"pip cannot fetch {name}: {done.stderr.strip().splitlines()[-1:]}")
    return CACHE / name


def read(file: Path) -> list[Group]:
    """The groups in a source distribution of jsonschema; nothing is unpacked to disk."""
    groups: list[Group] = []
    with tarfile.open(file) as archive:
        for member in sorted(archive.getmembers(), key=lambda each: each.name):
            place, _, name = member.name.partition(_FOLDER)[2].rpartition("/")
            content = archive.extractfile(member) if f"{place}/".lstrip("/") in _PLACES and name else None
            if content is not None and _FOLDER in member.name:
                groups += [(f"{name}: {group['description']}", group["schema"], group["tests"])
                           for group in json.load(content)]
    return groups


def spellings(value: Any) -> list[str]:
    """As json.dumps writes it, with escaped keys, and with all texts escaped."""
    return [json.dumps(value, ensure_ascii=False), _escaped(value, False), _escaped(value, True)]


def _escaped(value: Any, has_texts: bool) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_escaped_text(key)}:{_escaped(item, has_texts)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_escaped(item, has_texts) for item in value) + "]"
    return _escaped_text(value) if has_texts and isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _escaped_text(text: str) -> str:
    data = text.encode("utf-16-be", "surrogatepass")
    return '"' + "".join(f"\\u{data[at]:02x}{data[at + 1]:02x}" for at in range(0, len(data), 2)) + '"'


def count(suite: Sequence[Group], compiled: Callable[[Any], Admits]) -> tuple[Counter[str], list[str]]:
    """Numbers by what was counted, and the forbidden instances that were admitted."""
    found: Counter[str] = Counter(schemas=len(suite))
    wrong = []
    for name, schema, tests in suite:
        try:
            admits = compiled(schema)
        except Refused:
            found["refused"] += 1
            continue
        for test in tests:
            plain, *others = map(admits, spellings(test["data"]))
            if test["valid"]:
                found["valid"] += 1
                found["valid_admitted"] += plain
            else:
                found["forbidden"] += 1
                found["forbidden_admitted"] += plain
                found["forbidden_admitted_in_a_spelling"] += plain or any(others)
                if plain or any(others):
                    wrong.append(f"{name}: {test['description']}")
    found["served"] = found["schemas"] - found["refused"]
    return found, wrong


def ours(schema: Any) -> Admits:
    from npu_runner.errors import RequestError
    from npu_runner.grammars.compile import with_grammar
    from npu_runner.request.structured_outputs import StructuredOutputsParams

    try:
        return follower(with_grammar(StructuredOutputsParams(json=schema)).compiled)
    except RequestError as error:
        raise Refused(error.message) from error


def follower(grammar: str) -> Admits:
    """Follows a grammar of llguidance over bytes. Raises Refused where it cannot be built."""
    from llguidance import LLMatcher

    start = LLMatcher(_bytes(), grammar, log_level=0)
    if start.is_error():
        raise Refused(start.get_error())

    def admits(text: str) -> bool:
        matcher = start.deep_copy()
        return all(map(matcher.consume_token, text.encode("utf-8", "surrogatepass"))) and matcher.is_accepting()

    return admits


@functools.cache
def _bytes() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def main() -> None:
    found, wrong = count(read(fetch()), ours)
    print(f"{found['served']} of {found['schemas']} schemas served; of {found['forbidden']} forbidden instances "
          f"{found['forbidden_admitted']} admitted, {found['forbidden_admitted_in_a_spelling']} in some spelling; of "
          f"{found['valid']} valid ones {found['valid_admitted']}")
    for each in wrong:
        print(f"  admitted: {each}")
    versions = {name: version(name) for name in ("jsonschema", "npu-runner", "llguidance")}
    print(json.dumps({"bench": "schema_suite", "versions": versions, **found}))


if __name__ == "__main__":
    main()
