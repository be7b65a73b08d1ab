"""Statistics of one model version, by Triton's rules.

Every request of a batch is counted with the compute times of the whole batch, or up to its answer if that comes
before the end. A batch counts as one execution even if requests in it fail in the model. A cache hit is a success
without an execution. Requests rejected before they are queued are not counted.
"""

from enum import StrEnum
from time import monotonic_ns
from typing import Final

from forebay.core.serving.errors import Refused
from forebay.core.serving.statistics import BatchStatistics, Duration, ModelStatistics, ResponseStatistics
from forebay.core.serving.values import InferRequest
from forebay.modelserver.models.running.call import Call, Spent
from forebay.obs.clock import wall_s

RESPONSES_MAX: Final = 10_000
"""Responses of one request that are counted: each index has an entry for as long as the model is loaded."""


class Reason(StrEnum):
    """Why a request failed."""

    REJECTED = "REJECTED"
    """Timed out in the queue, or displaced by a newer request."""
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class Counts:
    """Statistics of one model version."""

    def __init__(self, name: str, version: str) -> None:
        self.statistics = ModelStatistics(name, version, failures=dict.fromkeys(Reason, 0))

    def success(self, call: Call, start_ns: int, spent: Spent, rows: int) -> None:
        """A request succeeded; its execution started at `start_ns`."""
        now = monotonic_ns()
        total = self.statistics
        total.inference_count += rows
        total.success.add(now - call.started_ns)
        total.queue.add(max(0, start_ns - call.queued_ns))
        total.compute_input.add(spent.input_ns)
        total.compute_infer.add(spent.infer_ns)
        total.compute_output.add(spent.output_ns)

    def failure(self, call: Call, reason: Reason) -> None:
        """A request failed."""
        self.statistics.fail.add(monotonic_ns() - call.started_ns)
        self.statistics.failures[reason] += 1

    def drop(self, request: InferRequest) -> None:
        """A request was displaced by a newer one before it was queued."""
        self.statistics.fail.add(max(0, monotonic_ns() - request.came_ns))
        self.statistics.failures[Reason.REJECTED] += 1

    def refuse(self, call: Call, refused: Refused, reason: Reason) -> None:
        """Count a failure and end the request with that error."""
        self.failure(call, reason)
        call.fail(refused, self.statistics.name, self.statistics.version)

    def execution(self, rows: int, spent: Spent) -> None:
        """A batch with that many rows was executed."""
        total = self.statistics
        total.last_inference_ms = int(wall_s() * 1000)
        total.execution_count += 1
        batch = total.batches.get(rows)
        if batch is None:
            batch = total.batches[rows] = BatchStatistics(rows)
        batch.compute_input.add(spent.input_ns)
        batch.compute_infer.add(spent.infer_ns)
        batch.compute_output.add(spent.output_ns)

    def hit(self, call: Call, lookup_start_ns: int, lookup_ns: int) -> None:
        """The response came from the cache."""
        total = self.statistics
        total.success.add(monotonic_ns() - call.started_ns)
        total.queue.add(lookup_start_ns - call.queued_ns)
        total.cache_hit.add(lookup_ns)

    def miss(self, lookup_and_insert_ns: int) -> None:
        """A response was computed and cached."""
        self.statistics.success.add(lookup_and_insert_ns, count=0)
        self.statistics.cache_miss.add(lookup_and_insert_ns)

    def response(self, index: int, start_ns: int, infer_end_ns: int, outcome: "Outcome") -> None:
        """A decoupled model's response with that index; `start_ns` is when the execution of the request started."""
        if index >= RESPONSES_MAX:
            return
        key = str(index)
        entry = self.statistics.responses.get(key)
        if entry is None:
            entry = self.statistics.responses[key] = ResponseStatistics()
        now = monotonic_ns()
        whole: Duration = getattr(entry, outcome)
        whole.add(max(0, now - start_ns))
        if outcome is Outcome.CANCEL:
            return
        entry.compute_infer.add(max(0, infer_end_ns - start_ns))
        if outcome is Outcome.SUCCESS:
            entry.compute_output.add(max(0, now - infer_end_ns))


class Outcome(StrEnum):
    """How a response of a decoupled model ended; values are the names of the fields that count them."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY = "empty_response"
    CANCEL = "cancel"
