"""A later attempt at a row: the seed and the changed fields, applied to the row's JSON before it is validated.

Knows the attempts' members of an answer, and nothing of why there is another attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_runner.errors import RequestError

ATTEMPTS, BEST_OF = "attempts", "best_of"
"""Members of an answer: reason and step of each attempt after the first one; and the number of attempts, if each had a
fault and this one is the first without an error. Else they are not there."""
_OF_IMAGES = ("longest", "rotate", "turn")
_OF_PROCESSOR = ("min_pixels", "max_pixels")
_APPEND = "append_prompt"


def attempts_of(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The attempts after the first one, as a result row names them."""
    found = answer.get(ATTEMPTS)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def seed_of(job_seed: int, custom_id: str, attempt: int = 0) -> int:
    """The seed of a row without one, and of each later attempt at any row: the same in every run of the job, whatever
    ran before."""
    name = f"{job_seed} {custom_id}" + (f"\0{attempt}" if attempt else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # seed + index of each of n completions stays within 64 bits


class NoPlaceError(RequestError):
    """A step has nothing to change in a row."""


@dataclass(frozen=True)
class Change:
    """Attempt `number`, from 1. `fields`: those of the row's body, fields of images, min_pixels, max_pixels, `turn`
    (degrees, clockwise, added to the rotation of each image) and append_prompt. `latest`: those of the last step.
    Picklable."""

    number: int
    fields: Mapping[str, Any]
    latest: tuple[str, ...] = ()

    def plus(self, fields: Mapping[str, Any]) -> Change:
        """The next attempt, with these fields as well."""
        found = {**self.fields, **fields}
        if "rotate" in fields:
            found.pop("turn", None)
        elif "turn" in fields:
            found["turn"] = (self.fields.get("turn", 0) + fields["turn"]) % 360
        return Change(self.number + 1, found, tuple(fields))

    def applied(self, row: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        """The row's JSON with the changes that have a place in it. Raises NoPlaceError if none of `latest` has."""
        if not isinstance(row.get("body"), dict):
            return dict(row)  # the row is refused for it
        fields = {name: value for name, value in self.fields.items() if name not in (*_OF_IMAGES, *_OF_PROCESSOR,
                                                                                     _APPEND)}
        body = {**row["body"], **fields, "seed": seed}
        if "max_tokens" in fields:
            body.pop("max_completion_tokens", None)
        media, places = _media_in(body), set(fields)
        places.update(_OF_IMAGES if "image_url" in media else (), _OF_PROCESSOR if media else ())
        bounds = {name: self.fields[name] for name in _OF_PROCESSOR if media and name in self.fields}
        if bounds and isinstance(given := body.get("mm_processor_kwargs") or {}, dict):
            body["mm_processor_kwargs"] = {**given, **bounds}
        if "image_url" in media:
            body = _with_images(body, {name: self.fields[name] for name in _OF_IMAGES if name in self.fields})
        if _APPEND in self.fields and (appended := _with_text(body, self.fields[_APPEND])) is not None:
            body = appended
            places.add(_APPEND)
        if self.latest and places.isdisjoint(self.latest):
            raise NoPlaceError(f"{', '.join(self.latest)}: the row shows no image and has no text that it could change")
        return {**row, "body": body}


def _media_in(body: Mapping[str, Any]) -> set[str]:
    """The types of media that the messages show."""
    messages = found if isinstance(found := body.get("messages"), list) else []
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    return {name for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)
            for name in ("image_url", "video_url") if name in part}


def _with_images(body: dict[str, Any], changes: Mapping[str, int]) -> dict[str, Any]:
    def changed(part: Any) -> Any:
        if not isinstance(part, dict) or not isinstance(part.get("image_url"), dict):
            return part
        return {**part, "image_url": _address(part["image_url"], changes)}

    return {**body, "messages": [
        {**each, "content": list(map(changed, each["content"]))}
        if isinstance(each, dict) and isinstance(each.get("content"), list) else each
        for each in body["messages"]]}


def _address(given: Mapping[str, Any], changes: Mapping[str, int]) -> dict[str, Any]:
    """An `image_url` with the changes."""
    found = dict(given)
    if "longest" in changes:
        found["longest"] = changes["longest"]
        found.pop("size", None)  # it would undo the change
    before = given.get("rotate") or 0
    if changes.keys() & {"rotate", "turn"} and isinstance(before, int):
        found["rotate"] = now = (changes.get("rotate", before) + changes.get("turn", 0)) % 360
        size = found.get("size")
        if (now - before) % 180 and isinstance(size, list):
            found["size"] = size[::-1]  # it is the size behind the rotation
    return found


def _with_text(body: dict[str, Any], text: str) -> dict[str, Any] | None:
    """`text` behind the prompt, or behind the last text of the last user message; None: there is neither."""
    if isinstance(prompt := body.get("prompt"), str):
        return {**body, "prompt": prompt + text}
    messages = list(found) if isinstance(found := body.get("messages"), list) else []
    for place in reversed(range(len(messages))):
        message = messages[place]
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, str):
            content += text
        elif isinstance(content, list):
            last = max((number for number, part in enumerate(content) if isinstance(part, dict)
                        and isinstance(part.get("text"), str)), default=None)
            content = [*content, {"type": "text", "text": text}] if last is None else [
                *content[:last], {**content[last], "text": content[last]["text"] + text}, *content[last + 1:]]
        messages[place] = {**message, "content": content}
        return {**body, "messages": messages}
    return None
