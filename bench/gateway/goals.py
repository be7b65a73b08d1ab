"""What the gateway is to reach beside its peers, and whether it has: ratios of figures of one run, without slack."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.cli.measured.gateway import BUILD_BEFORE

Figures = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""Proxy → scenario → the figures of each time that it was measured."""
OURS: Final = ("forebay", "forebay_lean", "forebay_interpreted")
"""A goal is met, or missed, by the first one, which has everything on; the others are shown beside it."""
BARE: Final = ("nginx", "uvloop")
"""Pass bytes on and do nothing else, in C and on the event loop that Forebay runs on: what they miss themselves, the
machine hardly allows."""


@dataclass(frozen=True, slots=True)
class Goal:
    """At most `most` times what `peer` needs; without a peer, at most `most` of the figure's own unit."""

    text: str
    scenario: str
    figure: str
    most: float
    peer: str = ""


GOALS: Final = (
    Goal("CPU per 1 KB request vs smg", "request_1k", "cpu_us", 0.35, "smg"),
    Goal("CPU per 1 KB request vs Envoy", "request_1k", "cpu_us", 0.9, "envoy"),
    Goal("CPU per 1 KB request vs nginx", "request_1k", "cpu_us", 3.0, "nginx"),
    Goal("CPU per 1 KB request vs LiteLLM", "request_1k", "cpu_us", 1 / 150, "litellm"),
    Goal("CPU per 32 KB request vs smg", "request_32k", "cpu_us", 0.45, "smg"),
    Goal("CPU per stream event, 64 streams, vs smg", "event_64x1ms", "cpu_us", 0.7, "smg"),
    Goal("CPU per stream event, 64 streams, vs nginx", "event_64x1ms", "cpu_us", 1.5, "nginx"),
    Goal("CPU per stream event, 512 streams, vs smg", "event_512x5ms", "cpu_us", 0.7, "smg"),
    Goal("CPU per stream event, 512 streams, vs nginx", "event_512x5ms", "cpu_us", 1.5, "nginx"),
    Goal("share of events coalesced with others, 512 streams", "event_512x5ms", "coalesced", 0.02),
    Goal("share of events coalesced with others, half the event rate", "event_512x10ms", "coalesced", 0.02),
    Goal("share of events coalesced with others, a quarter of the event rate", "event_512x20ms", "coalesced", 0.02),
    Goal(
        "latency added to the first event, synchronised streams, p50, vs nginx", "ttft", "added_p50_us", 1.3, "nginx"
    ),
    Goal(
        "latency added to the first event, independent streams, p50, vs nginx",
        "ttft_random",
        "added_p50_us",
        1.3,
        "nginx",
    ),
    Goal(
        "latency added to the first event, polling cores, p50, vs nginx", "ttft_awake", "added_p50_us", 1.3, "nginx"
    ),
    Goal("memory per open stream, KB", "memory", "stream_kb", 10.0),
    Goal("bytes kept for resuming a stream, per byte of its text", "journal", "per_text_byte", 1.2),
)
BEFORE: Final = "forebay_before"
SINCE: Final = tuple(
    Goal(f"{text} {BUILD_BEFORE}", scenario, figure, 1.05, BEFORE)
    for text, scenario, figure in (
        ("CPU per 1 KB request", "request_1k", "cpu_us"),
        ("CPU per 32 KB request", "request_32k", "cpu_us"),
        ("CPU per stream event, 64 streams,", "event_64x1ms", "cpu_us"),
        ("CPU per stream event, 512 streams,", "event_512x5ms", "cpu_us"),
        ("CPU per stream event, 512 streams, half the event rate,", "event_512x10ms", "cpu_us"),
        ("latency added to the first event, synchronised streams, p50,", "ttft", "added_p50_us"),
        ("latency added to the first event, independent streams, p50,", "ttft_random", "added_p50_us"),
        ("memory per open stream", "memory", "stream_kb"),
    )
)
"""Where another build is measured, too: what has not become slower in between, give or take what a machine does."""


def values(goal: Goal, ours: str, figures: Figures) -> list[float]:
    """What a goal is held against, of each time that both were measured, one soon after the other.

    If one was measured more often, it is one ratio of medians; there is none beside a peer that came to nothing.
    """
    own, theirs = (
        [run[goal.figure] for run in figures.get(name, {}).get(goal.scenario, ()) if goal.figure in run]
        for name in (ours, goal.peer)
    )
    if not goal.peer:
        return own
    if len(own) != len(theirs) and own and theirs:
        own, theirs = [statistics.median(own)], [statistics.median(theirs)]
    return [mine / cost for mine, cost in zip(own, theirs, strict=False) if cost > 0]


def value(goal: Goal, ours: str, figures: Figures) -> float | None:
    """The median of `values`; None if there are none."""
    return statistics.median(found) if (found := values(goal, ours, figures)) else None


def judged(figures: Figures) -> list[dict[str, object]]:
    """Every goal with its values, and whether it is met: None if that was not measured."""
    rows: list[dict[str, object]] = []
    for goal in (*GOALS, *(SINCE if BEFORE in figures else ())):
        found = {ours: value(goal, ours, figures) for ours in OURS}
        first = found[OURS[0]]
        found |= {bare: None if goal.peer == bare else value(goal, bare, figures) for bare in BARE}
        shown = {name: None if v is None else round(v, 4) for name, v in found.items()}
        met = None if first is None else first <= goal.most
        each = [round(v, 4) for v in values(goal, OURS[0], figures)]
        rows.append(
            {
                "goal": goal.text,
                "most": goal.most,
                "ratio": bool(goal.peer),
                "met": met,
                "values": shown,
                "rounds": each,
            }
        )
    return rows
