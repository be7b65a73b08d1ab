"""Tables as all commands print them."""

from collections.abc import Collection, Sequence
from typing import Final

from rich.table import Table

NARROW: Final = 110
"""A terminal with fewer columns is spared what says nothing."""
NOTHING: Final = ("", "0")
"""Cells that say nothing."""


def table(*columns: str, right: Collection[str] = (), wide: str = "") -> Table:
    """An empty table. Numbers stand at the right, and they and times are never cut: where there is no room the wide
    column is broken into lines first, then the others are."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        whole = name in right or "UTC" in name
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=whole,
            overflow="fold" if name == wide else "ellipsis",
        )
    return made


def telling(columns: Sequence[str], rows: Sequence[Sequence[str]], always: int) -> tuple[list[str], list[list[str]]]:
    """The columns, and their cells, of which some row says something, and the first ones in any case."""
    kept = [at for at in range(len(columns)) if at < always or any(row[at] not in NOTHING for row in rows)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
