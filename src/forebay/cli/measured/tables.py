"""What all tables of measurements have in common."""

from typing import NamedTuple


class Table(NamedTuple):
    """A title, and what is below it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def figure(value: float) -> str:
    """Three digits, or all of a large number's whole part."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"
