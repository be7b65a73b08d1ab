"""Tables of measurements in Markdown."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table with its title and a note."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def figure(value: float) -> str:
    """Three significant digits, or all digits of a large number's integer part."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:,.3g}"  # `g` would round that to 1e+03


def machine(described: Mapping[str, int | str], rounds: int, beside: str = "") -> str:
    """The machine, the number of rounds, and what else sets the figures apart."""
    often = "one round" if rounds == 1 else f"median of {rounds} rounds"
    processor = f" of {described['processor']}" if described.get("processor") else ""
    others = f", {beside}" if beside else ""
    return f"{described['cpus']} cores{processor}, Python {described['python']}, {often}{others}"


def shown(name: str) -> str:
    """A server's name as it is written."""
    return name.replace("_", "-")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(v) for v in line) + " |" for line in lines) + "\n"


def text(made: Table) -> str:
    """A table in Markdown, with its title and note."""
    note = [f"{made.note}\n"] if made.note else []
    return "\n".join([f"{made.title}\n", table(made.columns, made.rows), *note])


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
