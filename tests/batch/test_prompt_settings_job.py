"""A job keeps to its chat template, and may be resumed with another limit of images for the rows that failed by it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest

from npu_runner.cli import main as cli
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.batch.scripted import read_rows, row, write_rows

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]
TEMPLATE = ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
            "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>"
            "{% endif %}{% endfor %}{% endif %}{% endfor %}")


def test_a_template_is_the_jobs_and_a_limit_may_be_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = io.BytesIO()
    draw_example(TEST_SEEDS[0]).images[0].save(picture, "PNG")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(
        picture.getvalue()).decode()}}
    rows = [row("text", "What is a circle?", max_tokens=2), row("image", max_tokens=2, messages=[
        {"role": "user", "content": [image, {"type": "text", "text": "Which?"}]}])]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    output = tmp_path / "answers.jsonl"

    def run(*options: str) -> int:
        return cli.main(["batch", "-i", str(tmp_path / "rows.jsonl"), "-o", str(output), *SMALL, *options])

    template, none = ["--chat-template", str(tmp_path / "t.jinja")], ["--limit-mm-per-prompt", '{"image": 0}']
    assert run(*template, *none) == 3
    found = {answer["custom_id"]: answer for answer in read_rows(output)}
    assert found["image"]["error"]["code"] == "too_many_images"
    assert "one of 1 images, at most 0 are allowed (limit_mm_per_prompt)" in found["image"]["error"]["message"]
    usage = found["text"]["response"]["body"]["usage"]
    (tmp_path / "u.jinja").write_text(TEMPLATE)
    assert run("--chat-template", str(tmp_path / "u.jinja"), "--retry-errors") == 0, "the text counts, not the file"
    found = {answer["custom_id"]: answer for answer in read_rows(output)}
    assert found["image"]["error"] is None
    assert found["text"]["response"]["body"]["usage"] == usage
    write_rows(tmp_path / "rows.jsonl", [*rows, row("more")])
    capsys.readouterr()
    assert run() == 2
    assert "prompts.chat_template" in capsys.readouterr().err
    assert json.loads((tmp_path / "answers.jsonl.manifest.json").read_text())["changes"]
