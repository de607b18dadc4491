"""Options and fixtures that every test shares."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Helpers assert, too: a failure there says what was compared.
_FOLDERS = ("batch", "cann", "cuda", "faults", "npu", "oracle", "prompts", "replicas", "runner", "tables")
pytest.register_assert_rewrite(*(f"tests.{folder}" for folder in _FOLDERS))

from tests import full_set, zygote  # noqa: E402

# Images of containers often forbid compiled modules. Then each process rewrites and compiles every test: 17 s each.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Read when torch is loaded. Threads that spin while they wait make a busy machine of few cores ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="what the oracle tests run on, by its name")
    parser.addoption("--async-scheduling", action="store_true",
                     help="every engine that is not told otherwise plans a step while the one before runs")


def pytest_configure(config: pytest.Config) -> None:
    zygote.fork_children()
    full_set.is_fast = config.option.markexpr == "not full"  # before any test is imported
    # Wall-clock deadlines belong to benches: a busy machine must not fail a law. The fast set has the same examples at
    # every run, so that it judges a change and nothing else; the full set draws new ones.
    hypothesis.settings.register_profile("no_clock", deadline=None, max_examples=full_set.examples(100),
                                         derandomize=full_set.is_fast,
                                         suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("no_clock")
    if config.getoption("--async-scheduling"):
        from npu_runner.config import SchedulerConfig

        SchedulerConfig.__init__.__kwdefaults__["async_scheduling"] = True


def pytest_unconfigure() -> None:
    zygote.close_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Its fixtures too."""
    zygote.start_from_nothing = item.get_closest_marker("from_nothing") is not None
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the files, those with slow tests come first: none has one left to do alone.

    A mark `full` needs a reason: no test leaves the fast set in silence.
    """
    for item in items:
        for mark in item.iter_markers("full"):
            if not mark.args or not isinstance(mark.args[0], str):
                raise pytest.UsageError(f"{item.nodeid}: full needs a reason: pytest.mark.full('why')")
    slow = {item.path for item in items if item.get_closest_marker("slow")} if hasattr(config, "workerinput") else ()
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In the fast set one process runs all tests of the emulated CANN. To import torch_npu and its graph compilers
    takes twelve seconds in each process that does. The full set would wait for that one process in the end."""
    if not full_set.is_fast:
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "npu" if nodeid.startswith(("tests/npu/", "tests/cann/")) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected is garbage: looking for it took a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the emulated CANN before the first test, not within it. In a new checkout on a busy machine that takes
    minutes, which would be the time of the test that comes first. Where it cannot be built, each of the tests says so.

    What is loaded by now is left out of collections of garbage, which take as long as a process is large.
    """
    gc.collect()
    gc.freeze()
    if session.config.option.collectonly or not any(item.get_closest_marker("npu") for item in session.items):
        return
    from tests.cann.environment import has_real_cann
    from tests.cann.setup_site import BuildError, setup

    if not has_real_cann():
        with contextlib.suppress(BuildError):
            setup()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Processes share the cores already, and tensors here are small. test_shapes_vl.py computes with two."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def platform_name(request: pytest.FixtureRequest) -> str:
    """The platform under test; tests that need it are skipped, with the reason, where it cannot be used."""
    from npu_runner.errors import ConfigError
    from npu_runner.platforms import check_name, pick_platform

    name = str(request.config.getoption("--platform"))
    check_name(name)
    try:
        pick_platform(name)
    except ConfigError as reason:
        pytest.skip(str(reason))
    return name


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make(model_type, **changes) -> folder of a tiny random checkpoint, made once per set of changes."""
    from tests.oracle.tiny_checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def make(model_type: str, **changes: Any) -> Path:
        key = repr((model_type, sorted(changes.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **changes)
        return made[key]

    return make


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
