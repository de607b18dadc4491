"""What the grammar library itself may spend on one rule: the same where a rule is checked and where it is followed.

Knows no rule. Our own bounds (schema_bounds.py, lark_bounds.py) stand before these; what gets past both fails its row
by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_MAX_ITEMS_IN_ROW = 32_768
"""An optional property takes 4, an object among alternatives 11; the library's own 2,000 end at 500 properties."""
_STEP_MAX_ITEMS = 200_000
"""For one mask, 20,000 a millisecond."""
_MAX_LEXER_STATES = 100_000
"""1 to 2 kB each."""


def parser_limits() -> LLParserLimits:
    """For `LLMatcher(..., limits=parser_limits())`. Errors are one line: they repeat no grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW, step_max_items=_STEP_MAX_ITEMS,
                          max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)  # fmt: skip
