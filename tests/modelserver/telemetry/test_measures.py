"""Merging the metrics of several processes of a model."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.tensor.measures import MICRO_BATCH_ROWS, Family, Ledger, Measure, Series, merged
from forebay.modelserver.telemetry.metrics import exposition

BOUNDS = (1.0, 5.0)


def counter(value: float, name: str = "c", **labels: str) -> Family:
    return Family(name, Measure.COUNTER, "h", (Series(tuple(sorted(labels.items())), value),))


def gauge(value: float, set_ns: int = 0) -> Family:
    return Family("g", Measure.GAUGE, "", (Series((), value, set_ns),))


def histogram(*counts: int, bounds: tuple[float, ...] = BOUNDS) -> Family:
    return Family("h", Measure.HISTOGRAM, "", (Series((), float(sum(counts)), 0, bounds, counts),))


def test_counters_and_histograms_are_summed_and_the_latest_gauge_wins() -> None:
    assert merged([counter(1), counter(2, a="b"), counter(4)]) == (
        Family("c", Measure.COUNTER, "h", (Series((), 5), Series((("a", "b"),), 2))),
    )
    assert merged([histogram(1, 2, 3), histogram(4, 5, 6)]) == (histogram(5, 7, 9),)
    assert merged([gauge(1), gauge(2)]) == (gauge(3),)
    assert merged([gauge(1, 20), gauge(2, 10), gauge(7)]) == (gauge(1, 20),)


def test_conflicting_families_of_one_name_are_dropped() -> None:
    other = histogram(9, 9, bounds=(2.0,))
    assert merged([histogram(1, 1, 1), gauge(3)._replace(name="h"), other]) == (histogram(1, 1, 1),)
    assert len(merged([counter(1, a=str(n)) for n in range(9)], series_max=4)[0].series) == 4


def test_invalid_series_are_dropped() -> None:
    ledger = Ledger()
    ledger.hear(1, (histogram(1, 2), counter(1)._replace(series=(Series((), 1, 0, (1.0,)),)), gauge(1)))
    assert [len(family.series) for family in ledger.families()] == [0, 0, 1]


def test_metrics_of_backends_are_shown_and_custom_ones_with_names_of_ours_are_not() -> None:
    labels = (("model", "m"), ("version", "1"), ("row_bytes_below", "64"))
    found = (
        Family(MICRO_BATCH_ROWS, Measure.GAUGE, "", (Series(labels, 4.0),)),
        Family(MICRO_BATCH_ROWS, Measure.COUNTER, "a model's", (Series((), 7.0),)),
        Family("forebay_other", Measure.GAUGE, "a model's", (Series((), 7.0),)),
        Family("own", Measure.GAUGE, "a model's", (Series((), 7.0),)),
    )

    lines = exposition(found).decode().splitlines()

    assert [line for line in lines if not line.startswith("# HELP")] == [
        f"# TYPE {MICRO_BATCH_ROWS} gauge",
        f'{MICRO_BATCH_ROWS}{{model="m",version="1",row_bytes_below="64"}} 4',
        "# TYPE own gauge",
        "own 7",
    ]


@dataclass
class Process:
    counted: int = 0


@given(st.lists(st.tuples(st.sampled_from(["count", "say", "end", "crash"]), st.integers(0, 3)), max_size=60))
def test_merged_counter_never_decreases(events: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    processes = {number: Process() for number in range(4)}
    shown = 0.0
    for event, number in events:
        process = processes[number]
        if event == "count":
            process.counted += 1
        if event in ("say", "end"):
            ledger.hear(number, (counter(process.counted), gauge(1)))
        if event in ("end", "crash"):
            ledger.end(number)
            processes[number] = Process()
        now = next((each.series[0].value for each in ledger.families() if each.name == "c"), 0.0)
        assert now >= shown
        shown = now
    for number in processes:
        ledger.end(number)
    assert [each.name for each in ledger.families()] in ([], ["c"])
