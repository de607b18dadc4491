"""Takes an answer apart for the report's page, where it is a JSON object. Knows no pages."""

from __future__ import annotations

import json

_MOST_FIELDS = 60
_MOST_CHARS = 400


def fields_of(text: str) -> list[tuple[str, str]]:
    """(name, value) of each field, a value that is no text as JSON; none where the text is no object, or too long."""
    if not text.lstrip().startswith("{"):
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # cut off at its limit, or text that only begins so
        return []
    if not isinstance(value, dict) or len(value) > _MOST_FIELDS:
        return []
    return [(name[:_MOST_CHARS], _shown(item)) for name, item in value.items()]


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ..."
