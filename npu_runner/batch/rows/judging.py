"""Whether an answer's text is JSON, and whether it is the one that was expected. Knows nothing of rows."""

from __future__ import annotations

import json


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_as_expected(answer: str, expected: str) -> bool:
    """Equal but for case, white space around and a full stop at the end."""
    return answer.strip().removesuffix(".").casefold() == expected.strip().removesuffix(".").casefold()
