"""Definition of a metric."""

from typing import NamedTuple


class Row(NamedTuple):
    """Name, type and help text of a metric."""

    name: str
    kind: str
    help: str
