"""The pages of the embedded page reader hold what they promise, and its training is transformers' own network."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, set_seed
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from npu_runner.readers.reader import find_reader, read_reader
from scripts.shapes import pages, train_pages
from scripts.shapes.evaluate_pages import manual_pages
from scripts.shapes.page_reader import IDS, PageForward, page_config, save_page_reader
from scripts.shapes.pages import FONTS, MOST_CHARACTERS, MOST_LINES, PAGE_SEEDS, Block, draw_page, fit, set_page
from tests.full_set import every

SEEDS = PAGE_SEEDS["test"]


def small_config() -> Qwen3VLConfig:
    config = page_config()
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    return config


def test_pages_hold_at_most_ten_lines_and_their_glyphs_stand_in_ink() -> None:
    for seed in SEEDS[: 60 // every(6)]:
        page = draw_page(seed)
        assert page.markdown == draw_page(seed).markdown
        assert page.image.size == (384, 512)
        lines = [line for line in page.markdown.split("\n") if line and "---" not in line.split("| ")[:2][-1]]
        assert 1 <= len(lines) <= MOST_LINES
        assert all(len(line.removeprefix("# ").removeprefix("- ")) <= MOST_CHARACTERS for line in lines)
        assert page.markdown.isascii()
        assert page.markdown.replace("\n", "").isprintable()
        pixels = np.asarray(page.image).astype(int)
        ground = pixels[0, 0]
        for glyph in page.glyphs[::3]:
            x, y = int(glyph.x), int(glyph.y)
            assert (abs(pixels[y - 14:y + 14, max(0, x - 6):x + 7] - ground) > 40).any(), (seed, glyph)


def test_markdown_has_the_blocks_that_were_drawn() -> None:
    blocks = [Block("heading", (("Sizes",),)), Block("table", (("1", "20"), ("3", "4"))),
              Block("list", (("first",), ("second",))), Block("lines", (("One line",), ("and more",)))]
    page = set_page(blocks, "serif", pages.random.Random(0))
    kinds = [token.type for token in MarkdownIt().enable("table").parse(page.markdown)]
    assert [kinds.count(kind) for kind in ("heading_open", "td_open", "th_open", "list_item_open")] == [1, 2, 2, 2]
    shown = "".join(glyph.character for glyph in page.glyphs)
    assert shown == "Sizes12034firstsecondOnelineandmore"
    with pytest.raises(ValueError, match="a page has 11 lines; the limit is 10"):
        set_page([Block("lines", (("x",),) * 11)], "vera", pages.random.Random(0))
    with pytest.raises(ValueError, match="wider than 384 pixels"):
        set_page([Block("lines", (("W" * 40,),))], "vera", pages.random.Random(0))
    with pytest.raises(ValueError, match=r"a table is .* pixels wide"):
        set_page([Block("table", (("12345678",) * 4,))], "vera", pages.random.Random(0))


@pytest.mark.parametrize("font", FONTS)
def test_every_font_has_a_glyph_of_its_own_for_each_character(font: str) -> None:
    """A missing glyph would be drawn as the same box."""
    masks = {bytes(pages._font(font, 28).getmask(character)) for character in map(chr, range(33, 127))}
    assert len(masks) == 94


def test_a_manual_is_set_in_lines_that_fit() -> None:
    found = list(manual_pages(["The shell reads a line; then it breaks that line into words and operators."] * 9))
    assert len(found) == 4
    assert all(len(page.markdown.split("\n")) <= MOST_LINES for page in found)
    assert fit("W" * 30, "vera") == "W" * len(fit("W" * 30, "vera")) != "W" * 24


@given(st.text("ab c", max_size=7), st.text("ab c", max_size=7))
def test_edit_distance_is_its_definition(first: str, second: str) -> None:
    @functools.cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i or j
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1,
                   distance(i - 1, j - 1) + (first[i - 1] != second[j - 1]))

    assert train_pages.edit_distance(first, second) == distance(len(first), len(second))


def test_its_forward_is_transformers_own_on_its_own_processor(tmp_path: Path) -> None:
    set_seed(0)
    assert sum(each.numel() for each in Qwen3VLForConditionalGeneration(page_config()).parameters()) * 2 < 9_000_000
    model = Qwen3VLForConditionalGeneration(small_config()).eval()
    save_page_reader(model, tmp_path)
    assert find_reader(tmp_path) == read_reader("shapes-reader")
    assert find_reader(tmp_path).page.size == (384, 512)
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    forward = PageForward(loaded, "cpu")
    drawn = [draw_page(seed) for seed in SEEDS[:2]]
    batch = train_pages.collate(drawn, forward.tokenizer)
    assert forward.tokenizer.decode([each for each in batch["answers"][0].tolist() if 0 <= each < 256]) == (
        drawn[0].markdown)
    answers = batch["answers"].where(batch["answers"] >= 0, IDS["<|endoftext|>"])
    ids = torch.cat([forward.prompt.expand(2, -1), answers[:, :-1]], 1)
    images = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)([page.image for page in drawn], return_tensors="pt")
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), **images,
                          mm_token_type_ids=(ids == IDS["<|image_pad|>"]).int()).logits[:, forward.length - 1:]
        torch.testing.assert_close(forward.logits(forward.see(batch["pages"]), answers), expected, rtol=1e-5, atol=1e-5)
        prompt = {**images, "input_ids": ids[:, : forward.length], "attention_mask": torch.ones(2, forward.length)}
        generated = theirs.generate(**prompt, mm_token_type_ids=(prompt["input_ids"] == IDS["<|image_pad|>"]).int(),
                                    max_new_tokens=5, do_sample=False)[:, forward.length:]
        assert forward.read(batch["pages"], 5) == [forward.tokenizer.decode(row) for row in generated.tolist()]


def test_training_goes_on_from_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_pages, "page_config", small_config)
    monkeypatch.setattr(train_pages, "CHUNK", 1 << 20)
    monkeypatch.setattr(PageForward, "read", lambda self, pages: [""] * len(pages))  # 304 steps that another test reads
    arguments = ["--output", str(tmp_path), "--steps", "2", "--batch-size", "1", "--pages", "1", "--most-lines", "1",
                 "--workers", "0", "--held-out", "1", "--device", "cpu", "--warmup-steps", "1", "--easy-steps", "0"]
    first, = train_pages.train(train_pages.parse_arguments(arguments))
    second, = train_pages.train(train_pages.parse_arguments(arguments))
    assert (first["step"], second["step"]) == (2, 4)
    assert len(list(tmp_path.glob("state.*"))) > 1
    assert second["loss"] < first["loss"] < 5.6
    assert len((tmp_path / "training_log.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "shapes-reader" / "config.json").read_text())["model_type"] == "qwen3_vl"
