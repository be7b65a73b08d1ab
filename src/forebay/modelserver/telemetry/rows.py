"""What a metric is in the table that `/metrics` shows."""

from typing import NamedTuple


class Row(NamedTuple):
    """One metric of the table."""

    name: str
    kind: str
    help: str
