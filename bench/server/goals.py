"""What the model server is to reach beside its peers, and whether it has: ratios of figures of one run, no slack.

Each peer is held against Forebay over the same form of request: binary tensors against binary, JSON against JSON.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Model → server → load → figure."""
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
RECOMMENDER_P99_MS_MOST: Final = 10.0
RECOMMENDER_PER_S_LEAST: Final = 2000.0


class Judged(NamedTuple):
    """One goal. `bound` is a least or a most, as the text says."""

    goal: str
    bound: float
    value: float
    met: bool


def judged(figures: Figures) -> list[dict[str, object]]:
    """Every goal that was measured."""
    return [{**row._asdict(), "value": round(row.value, 4)} for row in _rows(figures)]


def _rows(figures: Figures) -> Iterator[Judged]:
    for model, servers in figures.items():
        bare = servers.get("bare", {}).get("closed", {}).get("per_s")
        for ours in sorted(set(BESIDE.values()) & servers.keys()):
            if bare:
                share = servers[ours]["closed"]["per_s"] / bare
                text = f"{model}: throughput of {ours} beside the bare runtime, at least"
                yield Judged(text, BARE_LEAST, share, share >= BARE_LEAST)
        for peer, ours in BESIDE.items():
            if peer in servers and ours in servers:
                more = servers[ours]["closed"]["per_s"] / servers[peer]["closed"]["per_s"]
                text = f"{model}: throughput of {ours} beside {peer}, at least"
                yield Judged(text, THROUGHPUT_LEAST, more, more >= THROUGHPUT_LEAST)
                slower = servers[ours]["open"]["p99_ms"] / servers[peer]["open"]["p99_ms"]
                yield Judged(f"{model}: p99 of {ours} beside {peer}, at most", P99_MOST, slower, slower <= P99_MOST)
        if model == "recommender" and "forebay" in servers:
            rate = servers["forebay"]["open"]["per_s"]
            yield Judged(
                "recommender: requests/s of the open loop, at least",
                RECOMMENDER_PER_S_LEAST,
                rate,
                rate >= RECOMMENDER_PER_S_LEAST,
            )
            late = servers["forebay"]["open"]["p99_ms"]
            yield Judged(
                "recommender: p99 there, ms, at most", RECOMMENDER_P99_MS_MOST, late, late <= RECOMMENDER_P99_MS_MOST
            )
