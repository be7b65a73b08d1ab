"""Statistics of a served model, as in the protocol. Durations are nanoseconds."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Duration:
    """A count and a total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Add `count` occurrences that took `ns` in total."""
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    batch_size: int
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ResponseStatistics:
    """The responses of one index (the first, the second, …) of a decoupled model."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """One version of a model since it was loaded."""

    name: str
    version: str
    last_inference_ms: int = 0
    """Wall time since the epoch; 0: none yet."""
    inference_count: int = 0
    """Rows: a request of batch size 8 counts 8."""
    execution_count: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    responses: dict[str, ResponseStatistics] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    """By reason: REJECTED, CANCELED, BACKEND, OTHER."""
    load_s: float = 0.0
    """Load time, including warm-up."""
    pending: int = 0
    """Requests now waiting for an instance."""
