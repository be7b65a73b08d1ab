"""The goals of the model server's benchmark: ratios of neighbours, and nothing unmeasured counts as met."""

from bench.server.goals import Duels, Loads, judged


def loads(per_s: float, p99_ms: float, **beside: float) -> Loads:
    others = {f"as_{peer}": {"per_s": 1.0, "p99_ms": late} for peer, late in beside.items()}
    return {"closed": {"per_s": per_s}, "open": {"per_s": 0.7 * per_s, "p99_ms": p99_ms}, **others}


def verdicts(duels: Duels) -> dict[tuple[object, ...], tuple[object, object]]:
    return {(row["goal"], row["ours"], row["beside"]): (row["value"], row["met"]) for row in judged({}, duels)}


def test_a_goal_is_held_against_the_median_of_the_ratios_of_duels() -> None:
    slow_minute = ("forebay", loads(60.0, 20.0, triton=8.0), "triton", loads(40.0, 16.0))
    duels = [
        ("forebay", loads(120.0, 10.0, triton=4.0), "triton", loads(100.0, 10.0)),
        slow_minute,
        ("forebay", loads(119.0, 9.0, triton=5.0), "triton", loads(100.0, 10.0)),
    ]

    assert verdicts({"embedding": duels}) == {
        ("throughput, at least", "forebay", "triton"): (1.2, True),
        ("p99, each at 70 % of its own throughput, at most", "forebay", "triton"): (1.0, True),
        ("p99, at the same rate, at most", "forebay", "triton"): (0.5, True),
    }


def test_beside_the_bare_runtime_less_is_asked_for_and_no_latency() -> None:
    bare: Loads = {"closed": {"per_s": 100.0}}

    found = verdicts({"embedding": [("forebay", {"closed": {"per_s": 96.0}}, "bare", bare)]})

    assert found == {("throughput, at least", "forebay", "bare"): (0.96, True)}


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    silent: Loads = {"closed": {"per_s": 0.0}}

    assert judged({}, {"embedding": [("forebay", loads(1.0, 1.0), "triton", silent)]}) == []
    assert judged({"recommender": {"forebay": {"closed": {"per_s": 9000.0}}}}, {}) == []


def test_the_recommender_is_judged_by_itself_at_any_load_that_was_measured() -> None:
    figures = {"recommender": {"forebay": loads(9000.0, 12.0) | {"as_triton": {"per_s": 3000.0, "p99_ms": 2.0}}}}

    assert [(row["goal"], row["value"], row["met"]) for row in judged(figures, {})] == [
        ("requests/s at 70 % load, at least", 6300.0, True),
        ("p99 at 70 % load, ms, at most", 12.0, False),
        ("requests/s with a p99 of 10 ms or less, at least", 3000.0, True),
    ]
