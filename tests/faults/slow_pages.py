"""A small PDF whose pages take minutes each. Holds no tests."""

from __future__ import annotations

from tests.prompts.pdf_files import by_hand, stream


def slow_pages(count: int) -> bytes:
    """Each page shows a form that shows itself twice, to a depth of 24."""
    depth, first = 24, 3 + count
    pages = [b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents %d 0 R/Resources<</XObject<</F %d 0 R>>>>>>"
             % (first, first + 1)] * count
    forms = [stream(b"/F Do /F Do", b"/Type/XObject/Subtype/Form/BBox[0 0 99 99]/Resources<</XObject<</F %d 0 R>>>>"
                    % (first + 2 + level)) for level in range(depth)]
    last = stream(b"0 0 m 99 99 l S", b"/Type/XObject/Subtype/Form/BBox[0 0 99 99]")
    kids = b" ".join(b"%d 0 R" % (3 + number) for number in range(count))
    return by_hand(b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[%b]/Count %d>>" % (kids, count), *pages,
                   stream(b"/F Do"), *forms, last)
