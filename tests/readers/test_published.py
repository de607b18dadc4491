"""The shipped readers beside the packages of their models' authors, as published: prompts, sizes and sampling."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pypdfium2
import pytest
import yaml
from PIL import Image

from npu_runner.readers.package_prompt import prompt_of
from npu_runner.readers.reader import PromptSource, read_reader
from tests.tables.made import rows
from tests.tables.pages import pdf

pytestmark = pytest.mark.full("fetches wheels of PyPI")
WHEELS = ("chandra-ocr==0.2.0", "surya-ocr==0.22.1", "olmocr==0.4.27", "mineru-vl-utils==2.0.7", "glmocr==0.1.5")
A_SERIES = [(2384, 3370), (1684, 2384), (1191, 1684), (842, 1191), (595.28, 841.89), (420, 595), (298, 420), (210, 298)]
SIZES = [*A_SERIES, (841.89, 595.28), (1190.55, 841.89), (612, 792), (612, 1008), (792, 1224), (522, 756), (709, 1001),
         (499, 709), (960, 540), (720, 540), (227, 850), (252, 144)]  # fmt: skip
"""Points: A0 to A7, landscape, US sizes, B4, B5, slides, a receipt and a card."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheels. Nothing of them is imported but the module that a test names."""
    folder = tmp_path_factory.mktemp("published")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "wheels"), *WHEELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"PyPI does not give the wheels: {done.stderr.strip().splitlines()[-1:]}")
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder / "unpacked")
    return folder / "unpacked"


def module_at(path: Path) -> Any:
    """The module of one file, without the package around it."""
    spec = importlib.util.spec_from_file_location(f"published_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def literal(path: Path, name: str) -> Any:
    """The value of an assignment, also of an annotated one or one in a class, that is written out in a source."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no {name}")


def test_prompts_are_read_from_the_packages(published: Path, tmp_path: Path) -> None:
    """surya's module needs what its package depends on, so its constant is searched for in the source alone."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")}))
    packages.rmdir()
    packages.symlink_to(published)
    python = str(tmp_path / "venv" / "bin" / "python")
    chandra = prompt_of(read_reader("chandra-ocr-2"), python)
    assert (chandra.package, chandra.version, len(chandra.text)) == ("chandra-ocr", "0.2.0", 2161)
    olmocr = prompt_of(read_reader("olmocr-2"), python)
    assert (olmocr.package, olmocr.version) == ("olmocr", "0.4.27")
    assert 500 < len(olmocr.text) < 1000
    source = read_reader("surya-2").prompt_from
    assert isinstance(source, PromptSource)
    path = published / f"{source.module.replace('.', '/')}.py"
    assert isinstance(literal(path, source.constant), str)


@pytest.mark.parametrize(("name", "module", "dpi", "shortest"), [
    ("chandra-ocr-2", "chandra/model/util.py", 192, 1024), ("surya-2", "surya/inference/util.py", 192, 0),
])  # fmt: skip
def test_sizes_are_those_of_the_packages_own_function(
    name: str, module: str, dpi: int, shortest: int, published: Path, tmp_path: Path
) -> None:
    scale_to_fit = module_at(published / module).scale_to_fit
    file = pdf(tmp_path / "sizes.pdf", *SIZES)
    found = rows(tmp_path / "r.jsonl", file, prompt="?", reader=name)
    document = pypdfium2.PdfDocument(file)
    assert len(found) == len(document) == 20
    for row, page in zip(found, document, strict=True):
        scale = max(dpi / 72, shortest / min(page.get_size()))
        rendered = page.render(scale=scale)
        meant = scale_to_fit(Image.new("1", (rendered.width, rendered.height))).size
        assert tuple(row["body"]["messages"][0]["content"][0]["image_url"]["size"]) == meant, page.get_size()


def test_minerus_constants_are_in_its_readers(published: Path) -> None:
    client = published / "mineru_vl_utils" / "mineru_client.py"
    prompts = literal(client, "DEFAULT_PROMPTS")
    layout, blocks = read_reader("mineru2.5-layout"), read_reader("mineru2.5-blocks")
    assert (layout.prompt, blocks.prompt) == (prompts["[layout]"], prompts["[default]"])
    assert {name: label.prompt for name, label in blocks.by_label.items()} == {
        name: prompts[name] for name in ("table", "equation")}  # fmt: skip
    system = literal(published / "mineru_vl_utils" / "vlm_client" / "base_client.py", "DEFAULT_SYSTEM_PROMPT")
    assert layout.system == blocks.system == system
    text = client.read_text("utf-8")
    assert f"layout_image_size: tuple[int, int] = {layout.page.size}" in text
    assert 'skip_list = {"list", "equation_block", "image_block"}' in text
    for name, values in (("temperature", 0.0), ("top_p", 0.01), ("top_k", 1), ("no_repeat_ngram_size", 100)):
        assert f"{name}: {type(values).__name__} | None = {values}" in text
        assert layout.body[name] == blocks.body[name] == values


def test_glm_ocrs_settings_are_in_its_reader(published: Path) -> None:
    settings = yaml.safe_load((published / "glmocr" / "config.yaml").read_text("utf-8"))["pipeline"]["page_loader"]
    reader = read_reader("glm-ocr")
    assert reader.prompt == settings["task_prompt_mapping"]["text"]
    assert reader.page.dpi == settings["pdf_dpi"]
    for name in ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens"):
        assert reader.body[name] == settings[name]


def test_chandras_settings_are_in_its_reader(published: Path) -> None:
    settings, reader = published / "chandra" / "settings.py", read_reader("chandra-ocr-2")
    assert reader.page.dpi == literal(settings, "IMAGE_DPI")
    assert reader.page.shortest == literal(settings, "MIN_PDF_IMAGE_DIM")
    assert reader.image.shortest == literal(settings, "MIN_IMAGE_DIM")
    assert reader.body["max_tokens"] == literal(settings, "MAX_OUTPUT_TOKENS")
