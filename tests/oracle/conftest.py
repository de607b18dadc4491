"""What is put right in the oracle before it is asked."""

from __future__ import annotations

import importlib.metadata

import pytest

CENTRED_SINCE = (5, 23)
"""The first release that was seen to look up PaddleOCR-VL's table of positions by centres, as the published code does
(`align_corners=False` there). 5.20.2 stretches it from corner to corner."""


@pytest.fixture(scope="session", autouse=True)
def _table_of_positions_by_centres() -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return
    if tuple(map(int, version.split(".")[:2])) >= CENTRED_SINCE:
        return
    try:
        from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionEmbeddings
    except ImportError:  # the environment of the oldest packages, where no test asks transformers
        return
    # It is set where one is made; a property of the class comes first.
    PaddleOCRVisionEmbeddings.interpolation_align_corners = property(lambda self: False, lambda self, value: None)


@pytest.fixture(scope="session", autouse=True)
def _answers_of_this_run(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """Where several processes share the tests, one folder for all of them: it goes with the run's other files."""
    from tests.oracle import reference

    mine = tmp_path_factory.getbasetemp()
    reference.answers_folder = (mine.parent if hasattr(pytestconfig, "workerinput") else mine) / "answers"
    reference.answers_folder.mkdir(exist_ok=True)
