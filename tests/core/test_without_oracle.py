"""The list of tests that need no transformers: what it follows, in files written for this, and that ours are on it.

Knows nothing of the environment that runs the list (scripts/test_environments.sh).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import full_set, without_oracle

FILES = {
    "tests/helpers.py": """
def needs():
    from transformers import AutoConfig
def plain(): ...
def by_way_of(): needs()
class Holder:
    made = by_way_of
""",
    "tests/top.py": "import transformers\ndef plain(): ...",
    "tests/conftest.py": """
@pytest.fixture
def made(): return import_module()
@pytest.fixture
def fake(checkpoint): ...
@pytest.fixture
def checkpoint():
    from tests.helpers import needs
""",
    "tests/test_mixed.py": """
from tests import helpers as whole
from tests.helpers import by_way_of, plain, Holder
TABLE = [plain]
LATE = {"a": by_way_of}
def test_clean(made): plain()
def test_table(): TABLE
def test_alone(): "a text about transformers, which it imports"
def test_local():
    import transformers.models
def test_helper(): by_way_of()
def test_class(): Holder
def test_assigned(): LATE
def test_fixture(checkpoint): ...
def test_fixture_of_fixture(fake): ...
def test_skips(): pytest.importorskip("transformers")
def test_string(): run("import sys\\nfrom transformers import AutoConfig")
def test_program(): run([sys.executable, "-m", "tests.top"])
def test_module(): whole.needs()
@pytest.mark.parametrize("a", LATE)
def test_decorated(a): ...
def test_inner():
    def inner():
        from tests import top
""",
    "tests/test_top.py": "from tests.top import plain\ndef test_it(): ...",
    "tests/test_clean.py": "from tests.helpers import plain\ndef test_a(): plain()\ndef test_b(): ...",
    "tests/npu/test_emulated.py": "def test_it(): ...",
}


def test_imports_are_followed_through_definitions_fixtures_and_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(without_oracle, "ROOT", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    mixed = "tests/test_mixed.py"
    assert list(without_oracle.listed([tmp_path / "tests"])) == [
        "tests/test_clean.py", f"{mixed}::test_clean", f"{mixed}::test_table", f"{mixed}::test_alone"]  # fmt: skip


@pytest.mark.full("reads all tests; nothing but test_all.sh uses the list, and how it is made stays")
def test_every_import_of_ours_is_seen() -> None:
    """A file that imports transformers has definitions that need it: no statement escapes."""
    for path in sorted((without_oracle.ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if "transformers" not in text or not any(map(without_oracle._imports_oracle, ast.walk(ast.parse(text)))):
            continue
        source = without_oracle.source(path)
        if not source.needs_oracle:
            assert any(without_oracle.needs_oracle(path, name) for name in source.definitions), path


def test_no_fixture_is_named_while_a_test_runs() -> None:
    """Such a name is not followed: a test that needed transformers by it would be on the list."""
    asks = "getfixture" "value"
    assert not [path for path in (without_oracle.ROOT / "tests").rglob("*.py") if asks in path.read_text()]


def test_the_list_holds_most_of_what_is_no_comparison_with_the_oracle() -> None:
    tests = without_oracle.ROOT / "tests"
    some = [tests / name for name in ("runner/test_token_masks.py", "oracle/test_rule_bounds.py",
                                      "core/test_bare_doctor.py", "oracle/test_families.py", "npu")]
    listed = list(without_oracle.listed([tests] if not full_set.is_fast else some))
    assert "tests/runner/test_token_masks.py" in listed
    assert "tests/oracle/test_rule_bounds.py" in listed
    assert "tests/core/test_bare_doctor.py" in listed
    assert not [name for name in listed if name.startswith(("tests/oracle/test_families", "tests/npu"))]
