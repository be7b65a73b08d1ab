"""Which model a request goes to: aliases, rules on properties of the request, and fallback models."""

from forebay.core.dispatch.table import (
    Chosen,
    Facts,
    Table,
    fall_back,
    make_table,
    may_fall_back,
    resolve,
    split,
    unfold,
)

__all__ = [
    "Chosen",
    "Facts",
    "Table",
    "fall_back",
    "make_table",
    "may_fall_back",
    "resolve",
    "split",
    "unfold",
]
