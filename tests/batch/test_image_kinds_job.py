"""A job over images of every kind: each is answered, each hostile one fails by name and by itself."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from npu_runner.cli import main as cli
from tests import full_set
from tests.batch.scripted import read_rows, row, write_rows
from tests.full_set import only_full
from tests.prompts.image_bytes import photo
from tests.prompts.image_kinds import KINDS, bombs, made

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]
# Small files that take more than the workers have: 4 bytes a pixel of TGA, 9 to 20 of the others.
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "AVIF": (4000, {"subsampling": "4:2:0"}), "JPEG2000": (4000, {}), "TGA": (7000, {"compression": "tga_rle"}),
    "HEIF": (4000, {"quality": 50, "chroma": 420, "enc_params": {"preset": "ultrafast"}}),
}  # fmt: skip
LARGE = {kind: how for kind, how in LARGE.items() if kind in KINDS}
NO_MEMORY = {"image_out_of_memory", "preprocessing_out_of_memory", "preprocessing_crashed"}


def asks(name: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": "What colour is it?"}]
    return row(name, messages=[{"role": "user", "content": parts}], max_tokens=4)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The error, or None, of each image's row, of a job whose workers have little memory."""
    folder = tmp_path_factory.mktemp("images")
    for kind in KINDS:
        data = made(photo(64, 64), kind, **({"sizes": [(64, 64)]} if kind == "ICO" else {}))
        (folder / f"good.{kind}").write_bytes(data)
        (folder / f"cut.{kind}").write_bytes(data[: len(data) // 2])
    for kind in ["TGA"] if full_set.is_fast else LARGE:
        side, options = LARGE[kind]
        (folder / f"large.{kind}").write_bytes(made(Image.new("RGB", (side, side), "teal"), kind, **options))
    for name, data in bombs(20_000).items():
        (folder / f"bomb.{name}").write_bytes(data)
    names = sorted(path.name for path in folder.iterdir())
    write_rows(folder / "in.jsonl", map(asks, names))
    paths = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--allowed-media-dir", str(folder)]
    assert cli.main(["batch", *paths, *SMALL, "--worker-memory-bytes", "128M", "--preprocessing-workers", "1"]) == 3
    answers = read_rows(folder / "out.jsonl")
    assert sorted(item["custom_id"] for item in answers) == names
    return {item["custom_id"]: item["error"] for item in answers}


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_image_is_answered_and_half_of_it_is_not(found: dict[str, Any], kind: str) -> None:
    assert found[f"good.{kind}"] is None
    assert found[f"cut.{kind}"]["code"] in ("image_truncated", "image_broken", "image_not_recognised")
    assert found[f"cut.{kind}"]["param"] == "messages[0].content[0].image_url"


@pytest.mark.parametrize("name", bombs(64))
def test_a_bomb_fails_by_name(found: dict[str, Any], name: str) -> None:
    assert found[f"bomb.{name}"]["code"] == "image_too_large"


@pytest.mark.parametrize("kind", ["TGA", *only_full(
    "kinds whose decoders take long; one kind stays", *(kind for kind in LARGE if kind != "TGA"))])
def test_an_image_that_needs_more_memory_than_a_worker_has_fails_alone(found: dict[str, Any], kind: str) -> None:
    assert found[f"large.{kind}"]["code"] in NO_MEMORY
