"""A router that knows everything but future arrivals: true queues, caches, speeds, and response lengths."""

from collections.abc import Sequence
from random import Random

from forebay.sim.rivals.values import Rival, RoutedRequest, State, live


class Oracle(Rival):
    """The lowest predicted time to the first token, or to the last (`to_the_end`), with a price on new work.

    With price 0 each request gets what is best for itself. That is no upper bound, as spreading a prefix over all
    caches costs it nothing. `price`: how many more times its own prefill counts.
    """

    __slots__ = ("_price", "_to_the_end")

    def __init__(self, *, to_the_end: bool = False, price: float = 0.0) -> None:
        self._to_the_end = to_the_end
        self._price = price

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`. Raises ValueError if the true state is not available."""
        return min(live(replicas), key=lambda at: (self._cost_s(request, replicas[at]), replicas[at].in_flight))

    def _cost_s(self, request: RoutedRequest, replica: State) -> float:
        truth = replica.truth
        if truth is None:
            raise ValueError(f"the true state of {replica.id} is not available")
        cost_s = truth.first_token_s(request) + self._price * truth.read_s(request)
        return cost_s + request.output_tokens * truth.token_s() if self._to_the_end else cost_s
