"""A router that knows all but the arrivals to come: real queues, caches, speeds, and how long answers get."""

from collections.abc import Sequence
from random import Random

from forebay.sim.rivals.values import Rival, Seen, State, live


class Oracle(Rival):
    """The lowest predicted time to the first token, or to the last (`to_the_end`), with a price on new work.

    With price 0 each request gets what is best for itself alone. That is no bound for what can be reached: nobody
    pays for splitting a prefix over all caches. The price is how often the reading of its own prompt counts again.
    """

    __slots__ = ("_price", "_to_the_end")

    def __init__(self, *, to_the_end: bool = False, price: float = 0.0) -> None:
        self._to_the_end = to_the_end
        self._price = price

    def choose(self, request: Seen, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`. Raises ValueError if the truth is hidden from it."""
        return min(live(replicas), key=lambda at: (self._cost_s(request, replicas[at]), replicas[at].in_flight))

    def _cost_s(self, request: Seen, replica: State) -> float:
        truth = replica.truth
        if truth is None:
            raise ValueError(f"nothing is known of how {replica.id} really is")
        cost_s = truth.first_token_s(request) + self._price * truth.read_s(request)
        return cost_s + request.output_tokens * truth.token_s() if self._to_the_end else cost_s
