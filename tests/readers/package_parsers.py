"""What the packages of readers make of answers. A script for an interpreter that finds them; imports nothing of ours.

Standard input is a JSON object: answers by the name of a function below. Standard output is the same with its results;
None where the package refuses an answer.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def front_matter(answer: str) -> Any:
    from olmocr.prompts.prompts import PageResponse
    from olmocr.train.front_matter import FrontMatterParser

    parser = FrontMatterParser(front_matter_class=PageResponse)
    try:
        page = parser({"markdown_content": answer, "markdown_path": "x"})["page_data"]
    except (ValueError, TypeError):
        return None
    return [page.natural_text or "", page.rotation_correction]


def otsl(answer: str) -> Any:
    from mineru_vl_utils.post_process.otsl2html import convert_otsl_to_html

    return convert_otsl_to_html(answer)


def layout(answer: str) -> Any:
    from mineru_vl_utils.mineru_client import MinerUClientHelper

    helper = MinerUClientHelper.__new__(MinerUClientHelper)  # parsing reads one of its many settings
    helper.debug = False
    return [
        [each["type"], each["bbox"], each["angle"], each.get("merge_prev", False)]
        for each in helper.parse_layout_output(answer)
    ]


def divs(answer: str) -> Any:
    from chandra.output import parse_markdown

    return parse_markdown(answer)


def boxes(answer: str) -> Any:
    from surya.inference.parsers import parse_full_page_html

    return [[each.label, list(each.bbox)] for each in parse_full_page_html(answer)]


if __name__ == "__main__":
    functions = {each.__name__: each for each in (front_matter, otsl, layout, divs, boxes)}
    json.dump(
        {name: [functions[name](answer) for answer in answers] for name, answers in json.load(sys.stdin).items()},
        sys.stdout,
    )
