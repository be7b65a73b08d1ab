"""The table format that all commands use."""

from collections.abc import Collection, Sequence
from typing import Final

from rich.table import Table

NARROW: Final = 110
"""Terminals with fewer columns get no empty columns."""
NOTHING: Final = ("", "0")
"""Cells without information."""


def table(*columns: str, right: Collection[str] = (), wide: str = "") -> Table:
    """An empty table. Numbers and times are never truncated: if there is no room, the wide column wraps first, then
    the others."""
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


def without_empty(
    columns: Sequence[str], rows: Sequence[Sequence[str]], always: int
) -> tuple[list[str], list[list[str]]]:
    """Only the columns, with their cells, that have information in some row; the first `always` ones in any case."""
    kept = [at for at in range(len(columns)) if at < always or any(row[at] not in NOTHING for row in rows)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
