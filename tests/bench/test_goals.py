"""The goals of the gateway's benchmark: what is held against what, and that nothing unmeasured counts as met."""

import pytest
from bench.gateway.goals import GOALS, Goal, judged, value

RATIO = Goal("g", "s", "cpu_us", 0.5, "peer")
PLAIN = Goal("g", "s", "cpu_us", 0.5)


@pytest.mark.parametrize(
    ("goal", "ours", "theirs", "expected"),
    [
        (RATIO, 3.0, 6.0, 0.5),
        (RATIO, None, 6.0, None),
        (RATIO, 3.0, None, None),
        (RATIO, 3.0, 0.0, None),
        (RATIO, 3.0, -1.0, None),
        (PLAIN, 3.0, None, 3.0),
        (PLAIN, None, None, None),
    ],
)
def test_a_goal_is_held_against_a_peer_or_stands_alone(
    goal: Goal, ours: float | None, theirs: float | None, expected: float | None
) -> None:
    given = {"own": ours, "peer": theirs}
    figures = {name: {"s": [{"cpu_us": cost}]} for name, cost in given.items() if cost is not None}

    assert value(goal, "own", figures) == expected


def test_only_what_was_measured_is_met_or_missed_and_exactly_enough_is_enough() -> None:
    figures = {
        "forebay": {"request_1k": [{"cpu_us": 35.0}], "memory": [{"stream_kb": 10.0}]},
        "forebay_lean": {"request_1k": [{"cpu_us": 20.0}], "event_512x5ms": [{"coalesced": 0.0}]},
        "smg": {"request_1k": [{"cpu_us": 100.0}]},
        "envoy": {"request_1k": [{"cpu_us": 35.0}]},
    }
    rows = {(str(row["goal"]), row["met"]) for row in judged(figures)}
    met = {text: verdict for text, verdict in rows if verdict is not None}

    assert len(rows) == len(GOALS)
    assert met == {
        "CPU per 1 KB request vs smg": True,
        "CPU per 1 KB request vs Envoy": False,
        "memory per open stream, KB": True,
    }


def test_a_ratio_is_one_of_neighbours_and_the_median_of_all() -> None:
    slow_minute = [{"cpu_us": cost} for cost in (30.0, 60.0, 33.0)]
    peer = [{"cpu_us": cost} for cost in (40.0, 75.0, 40.0)]
    figures = {"own": {"s": slow_minute}, "peer": {"s": peer}}

    assert value(RATIO, "own", figures) == 0.8, "of medians it would be 33 / 40"

    figures["peer"]["s"] = peer[:2]
    assert value(RATIO, "own", figures) == 33.0 / 57.5, "who were not measured together have no neighbours"


def test_the_figures_of_the_lean_gateway_are_shown_beside_and_decide_nothing() -> None:
    figures = {"forebay": {"memory": [{"stream_kb": 11.0}]}, "forebay_lean": {"memory": [{"stream_kb": 9.0}]}}
    (row,) = (row for row in judged(figures) if row["met"] is not None)

    assert row["met"] is False
    ours = {"forebay": 11.0, "forebay_lean": 9.0, "forebay_interpreted": None}
    assert row["values"] == {**ours, "nginx": None, "uvloop": None}


def test_what_a_bare_relay_would_reach_is_shown_except_beside_itself() -> None:
    figures = {"nginx": {"event_64x1ms": [{"cpu_us": 7.4}]}, "smg": {"event_64x1ms": [{"cpu_us": 10.0}]}}
    shown = {row["goal"]: row["values"] for row in judged(figures)}
    others = {"forebay": None, "forebay_lean": None, "forebay_interpreted": None, "uvloop": None}

    assert shown["CPU per stream event, 64 streams, vs smg"] == {**others, "nginx": 0.74}
    assert shown["CPU per stream event, 64 streams, vs nginx"] == {**others, "nginx": None}
