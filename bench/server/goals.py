"""What the model server is to reach beside its peers, and whether it has: ratios of figures of one run, no slack.

Each peer is held against Forebay over the same form of request: binary tensors against binary, JSON against JSON.
Latency is held against it twice: each of the two at 70 % of what it can do itself, so that the faster one has more to
do, and both at as many requests per second as the peer has then.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Model → server → load → figure. What could not be measured is not there."""
BARE: Final = "bare"
BARE_TUNED: Final = "bare_tuned"
BESIDE: Final = {
    "triton": "forebay",
    "triton_grpc": "forebay_grpc",
    "triton_json": "forebay_json",
    "litserve": "forebay_json",
    "bentoml": "forebay_json",
    "mlserver": "forebay_json",
}
"""Peer → what of ours it is held against."""
THROUGHPUT_LEAST: Final = 1.2
BARE_LEAST: Final = 0.95
P99_MOST: Final = 1.0
RECOMMENDER: Final = "recommender"
RECOMMENDER_P99_MS_MOST: Final = 10.0
RECOMMENDER_PER_S_LEAST: Final = 2000.0


class Judged(NamedTuple):
    """One goal for one server of ours, beside another server unless `beside` is empty."""

    model: str
    goal: str
    ours: str
    beside: str
    bound: float
    """A least or a most, as the goal says."""
    value: float
    met: bool


def load_beside(peer: str) -> str:
    """What the load is called that is as large as a peer's at 70 %."""
    return f"as_{peer}"


def judged(figures: Figures) -> list[dict[str, object]]:
    """Every goal that was measured."""
    rows = (row for model, servers in figures.items() for row in _rows(model, servers))
    return [{**row._asdict(), "value": round(row.value, 4)} for row in rows]


def _rows(model: str, servers: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[Judged]:
    def at_least(goal: str, ours: str, beside: str, bound: float, value: float) -> Judged:
        return Judged(model, f"{goal}, at least", ours, beside, bound, value, value >= bound)

    def at_most(goal: str, ours: str, beside: str, bound: float, value: float) -> Judged:
        return Judged(model, f"{goal}, at most", ours, beside, bound, value, value <= bound)

    def figure(server: str, load: str, name: str) -> float:
        return servers.get(server, {}).get(load, {}).get(name, 0.0)

    for beside, ours in [(BARE, ours) for ours in dict.fromkeys(BESIDE.values())] + list(BESIDE.items()):
        own, other = (figure(name, "closed", "per_s") for name in (ours, beside))
        if own and other:
            least = BARE_LEAST if beside == BARE else THROUGHPUT_LEAST
            yield at_least("throughput", ours, beside, least, own / other)
        other = figure(beside, "open", "p99_ms")
        for goal, load in (("p99, each at 70 %", "open"), ("p99, as many requests/s", load_beside(beside))):
            own = figure(ours, load, "p99_ms")
            if own and other:
                yield at_most(goal, ours, beside, P99_MOST, own / other)
    rate = figure("forebay", "open", "per_s")
    if model == RECOMMENDER and rate:
        yield at_least("requests/s at 70 %", "forebay", "", RECOMMENDER_PER_S_LEAST, rate)
        late = figure("forebay", "open", "p99_ms")
        yield at_most("p99 there, ms", "forebay", "", RECOMMENDER_P99_MS_MOST, late)
        open_loops = [run for load, run in servers["forebay"].items() if load != "closed"]
        most = max((run["per_s"] for run in open_loops if run["p99_ms"] <= RECOMMENDER_P99_MS_MOST), default=0.0)
        goal = f"requests/s with a p99 of {RECOMMENDER_P99_MS_MOST:.0f} ms or less"
        yield at_least(goal, "forebay", "", RECOMMENDER_PER_S_LEAST, most)
