"""The metric store: what it counts is what a Prometheus parser reads; labels are bounded."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.obs.metrics import CHILDREN_MAX, OVERFLOW, PREFIX, TABLE, Metrics


def test_every_metric_of_the_table_can_be_read_back() -> None:
    metrics = Metrics()
    for row in TABLE:
        labels = [f'v"\\\n{n}' for n in range(len(row.labels))]
        match row.kind:
            case "counter":
                metrics.counter(row.name, *labels).inc(2)
            case "gauge":
                metrics.gauge(row.name, *labels).set(2)
            case "histogram":
                metrics.histogram(row.name, *labels).observe(2)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    for row in TABLE:
        family = families[PREFIX + row.name.removesuffix("_total")]
        assert family.type == row.kind
        assert family.documentation == row.help
        for sample in family.samples:
            assert {k: v for k, v in sample.labels.items() if k != "le"} == {
                label: f'v"\\\n{n}' for n, label in enumerate(row.labels)
            }


def test_the_table_is_in_order() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
    for row in TABLE:
        assert row.help.endswith(".")
        assert (row.kind == "counter") == row.name.endswith("_total")
        assert (row.kind == "histogram") == bool(row.buckets)
        assert list(row.buckets) == sorted(row.buckets)


def test_a_histogram_counts_into_the_bucket_that_includes_its_bound() -> None:
    metrics = Metrics()
    child = metrics.histogram("ttft_seconds", "m")
    for value in (0.0, child.bounds[0], child.bounds[0] * 1.01, 1e9):
        child.observe(value)
    assert child.buckets()[0][1] == 2
    assert child.buckets()[1][1] == 3
    assert child.buckets()[-1] == ("+Inf", 4)


def test_children_are_kept_and_forgotten() -> None:
    metrics = Metrics()
    metrics.counter("requests_total", "m", "ok").inc()
    metrics.counter("requests_total", "m", "ok").inc()
    assert metrics.counter("requests_total", "m", "ok").value == 2
    assert metrics.labels("requests_total") == [("m", "ok")]
    metrics.forget("requests_total", "m", "ok")
    assert metrics.render() == b""


def test_too_many_label_values_share_one_child() -> None:
    metrics = Metrics()
    for n in range(CHILDREN_MAX + 10):
        metrics.counter("requests_total", str(n), "ok").inc()
    assert metrics.counter("requests_total", OVERFLOW, OVERFLOW).value == 10


def test_a_wrong_name_or_kind_or_label_count_is_a_mistake() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.counter("nothing")
    with pytest.raises(AssertionError):
        metrics.gauge("requests_total", "m", "ok")
    with pytest.raises(AssertionError):
        metrics.counter("requests_total", "m")
