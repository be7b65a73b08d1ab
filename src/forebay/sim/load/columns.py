"""Requests in columns: a week of traffic takes tens of megabytes; `Arrival`s are created on access."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat, starmap
from typing import TypeVar, overload

from forebay.sim.load.values import Arrival

T = TypeVar("T")


class Columns(Sequence[Arrival]):
    """A sequence of requests. Columns of blocks, tenants or bands without content are empty."""

    __slots__ = ("at_s", "bands", "blocks", "output_tokens", "prompt_tokens", "tenants")

    def __init__(
        self,
        at_s: "array[float]",
        prompt_tokens: "array[int]",
        output_tokens: "array[int]",
        *,
        blocks: Sequence[tuple[int, ...]] = (),
        tenants: Sequence[str] = (),
        bands: Sequence[str] = (),
    ) -> None:
        self.at_s = at_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.blocks = blocks
        self.tenants = tenants
        self.bands = bands

    def __len__(self) -> int:
        return len(self.at_s)

    @overload
    def __getitem__(self, place: int) -> Arrival: ...
    @overload
    def __getitem__(self, place: slice) -> "Columns": ...
    def __getitem__(self, place: int | slice) -> "Arrival | Columns":
        if isinstance(place, slice):
            return Columns(
                self.at_s[place],
                self.prompt_tokens[place],
                self.output_tokens[place],
                blocks=self.blocks[place],
                tenants=self.tenants[place],
                bands=self.bands[place],
            )
        return Arrival(
            self.at_s[place],
            self.prompt_tokens[place],
            self.output_tokens[place],
            self.blocks[place] if self.blocks else (),
            self.tenants[place] if self.tenants else "",
            self.bands[place] if self.bands else "",
        )

    def __iter__(self) -> Iterator[Arrival]:
        rows = zip(
            self.at_s,
            self.prompt_tokens,
            self.output_tokens,
            self.blocks or repeat(()),
            self.tenants or repeat(""),
            self.bands or repeat(""),
            strict=False,  # the defaults of empty columns never end
        )
        return starmap(Arrival, rows)

    def at(self, at_s: "array[float]") -> "Columns":
        """The same requests at other times (same length)."""
        return Columns(
            at_s,
            self.prompt_tokens,
            self.output_tokens,
            blocks=self.blocks,
            tenants=self.tenants,
            bands=self.bands,
        )

    def in_order(self) -> "Columns":
        """Sorted by time (stable)."""
        at_s = self.at_s
        if all(map(float.__le__, at_s, at_s[1:])):
            return self
        places = sorted(range(len(at_s)), key=at_s.__getitem__)
        return Columns(
            array("d", _picked(at_s, places)),
            array("i", _picked(self.prompt_tokens, places)),
            array("i", _picked(self.output_tokens, places)),
            blocks=_picked(self.blocks, places),
            tenants=_picked(self.tenants, places),
            bands=_picked(self.bands, places),
        )

    def from_zero(self) -> "Columns":
        """Times relative to the first request; they must be sorted."""
        first = self.at_s[0] if self.at_s else 0.0
        return self.at(array("d", (at - first for at in self.at_s))) if first else self


def columns(arrivals: Sequence[Arrival]) -> Columns:
    """Any requests, as columns."""
    if isinstance(arrivals, Columns):
        return arrivals
    blocks = [arrival.blocks for arrival in arrivals]
    tenants = [arrival.tenant for arrival in arrivals]
    bands = [arrival.band for arrival in arrivals]
    return Columns(
        array("d", (arrival.at_s for arrival in arrivals)),
        array("i", (arrival.prompt_tokens for arrival in arrivals)),
        array("i", (arrival.output_tokens for arrival in arrivals)),
        blocks=blocks if any(blocks) else (),
        tenants=tenants if any(tenants) else (),
        bands=bands if any(bands) else (),
    )


def _picked(column: Sequence[T], places: list[int]) -> list[T]:
    return [column[place] for place in places] if column else []
