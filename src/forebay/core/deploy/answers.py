"""Cheap checks of a response's text: whether it is a refusal or degenerate."""

import re
from typing import Final

OPENING_CHARS: Final = 200
"""A refusal comes at the beginning."""
TAIL_CHARS: Final = 4096
GRAM_CHARS: Final = 32
LOOP_TIMES: Final = 6
"""Repetitions of the last part of a response, near its end, that count as a loop."""

_CANNOT: Final = (
    r"i(?:'m | am | )(?:just |simply )?(?:can(?:no|')t|can not|won't|will not|(?:unable|not able|not going) to)"
)
_DO: Final = (
    r"(?:help|assist|comply|provide|give|offer|answer|fulfill?|complete|create|generate|produce|write|share|discuss"
    r"|engage|support|do (?:that|this)|talk about|continue with)"
)
REFUSAL: Final = re.compile(
    rf"\W*(?:(?:i'm|i am) (?:very |so |truly |really )?sorry|sorry|i apologi[sz]e|my apologies|unfortunately)?"
    rf"\W*(?:but\W+)?(?:as an? (?:ai|artificial intelligence|(?:large )?language model)[^.]{{0,40}}?\W+)?"
    rf"{_CANNOT} (?:\w+ ){{0,2}}?{_DO}\b"
)
"""How English refusals begin: "I'm sorry, but I can't assist", "As an AI language model, I cannot provide". Other
wordings and languages are not detected, but this affects both compared revisions alike."""


def refuses(text: str) -> bool:
    """Whether a response begins by refusing the request."""
    return REFUSAL.match(text[:OPENING_CHARS].replace("\u2019", "'").casefold()) is not None


def degenerate(text: str) -> bool:
    """Whether a response is empty, or ends in a loop that repeats its last words."""
    tail = text[-TAIL_CHARS:].rstrip()
    if not tail:
        return True
    return tail.count(tail[-GRAM_CHARS:]) >= LOOP_TIMES and len(tail) >= LOOP_TIMES * GRAM_CHARS
