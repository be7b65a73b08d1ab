"""Number ranges as grammar alternatives over digits."""

from collections.abc import Mapping
from typing import Any


def bound(schema: Mapping[str, Any], closed: str, opened: str, sign: int) -> tuple[float | None, bool]:
    """The tighter of two bounds, and whether it is exclusive. `sign` is -1 for a lower bound."""
    found = [(sign * schema[name], name == closed) for name in (closed, opened) if name in schema]
    if not found:
        return None, False
    value, is_closed = min(found)
    return sign * value, not is_closed


def integers(low: int, high: int) -> list[str]:
    """Alternatives for the integers from `low` to `high`; empty if there are none."""
    negative = _naturals(max(1, -high), -low)
    parts = [f'"-" ({" | ".join(negative)})'] if negative else []
    return parts + _naturals(max(0, low), high)


def decimals(low: int, high: int, open_low: bool, open_high: bool) -> list[str]:
    """Alternatives for the decimal numbers from `low` to `high`, without open bounds."""
    parts = []
    if low < 0:
        below = _fractions(max(0, -high), -low, open_high or high >= 0, open_low)
        parts += [f'"-" ({" | ".join(below)})'] if below else []
    if high >= 0:
        parts += _fractions(max(0, low), high, open_low and low >= 0, open_high)
    return parts


def _fractions(low: int, high: int, open_low: bool, open_high: bool) -> list[str]:
    """Non-negative decimal numbers from `low` to `high`."""
    parts = []
    if low < high:
        some = '"." [0-9]{0,14} [1-9]'
        parts.append(f'"{low}" {some}' if open_low else f'"{low}" ({some})?')
        between = _naturals(low + 1, high - 1)
        parts += [f"({' | '.join(between)}) ({some})?"] if between else []
    if (low < high or (low == high and not open_low)) and not open_high:
        parts.append(f'"{high}"')
    return parts


def _naturals(low: int, high: int) -> list[str]:
    """Non-negative integers from `low` to `high`, as alternatives of digits."""
    parts = []
    for length in range(len(str(max(low, 0))), len(str(high)) + 1 if high >= low else 0):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        parts += _digits(str(first), str(last))
    return parts


def _digits(low: str, high: str) -> list[str]:
    """Digit strings of equal length from `low` to `high`."""
    rest = len(low) - 1
    if rest < 0:
        return ['""']
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [f"[{low[0]}-{high[0]}]" + (f" [0-9]{{{rest}}}" if rest else "")]
    if low[0] == high[0]:
        return [f'"{low[0]}" {each}' for each in _digits(low[1:], high[1:])]
    parts = [f'"{low[0]}" {each}' for each in _digits(low[1:], "9" * rest)]
    if int(low[0]) + 1 < int(high[0]):
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{rest}}}")
    return parts + [f'"{high[0]}" {each}' for each in _digits("0" * rest, high[1:])]
