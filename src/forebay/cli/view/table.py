"""The table format that all commands use."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

NARROW: Final = 110
"""Terminals with fewer columns get no empty columns."""
WIDE: Final = 1000
"""More columns than any table has."""
NOTHING: Final = ("", "0", "-")
"""Cells without information."""


class _Verbatim(Table):
    """Its cells are no markup: a reason or a name may have brackets."""

    def add_row(
        self, *renderables: RenderableType | None, style: StyleType | None = None, end_section: bool = False
    ) -> None:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in renderables)
        super().add_row(*cells, style=style, end_section=end_section)


def table(*columns: str, right: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """An empty table. Numbers, times and the columns of `whole` stay in one piece; if there is no room, the others
    wrap, the widest first, and nothing of them is cut off."""
    made = _Verbatim(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        one = name in right or name in whole or "UTC" in name
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=one,
            overflow="ellipsis" if one else "fold",
        )
    return made


def without_empty(
    columns: Sequence[str], rows: Sequence[Sequence[str]], always: int
) -> tuple[list[str], list[list[str]]]:
    """Only the columns, with their cells, that have information in some row; the first `always` ones in any case."""
    kept = [at for at in range(len(columns)) if at < always or any(row[at] not in NOTHING for row in rows)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]


@dataclass(frozen=True, slots=True)
class Fitting:
    """A table that leaves out columns of `spare`, the first ones first, while it is wider than the terminal. `make`
    gets the names of those that are left out."""

    make: Callable[[Collection[str]], Table]
    spare: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """The protocol of rich."""
        unlimited = options.update(max_width=WIDE)
        made = self.make(())
        for count in range(1, len(self.spare) + 1):
            if console.measure(made, options=unlimited).maximum <= options.max_width:
                break
            made = self.make(self.spare[:count])
        yield made
