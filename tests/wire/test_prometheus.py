"""Prometheus expositions of several processes merged into one, and invalid ones."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.obs.metrics import Metrics
from forebay.wire.prometheus import check, together

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def process(requests: int, code: str = "ok") -> str:
    metrics = Metrics()
    metrics.counter("requests_total", "chat", code).inc(requests)
    metrics.gauge("open_connections").set(requests)
    for n in range(requests):
        metrics.histogram("ttft_seconds", "chat").observe(n / 10)
    return metrics.render().decode()


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def labelled(found: Samples, who: str) -> Samples:
    return {(name, tuple(sorted((*labels, ("gateway", who))))): value for (name, labels), value in found.items()}


def test_merged_samples_have_a_process_label_and_their_values() -> None:
    texts = {"gateway-0": process(3), "gateway-1": process(4, 'a {"b\\ c=} d'), "gateway-2": ""}
    found = samples(together(texts, "gateway"))
    assert found == labelled(samples(texts["gateway-0"]), "gateway-0") | labelled(
        samples(texts["gateway-1"]), "gateway-1"
    )
    assert found["forebay_ttft_seconds_count", (("gateway", "gateway-1"), ("model", "chat"))] == 4


def test_families_of_two_processes_are_merged() -> None:
    lines = together({"a": process(1), "b": process(2)}, "gateway").splitlines()
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) > 2


@pytest.mark.parametrize("text", ["forebay_requests_total{ 3", ' {,  =="+Inf,', "a{,", "<html>"])
def test_malformed_exposition_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        check(text)
    check(process(2))
    check("")
