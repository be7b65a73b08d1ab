"""What the model server is to reach beside its peers, and whether it has: ratios of figures of one run, no slack.

Each peer is held against Forebay over the same form of request: binary tensors against binary, JSON against JSON.
Latency is held against it twice: each of the two at 70 % of what it can do itself, so that the faster one has more to
do, and both at as many requests per second as the peer has then. What counts is the median of the ratios of two that
were measured one right after the other.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Model → server → load → figure. What could not be measured is not there."""
Loads = Mapping[str, Mapping[str, float]]
"""Load → figure, of one server."""
Duels = Mapping[str, Sequence[tuple[str, Loads, str, Loads]]]
"""Model → comparisons: ours and its figures, who it was compared with and that one's figures."""
BARE: Final = "bare"
BARE_HTTP: Final = "bare_http"
BARE_TUNED: Final = "bare_tuned"
BARE_WHOLE: Final = "bare_whole"
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


def judged(figures: Figures, duels: Duels) -> list[dict[str, object]]:
    """Every goal that was measured."""
    rows = [row for model, found in duels.items() for row in _compared(model, found)]
    rows += _recommender(figures.get(RECOMMENDER, {}))
    return [{**row._asdict(), "value": round(row.value, 4)} for row in rows]


def _compared(model: str, duels: Sequence[tuple[str, Loads, str, Loads]]) -> Iterator[Judged]:
    for ours, beside in dict.fromkeys((ours, beside) for ours, _, beside, _ in duels):
        fought = [(own, other) for name, own, peer, other in duels if (name, peer) == (ours, beside)]
        least = BARE_LEAST if beside == BARE else THROUGHPUT_LEAST
        throughput = _ratio([(own.get("closed"), other.get("closed")) for own, other in fought], "per_s")
        if throughput is not None:
            yield Judged(model, "throughput, at least", ours, beside, least, throughput, throughput >= least)
        for goal, load in (
            ("p99, each at 70 % of its own throughput", "open"),
            ("p99, at the same rate", load_beside(beside)),
        ):
            late = _ratio([(own.get(load), other.get("open")) for own, other in fought], "p99_ms")
            if late is not None:
                yield Judged(model, f"{goal}, at most", ours, beside, P99_MOST, late, late <= P99_MOST)


def _ratio(
    pairs: Sequence[tuple[Mapping[str, float] | None, Mapping[str, float] | None]], figure: str
) -> float | None:
    """The median of those that were measured on both sides; None without any."""
    found = [own[figure] / other[figure] for own, other in pairs if own and other and other[figure]]
    return statistics.median(found) if found else None


def _recommender(servers: Mapping[str, Loads]) -> Iterator[Judged]:
    """Requests per second and their p99, of the model that is microseconds of work."""
    open_loops = [run for load, run in servers.get("forebay", {}).items() if load != "closed"]
    if not open_loops or "open" not in servers["forebay"]:
        return

    def judge(goal: str, bound: float, value: float, met: bool) -> Judged:
        return Judged(RECOMMENDER, goal, "forebay", "", bound, value, met)

    rate, late = (servers["forebay"]["open"][name] for name in ("per_s", "p99_ms"))
    yield judge("requests/s at 70 % load, at least", RECOMMENDER_PER_S_LEAST, rate, rate >= RECOMMENDER_PER_S_LEAST)
    yield judge("p99 at 70 % load, ms, at most", RECOMMENDER_P99_MS_MOST, late, late <= RECOMMENDER_P99_MS_MOST)
    most = max((run["per_s"] for run in open_loops if run["p99_ms"] <= RECOMMENDER_P99_MS_MOST), default=0.0)
    goal = f"requests/s with a p99 of {RECOMMENDER_P99_MS_MOST:.0f} ms or less, at least"
    yield judge(goal, RECOMMENDER_PER_S_LEAST, most, most >= RECOMMENDER_PER_S_LEAST)
