"""No answer brings a tag, an address or a comment that is not allowed past a renderer of Markdown or of HTML.

The oracles are markdown-it (CommonMark with tables), which renders what is left, and html.parser, which finds its tags.
"""

from __future__ import annotations

import re

import pytest
from bs4 import BeautifulSoup
from bs4.element import PreformattedString
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from npu_runner.readers.answers.block import AnswerError
from npu_runner.readers.answers.markdown_text import clean_markdown
from npu_runner.readers.answers.parsers import parse_answer
from tests.full_set import examples

pytestmark = pytest.mark.filterwarnings("ignore::bs4.MarkupResemblesLocatorWarning")
RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
TAGS = re.compile(
    "p|[uod]l|li|d[td]|h[1-6r]|pre|code|em|strong|[abius]|img|blockquote|br|table|t(head|body|foot|r|d|h)|caption|"
    "col|colgroup|su[bp]|del|ins|mark|small|math|input"
)
ATTRIBUTES = re.compile("colspan|rowspan|span|start|value|href|display|checked|disabled|type|src|alt|class|title")
PIECES = re.split(
    " ¦ ",
    "<script> ¦ </script> ¦ <img src=x onerror=a> ¦ <b> ¦ </b> ¦ <table> ¦ <tr><td> ¦ </td></tr></table> ¦ <ul> ¦ <br>"
    " ¦ ` ¦ `` ¦ ``` ¦ ~~~ ¦ \n ¦ \n\n ¦    ¦      ¦ -  ¦ 1.  ¦ >  ¦ <!-- ¦ --> ¦ page 3 ¦ <!-- page 3 --> ¦ < ¦ << ¦ >"
    " ¦ / ¦ ! ¦ ? ¦ [ ¦ ] ¦ ( ¦ ) ¦ ]( ¦ ![ ¦ ]:  ¦ [a]: http://e ¦ [a] ¦ javascript:a ¦ \\ ¦ $ ¦ $$ ¦ http://e/x"
    " ¦ //e/x ¦ \\( ¦ \\) ¦ a ¦ b c ¦ &lt; ¦ & ¦ \" ¦ ' ¦ = ¦ <a href=\" ¦ <a href='javascript:x'> ¦ <https://e/x>"
    " ¦ <svg/onload=a> ¦ * ¦ _ ¦ # ¦ --- ¦ <span> ¦ </span> ¦ <![CDATA[ ¦ <?x ¦ <x ¦ src= ¦ onclick=a ¦ <div ¦ <style>"
    ' ¦ <p> ¦ <h1> ¦ <math> ¦ <input type=checkbox> ¦ <input onfocus=a> ¦ : ¦ \t ¦ ^ ¦ [^1]:  ¦ <img alt="x"> ¦ \\<'
    " ¦ \\` ¦ <td colspan=2 ¦ - ¦ data:text/html,x ¦ </b ¦ --!> ¦ <! ¦ |",
)
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
MANY = settings(max_examples=examples(2000), deadline=None)


def refuse_strangers(html: str) -> None:
    soup = BeautifulSoup(html, "html.parser")
    for tag in soup.find_all(True):
        assert TAGS.fullmatch(tag.name)
        # A table of Markdown has alignments.
        assert all(ATTRIBUTES.fullmatch(name) or (name == "style" and tag.name in ("td", "th")) for name in tag.attrs)
        assert tag.name != "input" or tag["type"] == "checkbox"
        address = str(tag.get("href", tag.get("src", "")))
        if tag.name == "img":
            assert re.match(r"(?!//)[^:]*$", address)
        assert re.match(r"https?://|mailto:|(?!//)[^:]*$", address, re.IGNORECASE)
    assert not soup.find_all(string=lambda text: isinstance(text, PreformattedString))  # comments and the like


@MANY
@example("[a](`) <script>`")
@example("<!<!-- a -->-- page 3 -->")
@example("<scr<!-- -->ipt>")
@example("1. <br>\n   ```\n   <script>")
@example("- a\n\n  ```\n<script>")
@example("!<!-- -->[x](http://e/x.png) ]<span>(javascript:a)")
@example("<a href='http://x/`'>l</a> `<script>`")
@example("[^1]: javascript:a [^1]")
@example("<table><tr><td>\n\n```\n<script>\n```\n")
@given(ANSWERS)
def test_nothing_that_runs_or_loads_is_rendered(answer: str) -> None:
    try:
        clean = clean_markdown(answer)
    except AnswerError:
        return
    refuse_strangers(RENDERER.render(clean))
    # The same text within an HTML block, where no Markdown is read. Fenced code is not, and stands for itself.
    if not re.search(r"^(```|~~~)", clean, re.MULTILINE):
        refuse_strangers(re.sub(r"<(?=https?://\S+>)", "&lt;", clean))
    assert clean_markdown(clean) == clean


@MANY
@example("```\n<!-- page 3 -->\n```")
@example("```\nnever ended")
@example("<table><tr><td>never ended")
@given(ANSWERS)
def test_no_answer_hides_or_forges_a_page(answer: str) -> None:
    try:
        clean = clean_markdown(answer)
    except AnswerError:
        return
    html = RENDERER.render(f"<!-- page 1 -->\n\n{clean}\n\n<!-- page 2 -->\n\nlast **words**\n")
    assert re.findall(r"<!-- page \d+ -->", html) == ["<!-- page 1 -->", "<!-- page 2 -->"]
    assert "last <strong>words</strong>" in html
    assert not re.search(r"<!--\s*page\s*\d+\s*-->", clean)


@pytest.mark.parametrize("run", ["<b ", "<div ", "<a href=", "<a b=c ", "<td 'x' ", '<td "'])
def test_tags_that_never_end_are_text(run: str) -> None:
    """A model that repeats itself writes such answers. html.parser walks to their end from each tag, for minutes."""
    begin = '<div data-bbox="0 0 9 9" data-label="Text">before</div>'
    (block, outside) = parse_answer("divs", begin + run * 19_000, label="").blocks
    assert block.text == "before"
    assert outside.text.count("&lt;") == 19_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", ["<!--", "<!-- a ", "<!---"])
def test_comments_that_never_end_are_text(run: str) -> None:
    """A scan to the end of the text from each of them takes minutes."""
    assert clean_markdown(run * 100_000).count("&lt;!--") == 100_000


@pytest.mark.parametrize("answer", ["a<!-- b -->c", "a<!---->c", "a<!-->c", "a<!--->c", "a<!-- - -- b --->c",
                                    "a<!-- <b> - --!>c", "a<!-- x\n\ny -- > z-->c"])  # fmt: skip
def test_a_comment_is_removed_to_its_end(answer: str) -> None:
    assert clean_markdown(answer) == "ac"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_a_text_without_markup_stays(text: str) -> None:
    text = re.sub(r"[<\[\]`$!\\~\x00-\x1f\x7f\ufeff\ufffe\uffff]", "", text).strip()
    assert clean_markdown(text) == text


@pytest.mark.parametrize("parser", ["markdown", "otsl", "mineru_block", "divs", "front_matter", "mineru_layout"])
@settings(max_examples=examples(800), deadline=None)
@given(answer=ANSWERS, label=st.sampled_from(["", "text", "code", "title", "equation"]))
def test_a_parser_refuses_an_answer_or_its_markdown_is_clean(parser: str, answer: str, label: str) -> None:
    if parser == "divs":
        answer = f'<div data-label="Text">{answer}'
    try:
        parsed = parse_answer(parser, answer, label=label)
    except AnswerError:
        return
    for block in parsed.blocks:
        assert clean_markdown(block.text) == block.text
        refuse_strangers(RENDERER.render(block.text))
