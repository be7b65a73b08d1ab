"""Replicas as routers see them, and callbacks for the requests that a router has placed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from forebay.sim.rivals import Report, Rival, RoutedRequest, State


def states(count: int, **fields: Sequence[object]) -> list[State]:
    """So many replicas; of each field one value for each."""
    made = [State(f"chat-{at}") for at in range(count)]
    for name, values in fields.items():
        for state, value in zip(made, values, strict=True):
            setattr(state, name, value)
    return made


def ask(id: int, *blocks: int, tokens: int = 0, **more: object) -> RoutedRequest:
    """A request of these blocks of 512 tokens."""
    return RoutedRequest(id, tokens or 512 * len(blocks), blocks)._replace(**more)


class Known(NamedTuple):
    """A replica whose truth is simple."""

    queue_s: float
    prompt_s: float
    answer_token_s: float

    def first_token_s(self, request: RoutedRequest) -> float:
        return self.queue_s + self.prompt_s

    def read_s(self, request: RoutedRequest) -> float:
        return self.prompt_s

    def token_s(self) -> float:
        return self.answer_token_s


@dataclass
class Gateway:
    """One router in front of replicas whose answers begin and end when the test says so."""

    rival: Rival
    replicas: list[State]
    now: float = 0.0
    rng: Random = field(default_factory=lambda: Random(1))
    open: dict[int, tuple[RoutedRequest, State]] = field(default_factory=dict)

    def place(self, request: RoutedRequest) -> int:
        at = self.rival.choose(request, self.replicas, self.now, self.rng)
        self.put(request, at)
        return at

    def put(self, request: RoutedRequest, at: int) -> None:
        replica = self.replicas[at]
        assert replica.alive
        self.rival.sent(request, replica, self.now)
        replica.in_flight += 1
        self.open[request.id] = request, replica

    def begin(self, id: int) -> None:
        self.rival.first_token(*self.open[id], self.now)

    def end(self, id: int) -> None:
        request, replica = self.open.pop(id)
        replica.in_flight -= 1
        self.rival.done(request, replica, self.now)

    def finish(self, request: RoutedRequest, at: int) -> None:
        """The whole life of a request that goes there."""
        self.put(request, at)
        self.begin(request.id)
        self.end(request.id)


def waiting(*counts: int) -> list[Report]:
    return [Report(0.0, waiting=count) for count in counts]
