"""Makes reports for the tests, and reads them back as a browser would. Holds no tests."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import html.parser
import io
import json
import re
from pathlib import Path
from typing import Any

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.input_identity import InputIdentity
from npu_runner.batch.files.joined import Joined
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.runs import Runs
from npu_runner.batch.rows.chat import ChatForm
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row
from npu_runner.reports import page as reports
from npu_runner.reports.survey import spread, survey
from npu_runner.reports.thumbnails import ThumbnailMaker, ThumbnailPool
from npu_runner.request.limits import LIMITS
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.serving.workers.pool import PoolLimits
from tests.batch.scripted import write_rows

MANIFEST = Manifest(created=1, model_name="m", model_files={}, settings={}, input=InputIdentity(0, ""))
RUNS = Runs()
STAMP = JobStamp(created=1, system_fingerprint="fp", model_name="m")


def answer(name: str, text: str) -> bytes:
    output = RequestOutput(name, [CompletionOutput(0, text, [1, 2], "stop")], 5)
    return answer_row(output, custom_id=name, form=ChatForm(), stamp=STAMP)


def answer_with(name: str, **message: Any) -> bytes:
    """`message`: what the answer's message has beside a role."""
    row = json.loads(answer(name, ""))
    row["response"]["body"]["choices"][0]["message"].update(message)
    return json.dumps(row).encode() + b"\n"


def failure(name: str | None, line: int = 1, code: str = "some_code", message: str = "<b>why</b>") -> bytes:
    return error_row(RowError(code=code, message=message), custom_id=name, line=line)


def report(
    folder: Path,
    requests: list[Any] | None,
    results: list[bytes],
    max_rows: int = 100,
    maker: type[ThumbnailMaker] = ThumbnailMaker,
    timeout: float = 120.0,
    max_row_bytes: int = 1 << 20,
    manifest: Manifest = MANIFEST,
    runs: Runs = RUNS,
) -> str:
    """The page of these results. `requests` None: made without an input."""
    output, page = folder / "out.jsonl", io.BytesIO()
    output.write_bytes(b"".join(results))
    with contextlib.ExitStack() as opened:
        file = None
        if requests is not None:
            file = opened.enter_context(InputFile(str(write_rows(folder / "in.jsonl", requests)), folder))
        answers = opened.enter_context(AnswerFile([output])).scan()
        joined = Joined(file, None if file is None else file.scan(), answers, max_row_bytes)
        found = survey(joined, has_schema=False)
        limits = PoolLimits(num_workers=1, task_timeout_seconds=timeout)
        with ThumbnailPool(maker(folder, LIMITS.max_source_pixels, side=1024), limits) as pool:
            reports.Page(output=output.name, joined=joined, found=found, shown=spread(found, max_rows),
                         manifest=manifest, runs=runs).write(page, pool)
    text = page.getvalue().decode()
    Page(text)
    return text


class Page(html.parser.HTMLParser):
    """A page as a browser takes it apart. Reading it checks that elements are closed in order, that nothing is loaded
    from elsewhere, and that nothing runs but the script whose hash the policy names."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        """Type and content."""
        self.policy = ""
        self._open: list[str] = []
        self._styles: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        allowed = set(re.findall(r"'sha256-(.+?)'", self.policy))
        runs = [content for kind, content in self.scripts if kind is None]
        assert {digest(content) for content in [*runs, *self._styles]} == allowed
        assert (len(runs), len(self._styles)) == (1, 1)
        assert "default-src 'none'" in self.policy
        assert "unsafe" not in self.policy
        assert len(self.ids) == len(set(self.ids)), "an address leads to one place"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "b-injected")
        found = {name: value or "" for name, value in attrs}
        assert not any(name.startswith("on") or name in ("style", "srcset") for name in found)
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "img":
            self.images.append(found["src"])
            assert found["src"].startswith("data:image/jpeg;base64,")
        elif tag == "a":
            self.links.append(found["href"])
            assert found["href"].startswith("#")
        else:
            assert not found.keys() & {"src", "href", "xlink:href", "action"}
        if tag == "script":
            self.scripts.append((found.get("type"), ""))
        if tag == "style":
            self._styles.append("")
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag not in ("meta", "img", "input", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        if self._open and self._open[-1] == "style":
            self._styles[-1] += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def names(text: str) -> list[str]:
    return [html.unescape(name) for name in re.findall(r'class="name" dir="auto">(.*?)</a>', text)]


def figures(text: str) -> dict[str, str]:
    """The figures of the head, by name, each as it is written."""
    return {name: re.sub("<.*", "", value) for name, value in re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", text)}


def plain(markup: str) -> str:
    """What can be read of it."""
    return " ".join(html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", markup, flags=re.DOTALL)).split())


def sections(text: str) -> dict[str, list[str]]:
    """The names of the rows below each heading of rows, in order."""
    parts = re.findall(r"<section .*?</section>", text, re.DOTALL)
    return {plain(re.findall(r"<h2.*?</h2>", part, re.DOTALL)[0]): names(part) for part in parts}
