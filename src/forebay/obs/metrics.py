"""The table of all metrics of all processes, and the per-process store behind `/metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

PREFIX: Final = "forebay_"
CHILDREN_MAX: Final = 2000
"""Most label combinations of one metric; the others are counted under `OVERFLOW`."""
OVERFLOW: Final = "other"
UNKNOWN: Final = "unknown"
"""The label value for names made up by clients."""
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

SECONDS: Final[tuple[float, ...]] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's definition."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


_M = ("model",)
_MR = ("model", "replica")
_ND = ("node", "device")

TABLE: tuple[Metric, ...] = (
    Metric("build_info", "gauge", ("version", "process"), "Always 1; the labels name the version and the process."),
    # gateway
    Metric(
        "requests_total",
        "counter",
        ("model", "code"),
        "Requests ended, by `ok`, `client_closed` or error code; model `unknown`: before a model was known.",
    ),
    Metric(
        "tenant_refusals_total",
        "counter",
        ("tenant", "code"),
        "Requests refused by their tenant's limits or model permissions.",
    ),
    Metric(
        "request_duration_seconds",
        "histogram",
        _M,
        "Successful requests, from receipt of the whole request to the end of the answer.",
        SECONDS,
    ),
    Metric(
        "ttft_seconds",
        "histogram",
        _M,
        "Time to first token: from receipt of the whole request to the stream's first event.",
        SECONDS,
    ),
    Metric("tpot_seconds", "histogram", _M, "Time per output token after the first, of streams.", TOKEN_SECONDS),
    Metric("prompt_tokens_total", "counter", _M, "Prompt tokens of requests that were answered, fully or in part."),
    Metric("completion_tokens_total", "counter", _M, "Completion tokens of answers, including interrupted ones."),
    Metric("cached_tokens_total", "counter", _M, "Prompt tokens served from a prefix cache."),
    Metric("stream_events_total", "counter", _M, "Server-sent events relayed."),
    Metric("queue_depth", "gauge", _M, "Requests waiting in the gateway for a replica."),
    Metric(
        "queue_wait_seconds",
        "histogram",
        _M,
        "Queue waits, before each attempt and of requests that gave up.",
        SECONDS,
    ),
    Metric("retries_total", "counter", ("model", "reason"), "Attempts retried on another replica."),
    Metric("resumes_total", "counter", ("model", "reason"), "Streams that another replica was asked to resume."),
    Metric(
        "hedges_total",
        "counter",
        ("model", "outcome"),
        "Slow requests also sent to a second replica, which `won` or `lost`.",
    ),
    Metric(
        "fallbacks_total",
        "counter",
        ("model", "trouble"),
        "Requests passed on to a fallback model: `trouble` is `saturated` or `down`, or the error code by which a "
        "fallback model rejected them.",
    ),
    Metric(
        "preemptions_total", "counter", ("model", "band"), "Attempts of a priority band preempted by urgent requests."
    ),
    Metric(
        "mirrored_requests_total",
        "counter",
        ("model", "outcome"),
        "Requests mirrored to the canary: `ok`, `failed`, `no_room`, `late`, or `gave_way` to a client's request.",
    ),
    Metric("in_flight", "gauge", _M, "Requests of this gateway that replicas are working on."),
    Metric("resume_text_bytes", "gauge", _M, "Text of unfinished streams, kept to resume them elsewhere."),
    Metric("records_lost_total", "counter", (), "Decision records and audit lines that could not be written."),
    Metric(
        "records_failing",
        "gauge",
        (),
        "Kinds of records that cannot be written now, of decisions, audit log and usage. They are held in memory.",
    ),
    Metric("open_connections", "gauge", (), "Open client connections."),
    Metric("tls_certificate_expiry_seconds", "gauge", (), "Expiry of the certificate in use, Unix time."),
    Metric(
        "tls_reloads_total", "counter", ("outcome",), "Reloads of changed certificate files: `taken` or `broken`."
    ),
    Metric("replica_up", "gauge", _MR, "1 if the gateway may route to the replica."),
    Metric("replica_in_flight", "gauge", _MR, "Requests of this gateway in flight at a replica."),
    Metric("replica_queue_tokens", "gauge", _MR, "Estimated prompt tokens queued at a replica."),
    Metric(
        "replica_handicap",
        "gauge",
        _MR,
        "Factor on the replica's cost in routing: above 1 after a start, or when slow.",
    ),
    Metric("replica_breaker", "gauge", (*_MR, "state"), "1 for the current state of the replica's circuit breaker."),
    Metric(
        "replica_trust", "gauge", _MR, "Share of the expected cached prompt tokens that were really cached, 0 to 1."
    ),
    # worker
    Metric(
        "worker_requests_total",
        "counter",
        (*_MR, "endpoint", "code"),
        "Requests ended, by `ok`, `client_closed` or error code.",
    ),
    Metric(
        "worker_ttft_seconds",
        "histogram",
        _MR,
        "From receipt of the whole request to the engine's first token.",
        SECONDS,
    ),
    Metric(
        "worker_tpot_seconds", "histogram", _MR, "Time per output token of a sequence after its first.", TOKEN_SECONDS
    ),
    Metric(
        "worker_e2e_seconds",
        "histogram",
        (*_MR, "endpoint"),
        "Successful requests, from receipt of the whole request to the end of its answer.",
        SECONDS,
    ),
    Metric("worker_prompt_tokens_total", "counter", _MR, "Prompt tokens processed, answered or not."),
    Metric("worker_cached_tokens_total", "counter", _MR, "Prompt tokens served from the prefix cache."),
    Metric("worker_generated_tokens_total", "counter", _MR, "Tokens generated by the engine, delivered or not."),
    Metric("worker_in_flight", "gauge", _MR, "Requests in flight."),
    Metric("worker_running", "gauge", _MR, "Sequences that the engine is running."),
    Metric("worker_waiting", "gauge", _MR, "Sequences waiting for the engine."),
    Metric("worker_kv_used_tokens", "gauge", _MR, "KV cache held by running sequences, tokens."),
    Metric("worker_kv_total_tokens", "gauge", _MR, "Size of the KV cache, tokens."),
    Metric(
        "worker_batch_fill_ratio",
        "gauge",
        _MR,
        "Size of the latest batches relative to the largest possible one, 0 to 1.",
    ),
    Metric("worker_engine_up", "gauge", _MR, "1 if the engine is loaded and not stalled."),
    Metric("worker_engine_stalled_seconds", "gauge", _MR, "How long the engine has been unresponsive."),
    Metric("worker_engine_restarts_total", "counter", _MR, "Replacements of the engine process."),
    # control
    Metric("replicas", "gauge", ("model", "state"), "Wanted replicas of the model, by state."),
    Metric("standby_replicas", "gauge", _M, "Ready replicas of the model kept on standby."),
    Metric("promotions_total", "counter", _M, "Standby replicas promoted to serve requests."),
    Metric("rollout_share", "gauge", ("model",), "Share of requests sent to the revision being rolled out."),
    Metric(
        "scale_wanted",
        "gauge",
        ("model",),
        "Replicas wanted by the autoscaler, or in shadow mode those it would want.",
    ),
    Metric("scale_asked", "gauge", ("model",), "Replicas it would want without the cluster's `limits`."),
    Metric(
        "scale_decisions_total",
        "counter",
        ("model", "reason"),
        "Changes of the wanted number of replicas, by reason.",
    ),
    Metric("restarts_total", "counter", ("unit",), "Replicas and gateways replaced because they died or hung."),
    Metric("crash_loops", "gauge", (), "Units in restart backoff after failing at least twice in a row."),
    Metric(
        "reconcile_duration_seconds",
        "histogram",
        (),
        "Duration of one reconcile round: observe, decide, act.",
        SECONDS,
    ),
    Metric("reconcile_failures_total", "counter", ("step",), "Rounds in which a step failed, to be retried."),
    Metric("device_state", "gauge", (*_ND, "state"), "1 for the current state of the GPU."),
    Metric("device_temperature_celsius", "gauge", _ND, "Temperature of the GPU."),
    Metric("device_duty_ratio", "gauge", _ND, "Share of time in which the GPU was busy, 0 to 1."),
    Metric("device_memory_used_bytes", "gauge", _ND, "GPU memory in use."),
    Metric("device_weight", "gauge", _ND, "Assumed share of the GPU's usual throughput; below 1 if throttled."),
    Metric("device_errors_total", "counter", (*_ND, "remedy"), "GPU errors, by remedy."),
    Metric("device_source_up", "gauge", ("node",), "1 while the devices of the node can be read."),
    Metric("node_drained", "gauge", ("node",), "1 while the node is taken out of service."),
    Metric("snapshot_version", "gauge", (), "Version of the routing snapshot published to the gateways."),
    Metric("control_leader", "gauge", (), "1 while this control is the leader, else 0."),
    Metric("control_epoch", "gauge", (), "Term of the leading control, as far as known; 0 with a single control."),
)


class Counter:
    """A value that only increases."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, n: float = 1) -> None:
        """Increase the value by `n`."""
        self.value += n


class Gauge:
    """A value that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Set the value."""
        self.value = value

    def inc(self, n: float = 1) -> None:
        """Change the value by `n`."""
        self.value += n


class Histogram:
    """Counts of observations by bucket, with their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        at = 0
        for bound in self.bounds:  # few, and the first are the most likely: calling bisect costs more
            if value <= bound:
                break
            at += 1
        self.counts[at] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with their `le`."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return rows


Child = Counter | Gauge | Histogram
_T = TypeVar("_T", Counter, Gauge, Histogram)


class Metrics:
    """The metrics of one process. Keep a reference to children that are used often: a lookup costs a dict access."""

    def __init__(self, table: tuple[Metric, ...] = TABLE) -> None:
        self._rows = {row.name: row for row in table}
        self._children: dict[str, dict[tuple[str, ...], Child]] = {row.name: {} for row in table}

    def counter(self, name: str, *labels: str) -> Counter:
        """The counter of these label values."""
        return self._child(Counter, name, labels)

    def gauge(self, name: str, *labels: str) -> Gauge:
        """The gauge of these label values."""
        return self._child(Gauge, name, labels)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram of these label values."""
        return self._child(Histogram, name, labels)

    def labels(self, name: str) -> list[tuple[str, ...]]:
        """The label values of all children of a metric."""
        return list(self._children[name])

    def forget(self, name: str, *labels: str) -> None:
        """Remove a child, so that it is no longer reported."""
        self._children[name].pop(labels, None)

    def render(self) -> bytes:
        """All metrics that have a value, in Prometheus text format."""
        return generate_latest(self)  # only needs a registry with collect()

    def collect(self) -> Iterator[Family]:
        """The metrics as prometheus_client's families."""
        for row in self._rows.values():
            children = self._children[row.name]
            if children:
                yield _family(row, children)

    def _child(self, cls: type[_T], name: str, labels: tuple[str, ...]) -> _T:
        children = self._children[name]
        child = children.get(labels)
        if child is None:
            row = self._rows[name]
            assert len(labels) == len(row.labels), f"{name} has the labels {row.labels}"
            if len(children) >= CHILDREN_MAX:
                labels = (OVERFLOW,) * len(labels)
            new = Histogram(row.buckets) if row.kind == "histogram" else Gauge() if row.kind == "gauge" else Counter()
            child = children.setdefault(labels, new)
        assert isinstance(child, cls), f"{name} is a {self._rows[name].kind}"
        return child


def _family(row: Metric, children: dict[tuple[str, ...], Child]) -> Family:
    name = PREFIX + row.name
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if row.kind == "histogram":
        family = HistogramMetricFamily(name, row.help, labels=row.labels)
    elif row.kind == "gauge":
        family = GaugeMetricFamily(name, row.help, labels=row.labels)
    else:
        family = CounterMetricFamily(name, row.help, labels=row.labels)
    for labels, child in children.items():
        if isinstance(child, Histogram):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, buckets=child.buckets(), sum_value=child.sum)
        else:
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, child.value)
    return family
