"""The worker's metrics, bound to its model and replica, including the gauges set from its load report."""

from forebay.core.model import LoadReport, ReplicaState, WorkerSpec
from forebay.obs.metrics import Counter, Histogram, Metrics


class Meters:
    """The worker's metrics. Series that every request updates are looked up once."""

    def __init__(self, metrics: Metrics, spec: WorkerSpec, version: str) -> None:
        self._metrics = metrics
        self._labels = (spec.model, spec.replica)
        self.ttft = metrics.histogram("worker_ttft_seconds", *self._labels)
        self.tpot = metrics.histogram("worker_tpot_seconds", *self._labels)
        self.prompt_tokens = metrics.counter("worker_prompt_tokens_total", *self._labels)
        self.cached_tokens = metrics.counter("worker_cached_tokens_total", *self._labels)
        metrics.gauge("build_info", version, "worker").set(1)

    def requests(self, endpoint: str, code: str) -> Counter:
        """Requests of an endpoint by outcome code."""
        return self._metrics.counter("worker_requests_total", *self._labels, endpoint, code)

    def e2e(self, endpoint: str) -> Histogram:
        """Durations of the successful requests of an endpoint."""
        return self._metrics.histogram("worker_e2e_seconds", *self._labels, endpoint)

    def render(self, load: LoadReport, generated_tokens: int, *, kv_known: bool) -> bytes:
        """The Prometheus exposition, after setting the gauges from `load`."""
        gauges: dict[str, float] = {
            "worker_in_flight": load.in_flight,
            "worker_running": load.running,
            "worker_waiting": load.waiting,
            "worker_batch_fill_ratio": load.batch_fill,
            "worker_engine_up": load.state in (ReplicaState.READY, ReplicaState.DRAINING),
            "worker_engine_stalled_seconds": load.stalled_s,
        }
        if kv_known:
            gauges["worker_kv_used_tokens"] = load.kv_used_tokens
            gauges["worker_kv_total_tokens"] = load.kv_total_tokens
        for name, value in gauges.items():
            self._metrics.gauge(name, *self._labels).set(value)
        counters = {
            "worker_generated_tokens_total": generated_tokens,
            "worker_engine_restarts_total": load.engine_restarts,
        }
        for name, total in counters.items():
            counter = self._metrics.counter(name, *self._labels)
            counter.inc(total - counter.value)
        return self._metrics.render()
