"""Merging expositions: sums, the exceptions, and what is not an exposition."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.obs.metrics import TABLE, Metrics
from forebay.wire.prometheus import merge


def process(requests: int, up: int) -> Metrics:
    metrics = Metrics()
    metrics.counter("requests_total", "chat", "ok").inc(requests)
    metrics.gauge("replica_up", "chat", "chat-0").set(up)
    metrics.gauge("open_connections").set(requests)
    for n in range(requests):
        metrics.histogram("ttft_seconds", "chat").observe(n / 10)
    return metrics


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_counters_histograms_and_gauges_are_summed_unless_a_rule_says_otherwise() -> None:
    rules = {"forebay_" + row.name: row.merge for row in TABLE}
    merged = samples(merge([process(3, 1).render().decode(), process(4, 0).render().decode()], rules))
    assert merged["forebay_requests_total", (("code", "ok"), ("model", "chat"))] == 7
    assert merged["forebay_open_connections", ()] == 7
    assert merged["forebay_ttft_seconds_count", (("model", "chat"),)] == 7
    assert merged["forebay_ttft_seconds_bucket", (("le", "0.1"), ("model", "chat"))] == 4
    assert merged["forebay_ttft_seconds_sum", (("model", "chat"),)] == pytest.approx(0.9)
    assert merged["forebay_replica_up", (("model", "chat"), ("replica", "chat-0"))] == 0


def test_merging_one_changes_no_value() -> None:
    text = process(5, 1).render()
    assert samples(merge([text.decode()], {})) == samples(text)


def test_what_is_no_exposition_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r".+"):
        merge(["forebay_requests_total{ 3"], {})


@pytest.mark.parametrize("line", [' {,  =="+Inf,', "a{,"])
def test_what_no_process_of_ours_would_say_is_no_exposition(line: str) -> None:
    with pytest.raises(ValueError, match=r"no exposition|could not convert"):
        merge([line], {})
