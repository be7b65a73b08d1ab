"""Tables as all commands print them."""

from collections.abc import Collection

from rich.table import Table


def table(*columns: str, right: Collection[str] = (), wide: str = "") -> Table:
    """An empty table. Numbers stand at the right; only the wide column may be broken into several lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=name != wide)
    return made
