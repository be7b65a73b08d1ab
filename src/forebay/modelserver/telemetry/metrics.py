"""Metrics of a model server: Triton's `nv_…` metrics, which keep existing dashboards working, and our own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.core.serving.errors import Refused
from forebay.core.serving.statistics import ModelStatistics
from forebay.engines.tensor.measures import MICRO_BATCH_ROWS, Family, Measure, Series
from forebay.modelserver.models.life.memory import MemoryUse
from forebay.modelserver.models.running.caching import Cache
from forebay.modelserver.ports import Models
from forebay.modelserver.telemetry.gpus import TABLE as GPU_TABLE
from forebay.modelserver.telemetry.gpus import Gpus
from forebay.modelserver.telemetry.latencies import FIRST_RESPONSE_MS, PHASES, QUANTILES, Latencies, Latency
from forebay.modelserver.telemetry.rows import Row
from forebay.obs.metrics import PREFIX, Histogram

FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"
Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """One line. `suffix` is appended to the name in histograms and summaries."""

    labels: Labels
    value: float
    suffix: str = ""


SUCCESS: Final = Row("nv_inference_request_success", "counter", "Requests answered successfully.")
FAILURE: Final = Row(
    "nv_inference_request_failure", "counter", "Requests that failed after they were queued, by reason."
)
COUNT: Final = Row(
    "nv_inference_count", "counter", "Inferences performed, one per batch row, without cached responses."
)
EXECUTIONS: Final = Row("nv_inference_exec_count", "counter", "Batch executions.")
PENDING: Final = Row("nv_inference_pending_request_count", "gauge", "Requests waiting for a model instance.")
DURATIONS: Final[Mapping[str, Row]] = {
    "success": Row(
        "nv_inference_request_duration_us", "counter", "Total request duration, from arrival to end, microseconds."
    ),
    "queue": Row(
        "nv_inference_queue_duration_us", "counter", "Total time requests spent in the queue, microseconds."
    ),
    "compute_input": Row(
        "nv_inference_compute_input_duration_us", "counter", "Total time spent preparing inputs, microseconds."
    ),
    "compute_infer": Row(
        "nv_inference_compute_infer_duration_us", "counter", "Total time spent executing models, microseconds."
    ),
    "compute_output": Row(
        "nv_inference_compute_output_duration_us", "counter", "Total time spent collecting outputs, microseconds."
    ),
}
"""By the name of the duration in the statistics."""
LOAD: Final = Row("nv_model_load_duration_secs", "gauge", "Time it took to load the model, seconds.")
CACHE: Final[Mapping[str, tuple[Row, Row]]] = {
    "cache_hit": (
        Row("nv_cache_num_hits_per_model", "counter", "Requests answered from the response cache."),
        Row("nv_cache_hit_duration_per_model", "counter", "Total time of lookups that hit, microseconds."),
    ),
    "cache_miss": (
        Row("nv_cache_num_misses_per_model", "counter", "Requests that missed the response cache and succeeded."),
        Row(
            "nv_cache_miss_duration_per_model",
            "counter",
            "Total time of lookups that missed and of insertions, microseconds.",
        ),
    ),
}
CACHE_SIZE: Final[Mapping[str, Row]] = {
    "util": Row("nv_cache_util", "gauge", "Used share of the response cache, 0 to 1."),
    "entries": Row("nv_cache_num_entries", "gauge", "Responses in the response cache."),
    "hits": Row("nv_cache_num_hits", "gauge", "Requests answered from the response cache, of all models."),
    "misses": Row("nv_cache_num_misses", "gauge", "Requests that missed the response cache, of all models."),
    "lookups": Row("nv_cache_num_lookups", "gauge", "Requests looked up in the response cache, of all models."),
    "evictions": Row("nv_cache_num_evictions", "gauge", "Responses evicted from the response cache to make room."),
    "lookup_ns": Row("nv_cache_lookup_duration", "gauge", "Total time of cache lookups, microseconds."),
    "insertion_ns": Row("nv_cache_insertion_duration", "gauge", "Total time of cache insertions, microseconds."),
}
"""Gauges, as in Triton."""
FIRST: Final = Row(FIRST_RESPONSE, "histogram", "Time to the first response of decoupled models.")
SUMMARIES: Final[Mapping[str, Row]] = {
    phase: Row(
        f"nv_inference_{phase}_summary_us",
        "summary",
        f"Quantiles of {phase} time since the model was loaded, microseconds.",
    )
    for phase in PHASES
}
CPU: Final = Row("nv_cpu_utilization", "gauge", "CPU utilization since the last scrape, 0 to 1.")
CPU_TOTAL: Final = Row("nv_cpu_memory_total_bytes", "gauge", "Total memory of the machine.")
CPU_USED: Final = Row("nv_cpu_memory_used_bytes", "gauge", "Used memory of the machine.")
SECONDS: Final = Row(
    "forebay_modelserver_request_seconds",
    "histogram",
    "Successful requests, from arrival at their model to the end of the answer.",
)
READY: Final = Row("forebay_modelserver_ready", "gauge", "1 if the server and its models are ready.")
TRACES_LOST: Final = Row("forebay_modelserver_traces_lost_total", "counter", "Traces that could not be written.")
CERTIFICATE_ENDS: Final = Row(
    "forebay_modelserver_tls_certificate_expiry_seconds",
    "gauge",
    "Expiry of the gRPC server certificate, Unix time.",
)
MEMORY_BUDGET: Final = Row(
    "forebay_modelserver_memory_budget_bytes",
    "gauge",
    "Memory budget of all models together; only with --memory-budget.",
)
MEMORY_USED: Final = Row(
    "forebay_modelserver_memory_used_bytes", "gauge", "Memory held by models under the budget, as last measured."
)
RESIDENT: Final = Row("forebay_modelserver_models_resident", "gauge", "Loaded model versions under the budget.")
SLEEPING: Final = Row(
    "forebay_modelserver_models_sleeping",
    "gauge",
    "Model versions unloaded under the budget, which a request would load again.",
)
SWAPS: Final = Row(
    "forebay_modelserver_swaps_total",
    "counter",
    "Model versions unloaded (`sleep`) and loaded again (`wake`) under the budget, by `event`.",
)
MICRO_BATCH: Final = Row(
    MICRO_BATCH_ROWS,
    "gauge",
    "Rows of a model's largest batches run at once, for rows with fewer input bytes than `row_bytes_below`.",
)
TABLE: Final = (
    SUCCESS, FAILURE, COUNT, EXECUTIONS, *DURATIONS.values(), PENDING, LOAD,
    *(row for pair in CACHE.values() for row in pair), *CACHE_SIZE.values(),
    FIRST, *SUMMARIES.values(), CPU, CPU_TOTAL, CPU_USED,
    *GPU_TABLE, SECONDS, READY, MEMORY_BUDGET, MEMORY_USED, RESIDENT, SLEEPING, SWAPS, MICRO_BATCH,
    TRACES_LOST, CERTIFICATE_ENDS,
)  # fmt: skip
"""All metrics, in display order."""
NAMES: Final = frozenset(row.name for row in TABLE)


class ServerMetrics:
    """Renders the metrics of one server."""

    def __init__(
        self,
        models: Models,
        latencies: Latencies,
        *,
        counters: bool = True,
        summaries: bool = False,
        quantiles: Sequence[float] = QUANTILES,
    ) -> None:
        self._models = models
        self._latencies = latencies
        self._counters = counters
        """Whether latency counters are shown."""
        self._summaries = summaries
        self._quantiles = quantiles
        self._machine = Machine()
        self.gpus: Gpus | None = None
        self.traces_lost = 0
        self.memory: MemoryUse | None = None
        """None: there is no memory budget."""
        self.cache: Cache | None = None
        """None: there is no response cache."""
        self.certificate_ends_s: float | None = None
        self.own: Sequence[Family] = ()
        """Metrics of the models' processes: custom ones, and those of backends."""

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        found: dict[Row, list[Sample]] = {row: [] for row in TABLE}
        with suppress(Refused):  # raises before the start
            served = self._models.statistics("", "")
            self._latencies.forget_all_but({(each.name, each.version) for each in served})
            for each in served:
                self._add_model(found, each)
        for (model, version), latency in sorted(self._latencies.known.items()):
            self._add_latency(found, (("model", model), ("version", version)), latency)
        for row, value in self._machine.look():
            found[row].append(Sample((), value))
        for row, gpu, value in self.gpus.look() if self.gpus is not None else ():
            found[row].append(Sample((("gpu_uuid", gpu),), value))
        found[READY].append(Sample((), float(self._models.ready)))
        if self.memory is not None:
            self._add_memory(found, self.memory)
        if self.cache is not None:
            for row, number in _cache_size(self.cache):
                found[row].append(Sample((), number))
        found[TRACES_LOST].append(Sample((), float(self.traces_lost)))
        if self.certificate_ends_s is not None:
            found[CERTIFICATE_ENDS].append(Sample((), self.certificate_ends_s))
        return "".join(_lines(found)).encode() + exposition(self.own)

    def _add_model(self, found: Mapping[Row, list[Sample]], model: ModelStatistics) -> None:
        labels = (("model", model.name), ("version", model.version))
        found[SUCCESS].append(Sample(labels, model.success.count))
        for reason, number in model.failures.items():
            found[FAILURE].append(Sample((*labels, ("reason", str(reason))), number))
        found[COUNT].append(Sample(labels, model.inference_count))
        found[EXECUTIONS].append(Sample(labels, model.execution_count))
        found[PENDING].append(Sample(labels, model.pending))
        found[LOAD].append(Sample(labels, model.load_s))
        if self._counters:
            for name, row in DURATIONS.items():
                found[row].append(Sample(labels, getattr(model, name).ns // 1000))
        view = self._models.view(model.name, model.version)
        if view.config.cache:
            for name, (number_row, time_row) in CACHE.items():
                found[number_row].append(Sample(labels, getattr(model, name).count))
                found[time_row].append(Sample(labels, getattr(model, name).ns // 1000))
        if self._latencies.first_responses and view.config.decoupled:
            self._latencies.watch_first_responses(model.name, model.version, first_response_buckets(view.document))

    def _add_memory(self, found: Mapping[Row, list[Sample]], memory: MemoryUse) -> None:
        found[MEMORY_BUDGET].append(Sample((), memory.budget_bytes))
        found[MEMORY_USED].append(Sample((), memory.used_bytes))
        found[RESIDENT].append(Sample((), memory.resident))
        found[SLEEPING].append(Sample((), memory.sleeping))
        found[SWAPS].append(Sample((("event", "sleep"),), memory.sleeps))
        found[SWAPS].append(Sample((("event", "wake"),), memory.wakes))

    def _add_latency(self, found: Mapping[Row, list[Sample]], labels: Labels, latency: Latency) -> None:
        found[SECONDS] += _histogram(labels, latency.seconds)
        if latency.first_ms is not None:
            found[FIRST] += _histogram(labels, latency.first_ms)
        if self._summaries:
            for phase, summary in latency.phases.items():
                samples = found[SUMMARIES[phase]]
                samples.append(Sample(labels, summary.count, "_count"))
                samples.append(Sample(labels, summary.sum_us, "_sum"))
                samples += [Sample((*labels, ("quantile", str(q))), summary.quantile(q)) for q in self._quantiles]


def _cache_size(cache: Cache) -> Iterator[tuple[Row, float]]:
    yield CACHE_SIZE["util"], cache.used_bytes / cache.bytes_max
    yield CACHE_SIZE["entries"], len(cache)
    yield CACHE_SIZE["hits"], cache.hits
    yield CACHE_SIZE["misses"], cache.misses
    yield CACHE_SIZE["lookups"], cache.hits + cache.misses
    yield CACHE_SIZE["evictions"], cache.evictions
    yield CACHE_SIZE["lookup_ns"], cache.lookup_ns // 1000
    yield CACHE_SIZE["insertion_ns"], cache.insertion_ns // 1000


def first_response_buckets(document: Mapping[str, Any]) -> Sequence[float]:
    """Histogram buckets from the model's configuration, in milliseconds; else Triton's defaults."""
    for control in document.get("model_metrics", {}).get("metric_control", ()):
        if control.get("metric_identifier", {}).get("family") == FIRST_RESPONSE:
            buckets = control.get("histogram_options", {}).get("buckets", ())
            return tuple(sorted(map(float, buckets))) or FIRST_RESPONSE_MS
    return FIRST_RESPONSE_MS


class Machine:
    """Machine metrics from /proc; none without /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = (0, 0)

    def look(self) -> Iterator[tuple[Row, float]]:
        """Metrics and their current values."""
        with suppress(OSError, ValueError, KeyError, IndexError):
            times = [int(each) for each in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
            idle, total = times[3] + times[4], sum(times)
            idle_before, total_before = self._before
            self._before = idle, total
            yield CPU, 1 - (idle - idle_before) / max(1, total - total_before)
        with suppress(OSError, ValueError, KeyError, IndexError):
            lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            kilobytes = {words[0]: int(words[1]) for words in lines}
            total = kilobytes["MemTotal:"] * 1024
            yield CPU_TOTAL, total
            yield CPU_USED, total - kilobytes["MemAvailable:"] * 1024


def _histogram(labels: Labels, histogram: Histogram) -> Iterator[Sample]:
    buckets = histogram.buckets()
    for bound, count in buckets:
        yield Sample((*labels, ("le", bound)), count, "_bucket")
    yield Sample(labels, buckets[-1][1], "_count")
    yield Sample(labels, histogram.sum, "_sum")


def _lines(found: Mapping[Row, Iterable[Sample]]) -> Iterator[str]:
    for row, samples in found.items():
        if not samples:
            continue
        yield f"# HELP {row.name} {row.help}\n# TYPE {row.name} {row.kind}\n"
        for labels, value, suffix in samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            yield (
                f"{row.name}{suffix}{{{inside}}} {_number(value)}\n"
                if inside
                else f"{row.name}{suffix} {_number(value)}\n"
            )


def exposition(families: Iterable[Family]) -> bytes:
    """Metrics of models' processes in Prometheus' text format, without custom ones that use names of ours."""
    return "".join(_own(families)).encode()


def _own(families: Iterable[Family]) -> Iterator[str]:
    for name, kind, text, series in families:
        row = Row(name, kind, text.replace("\\", "\\\\").replace("\n", "\\n"))
        if name == MICRO_BATCH.name and kind is Measure.GAUGE:
            row = MICRO_BATCH
        elif name in NAMES or name.startswith(PREFIX):
            continue
        if kind is Measure.HISTOGRAM:
            yield from _lines({row: [sample for each in series for sample in _buckets(each)]})
        else:
            yield from _lines({row: [Sample(each.labels, each.value) for each in series]})


def _buckets(series: Series) -> Iterator[Sample]:
    total = 0
    for bound, count in zip((*series.bounds, inf), series.counts, strict=True):
        total += count
        yield Sample((*series.labels, ("le", _number(bound))), total, "_bucket")
    yield Sample(series.labels, total, "_count")
    yield Sample(series.labels, series.value, "_sum")


def _number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value) if value == int(value) else value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
