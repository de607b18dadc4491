"""Ten answers for each parser, made from its grammar, with their exact Markdown. Holds no tests.

The last four of each are broken. A Refused is the reason for which the parser refuses the answer.
"""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    reason: str


class Case(NamedTuple):
    answer: str
    markdown: str | Refused
    label: str = ""


def div(label: str, content: str, box: str = "100 200 300 400") -> str:
    return f'<div data-bbox="{box}" data-label="{label}">{content}</div>'


def olmocr(text: str, *, language: str = "en", rotation: object = 0, is_table: object = False) -> str:
    return (
        f"---\nprimary_language: {language}\nis_rotation_valid: True\nrotation_correction: {rotation}\n"
        f"is_table: {is_table}\nis_diagram: False\n---\n{text}"
    )


def block(label: str, box: str = "100 200 300 400", turn: str = "up", tail: str = "") -> str:
    return f"<|box_start|>{box}<|box_end|><|ref_start|>{label}<|ref_end|><|rotate_{turn}|>{tail}"


MARKDOWN = [
    Case("# A\n\nA *word*, a_b.\n\n- [x] done\n- [ ] open\n", "# A\n\nA *word*, a_b.\n\n- [x] done\n- [ ] open"),
    Case("a < b, c <- d, 3 << 4 and x <y>", "a < b, c <- d, 3 &lt;< 4 and x &lt;y>"),
    Case(
        "<table border=1><tr><td rowspan='2' style=\"color:red\">H<sub>2</sub>O</td><td>a<br/>b</td></tr></table>",
        '<table><tr><td rowspan="2">H<sub>2</sub>O</td><td>a<br>b</td></tr></table>',
    ),
    Case("$a<b$, $5 and \\(c<d\\)\n\n$$\nx<y\n$$", "$a< b$, $5 and \\(c< d\\)\n\n$$\nx< y\n$$"),
    Case(
        "```html\n<!-- a comment --><script src=x></script>\n```\n\n`a < b` and `std::vector<int>`",
        "```html\n<!-- a comment --><script src=x></script>\n```\n\n"
        "`a < b` and <code>std&#58;&#58;vector&#60;int></code>",
    ),
    Case(
        "![a chart](fig_1.png) <https://example.org/a?b=1> [^1]\n\n[^1]: A note",
        "![a chart](fig_1.png) <https://example.org/a?b=1> [^1]\n\n[^1]: A note",
    ),
    # Broken: hostile, or cut off.
    Case(
        "<script>alert(1)</script><img src=http://e/x onerror=a alt='A map'><a href=\"javascript:a\">b</a>",
        "&lt;script>alert(1)&lt;/script>A map<a>b</a>",
    ),
    Case("one\n\n<!-- page 3 -->\n\n<!<!-- x -->-- page 4 -->\n\ntwo", "one\n\n\n\n&lt;!-- page 4 -->\n\ntwo"),
    Case("![x](http://e/x.png) [y](javascript:a)\n[z]: http://e", "[x](http://e/x.png) [y]&#40;javascript:a)\n&#91;z]: http://e"),
    Case("text\n\n   ```c\n   int a<b>;\n", "text\n\n```c\nint a<b>;\n```"),
]  # fmt: skip

FRONT_MATTER = [
    Case(olmocr("# A\n\ntext"), "# A\n\ntext"),
    Case(olmocr("Norsk", language="no"), "Norsk"),
    Case(olmocr("<table><tr><td>1</td></tr></table>", is_table=True), "<table><tr><td>1</td></tr></table>"),
    Case(olmocr("x", rotation=90), "x"),
    Case(olmocr("", language="null"), ""),
    Case(olmocr("a\n\n---\n\n\\(x<y\\)").replace("\n", "\r\n"), "a\n\n---\n\n\\(x< y\\)"),
    Case("A page without any", Refused("does not begin with front matter")),
    Case(olmocr("x", rotation=45), Refused("a rotation_correction of 45")),
    Case(olmocr("x", is_table="perhaps"), Refused("in which is_table is 'perhaps'")),
    Case("---\nprimary_language: [en\n---\nx", Refused("is no YAML")),
]

DIVS = [
    Case(div("Page-Header", "Journal 3") + div("Section-Header", "<h2>A_1 &amp; B*</h2>") + div("Text", "<p>a<br>b</p>")
         + div("Page-Footer", "17"), "## A\\_1 & B\\*\n\na  \nb"),
    Case(div("Text", "<p>H<sub>2</sub>O costs $5, x<sup>2</sup> <b>bold</b> <i>it</i></p>"),
         "H<sub>2</sub>O costs \\$5, x<sup>2</sup> **bold** *it*"),
    Case(div("Text", "<p>If <math>a_1 &lt; b</math> then</p>")
         + div("Equation-Block", '<math display="block">E=mc^2</math>'),
         "If $a_1 < b$ then\n\n$$\nE=mc^2\n$$"),
    Case(div("Table", '<table border="1"><tr><th colspan="2" data-bbox="1 2 3 4">a</th></tr><tr><td>&lt;b&gt;</td>'
             "<td><math>x</math></td></tr></table>"),
         '<table><tr><th colspan="2">a</th></tr><tr><td>&lt;b&gt;</td><td><math>x</math></td></tr></table>'),
    Case(div("Form", '<p><input type="checkbox" checked> yes <input type="checkbox"/>no</p>')
         + div("List-Group", "<ol start='3'><li>c</li><li>d<ul><li>e</li></ul></li></ol>")
         + div("Figure", '<img alt="Two bars &lt;b&gt;"/>'),
         "[x] yes [ ] no\n\n3. c\n4. d\n   - e\n\nTwo bars &lt;b>"),
    Case(div("Code-Block", "<pre><code>if a &lt; b:\n    f(`x`) # a<int></code></pre>") + div("Blank-Page", ""),
         "```\nif a < b:\n    f(`x`) # a<int>\n```"),
    # Broken.
    Case(div("Text", "<p>kept</p>", "1 2 three") + "beside" + '<div data-bbox="0 0 9 9" data-label="Text"><p>cut of',
         "kept\n\nbeside\n\ncut of"),
    Case(div("Text", "<p onclick=a>a<script>alert(1)</script><!-- page 3 --> &lt;!-- page 4 --&gt;</p>"),
         "a&lt;script>alert(1)&lt;/script> &lt;!-- page 4 -->"),
    Case("I cannot read this page.", Refused("has no HTML")),
    Case(div("Text", "<b>" * 2000), Refused("too deep")),
]  # fmt: skip

LAYOUT = [
    Case(block("title") + "\n" + block("text", "100 500 900 600", "right"), ""),
    Case(block("text", "300 400 100 200"), ""),
    Case(block("text") + block("text", "100 200 300 401"), ""),
    Case(block("table", "0 0 1000 500") + block("text", "10 10 200 40"), ""),
    Case(block("text", tail="txt_contd_tgt") + block("unknown", "500 500 600 600") + "<|im_end|>", ""),
    Case("", ""),
    Case(block("text", "100 200 300 1400") + block("title", "1 2 3 4"), ""),
    Case(block("text") + "<|box_start|>1 2 3<|box_end|><|ref_start|>text<|ref_end|>", ""),
    Case(block("poem") + block("text", "5 5 5 9"), ""),
    Case("The page shows a table.", Refused("is no layout")),
]
LAYOUT_BLOCKS = [
    [("title", (0.1, 0.2, 0.3, 0.4), 0, False), ("text", (0.1, 0.5, 0.9, 0.6), 270, False)],
    [("text", (0.1, 0.2, 0.3, 0.4), 0, False)],
    [("text", (0.1, 0.2, 0.3, 0.4), 0, False)],
    [("table", (0.0, 0.0, 1.0, 0.5), 0, False)],
    [("text", (0.1, 0.2, 0.3, 0.4), 0, True), ("image", (0.5, 0.5, 0.6, 0.6), 0, False)],
    [],
    [("title", (0.001, 0.002, 0.003, 0.004), 0, False)],
    [("text", (0.1, 0.2, 0.3, 0.4), 0, False)],
    [],
]
"""Label, box, rotation and continuation of the blocks of each answer that is not refused."""

BLOCK = [
    Case("A line.<|im_end|>", "A line.", "text"),
    Case("1 Introduction", "## 1 Introduction", "paragraph_title"),
    Case("\\[ a < b \\]", "$$\na < b\n$$", "equation"),
    Case("<fcel>a<fcel>b<nl><fcel>1<ecel><nl>",
         "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td></td></tr></table>", "table"),
    Case("int a<b>;", "```\nint a<b>;\n```", "code"),
    Case("[Non-Text]", "", "text"),
    Case("<table><tr><td onclick=a>x</td></tr></table>", "<table><tr><td>x</td></tr></table>", "table"),
    Case("a table of numbers", Refused("is no table in OTSL"), "table"),
    Case("$$ x <!-- page 3 --> $$ y $$", "$$\nx   y\n$$", "equation"),
    Case("```\nnever ended", "```\nnever ended\n```", "code"),
]  # fmt: skip

OTSL = [
    Case("<fcel>a<fcel>b<nl><fcel>1<fcel>2<nl>",
         "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td>2</td></tr></table>"),
    Case("<fcel>a<lcel><fcel>b<nl><fcel>1<fcel>2<ecel><nl>",
         '<table><tr><td colspan="2">a</td><td>b</td></tr><tr><td>1</td><td>2</td><td></td></tr></table>'),
    Case("<fcel>a<lcel><fcel>b<nl><ucel><xcel><fcel>c<nl>",
         '<table><tr><td rowspan="2" colspan="2">a</td><td>b</td></tr><tr><td>c</td></tr></table>'),
    Case("<fcel>x<y & z<nl>", "<table><tr><td>x&lt;y &amp; z</td></tr></table>"),
    Case("Before\n<fcel>a<nl>\n\nAfter", "Before\n\n<table><tr><td>a</td></tr></table>\n\nAfter"),
    Case("No table", "No table"),
    Case("<fcel>a<fcel>b<nl><fcel>1<nl>",
         "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td></td></tr></table>"),
    Case("<lcel>lost<fcel>b<nl><ucel>",
         '<table><tr><td rowspan="2">lost</td><td>b</td></tr><tr><td></td></tr></table>'),
    Case("<fcel>a<lcel><nl><ucel><fcel>b<nl>",
         '<table><tr><td colspan="2">a</td></tr><tr><td></td><td>b</td></tr></table>'),
    Case("<nl><nl>", Refused("is no table in OTSL")),
]  # fmt: skip

CASES = {"markdown": MARKDOWN, "front_matter": FRONT_MATTER, "divs": DIVS, "mineru_layout": LAYOUT,
         "mineru_block": BLOCK, "otsl": OTSL}  # fmt: skip
