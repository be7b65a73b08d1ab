"""Execution of batches on the instances of one model version, and delivery of their responses."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from time import monotonic_ns
from typing import Final

from forebay.core.serving.config import VARIABLE, ModelConfig
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferResponse, Tensor
from forebay.modelserver.models.running.call import Call, Phase, Spent
from forebay.modelserver.models.running.counting import Counts, Outcome, Reason
from forebay.modelserver.models.running.inputs import refilled
from forebay.modelserver.models.running.rate_limiting import InstanceResources
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.process.values import Answer, Done, Work


class Batch:
    """A batch on an instance. A `None` call is a padding slot."""

    __slots__ = (
        "_executor",
        "answered",
        "behind",
        "calls",
        "instance",
        "not_started",
        "plan",
        "rescheduled",
        "rows",
        "started_ns",
    )

    def __init__(
        self, executor: "Executor", instance: int, calls: Sequence[Call | None], rows: int, plan: object
    ) -> None:
        self._executor = executor
        self.instance = instance
        self.calls = calls
        self.rows = rows
        self.plan = plan
        """Opaque data of the scheduler."""
        self.started_ns = monotonic_ns()
        self.answered = 0
        """The first requests, which have been answered while it runs."""
        self.behind: Batch | None = None
        """The batch queued behind this one on the instance."""
        self.not_started = False
        """The process was lost before it started this batch."""
        self.rescheduled: tuple[Call, ...] = ()
        """Requests that an iterative model has rescheduled."""

    def on_response(self, index: int, answer: Answer | None, final: bool) -> None:
        """A response of a decoupled model."""
        call = self.calls[index]
        if call is None:
            return
        if answer is not None and answer.reschedule:
            self._executor.reschedule(self, call)
        else:
            self._executor.respond(call, answer, final, self.started_ns)

    def on_answers(self, first: int, done: Done) -> None:
        """The requests from there on are done; the batch goes on."""
        self.answered = first + len(done.answers)
        spent = Spent(done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns)
        for index, answer in enumerate(done.answers, first):
            call = self.calls[index]
            if call is not None:
                self._executor.answer(call, answer, done.compute_start_ns, spent)

    def on_done(self, done: Done) -> None:
        """The batch has finished, and the instance is free."""
        self._executor.finish(self, done)


NOT_ITERATIVE: Final = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)
"""Triton's wording."""

AHEAD_NS_MAX: Final = 5_000_000
"""A single instance whose batches take at most this long is given the next one before the running one ends: otherwise
it would idle for a good part of the time while messages are in transit.
"""

OnFree = Callable[[Batch, Done], None]
"""Called when an instance is free, before the responses of its batch are delivered."""


class Executor:
    """Runs batches and delivers their responses. Schedulers form the batches."""

    def __init__(
        self, config: ModelConfig, version: str, counts: Counts, process: ModelProcess, resources: InstanceResources
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._model = config.name
        self._version = version
        self._decoupled = config.decoupled
        self._counts = counts
        self._process = process
        self._resources = resources
        self._reshaped = {spec.name: (spec.reshape, spec.dims) for spec in config.outputs if spec.reshape is not None}
        """Shapes that the model makes, and those that clients see, by output."""
        self._lead = 1 if config.max_batch else 0
        """Dimensions of a tensor before those that the configuration names: the batch dimension, if there is one."""
        sequences = config.sequences
        ordered = config.batching is not None and config.batching.preserve_ordering
        if sequences is not None and sequences.preserve_ordering and not sequences.iterative:
            ordered = True  # the requests of an iterative model start several times
        self._order: deque[_Place] | None = deque() if ordered else None
        """Requests without their final response, as they started; None: each gets its responses at once."""
        self._places: dict[Call, _Place] = {}
        self._last: dict[int, Batch] = {}
        """The last unfinished batch by instance."""
        self._runs_ahead = not (config.decoupled or ordered or resources.scarce or sequences is not None)
        """Whether a busy instance may be given its next batch."""
        self._iterative = sequences is not None and sequences.iterative
        self._short = False
        """Whether the last batch took at most `AHEAD_NS_MAX`."""
        self.on_free: OnFree = lambda batch, done: None
        self.on_not_started: Callable[[Sequence[Call | None]], None] = lambda calls: None
        """Called with requests that a lost process had not started."""
        self.hidden: frozenset[str] = frozenset()
        """Outputs withheld from clients."""

    def idle(self, resting: Collection[int] = ()) -> Iterator[int]:
        """Idle instances that may run a batch now, lowest first.

        `resting` have nothing to run: where resources are scarce, they ask for none and are left out.
        """
        process = self._process
        scarce = self._resources.scarce
        if scarce:
            for instance in range(process.instances):
                if not process.outstanding(instance) and (instance in resting or not process.usable(instance)):
                    self._resources.withdraw(instance)
        for instance in range(process.instances):
            if scarce and instance in resting:
                continue
            if process.usable(instance) and not process.outstanding(instance) and self._resources.take(instance):
                yield instance

    def ahead(self) -> bool:
        """Whether instance 0 is busy and may be given a batch to run next. Not if there are others: the running batch
        may take long, and one of them may be free sooner.
        """
        process = self._process
        return (
            self._runs_ahead
            and self._short
            and process.instances == 1
            and process.outstanding(0) == 1
            and process.usable(0)
        )

    def usable(self) -> Iterator[int]:
        """Instances whose process is up and loaded, busy or not."""
        process = self._process
        return (instance for instance in range(process.instances) if process.alive(instance))

    def spare(self, instance: int) -> None:
        """Return an instance obtained from `idle` unused."""
        self._resources.give_back(instance)

    def spare_all(self) -> None:
        """Return all idle instances: there is nothing to run, also for those whose resources were granted later."""
        if self._resources.scarce:
            for instance in range(self._process.instances):
                if not self._process.outstanding(instance):
                    self._resources.give_back(instance)

    def run(
        self, instance: int, calls: Sequence[Call | None], works: Sequence[Work], rows: int, plan: object
    ) -> None:
        """Start a batch on an instance obtained from `idle`, or that `ahead` allows."""
        batch = Batch(self, instance, calls, rows, plan)
        try:
            number = self._process.execute(instance, works, batch)
        except Refused as refused:  # the process was lost since the check
            self._loop.call_soon(batch.on_done, Done((), 0, 0, 0, 0, refused))
            return
        before = self._last.get(instance)
        if before is not None:
            before.behind = batch
        self._last[instance] = batch
        for index, call in enumerate(calls):
            if call is not None:
                call.phase = Phase.RUNNING
                call.batch, call.index = number, index
                if self._order is not None:
                    place = self._places[call] = _Place(call)
                    self._order.append(place)

    def cancel(self, call: Call) -> None:
        """Signal to the model that a running request is cancelled; it still ends with its batch."""
        self._process.cancel(call.batch, call.index)

    def finish(self, batch: Batch, done: Done) -> None:
        """Count a finished batch, let the next one start, and deliver its responses."""
        if self._last.get(batch.instance) is batch:
            del self._last[batch.instance]
        self._resources.give_back(batch.instance)
        if done.failure is not None and done.failure.kind is Kind.UNAVAILABLE:
            if batch.behind is not None:
                batch.behind.not_started = True
            if batch.not_started:
                self.on_not_started(batch.calls)
                return
        spent = Spent(done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns)
        if done.failure is None:
            self._short = done.compute_infer_ns <= AHEAD_NS_MAX
            self._counts.execution(batch.rows, spent)
            if self._iterative:
                self._collect_rescheduled(batch, done, spent)
        elif batch.rescheduled:
            batch.rescheduled = ()
        self.on_free(batch, done)
        for index, call in enumerate(batch.calls):
            if index < batch.answered or call is None or call in batch.rescheduled:
                continue
            if done.failure is not None:
                self._fail(call, done.failure)
            else:
                self.answer(call, done.answers[index], done.compute_start_ns, spent)

    def answer(self, call: Call, answer: Answer | None, start_ns: int, spent: Spent) -> None:
        """Count a request whose rows are done, and deliver its response; None: it comes by itself."""
        if answer is not None and answer.error is not None:
            self._fail(call, answer.error)
        elif answer is not None and answer.reschedule:
            self._fail(call, Refused(Kind.INTERNAL, NOT_ITERATIVE))
        elif answer is not None and (problem := self._shape_problem(call, answer)):
            self._fail(call, Refused(Kind.INTERNAL, problem))
        else:
            self._counts.success(call, start_ns, spent, call.checked.rows)
            call.spent = spent
            if answer is not None:
                self._deliver(call, self.response(call, answer), True)

    def reschedule(self, batch: Batch, call: Call) -> None:
        """A decoupled model reschedules a request, which fails unless the model is iterative and its batch runs."""
        if self._iterative and self._last.get(batch.instance) is batch:
            batch.rescheduled += (call,)
        else:
            self._fail(call, Refused(Kind.INTERNAL, NOT_ITERATIVE))

    def _collect_rescheduled(self, batch: Batch, done: Done, spent: Spent) -> None:
        """Collect the rescheduled requests and count this execution; as in Triton, each counts as an inference."""
        answers = zip(batch.calls, done.answers, strict=True)
        more = (call for call, answer in answers if call is not None and answer is not None and answer.reschedule)
        rescheduled = []
        for call in (*batch.rescheduled, *more):
            if call.phase is Phase.ENDED:
                continue
            self._counts.success(call, done.compute_start_ns, spent, call.checked.rows)
            call.phase, call.queued_ns, call.spent = Phase.WAITING, monotonic_ns(), spent
            rescheduled.append(call)
        batch.rescheduled = tuple(rescheduled)

    def respond(self, call: Call, answer: Answer | None, final: bool, started_ns: int) -> None:
        """A response of a decoupled model, or the end of its responses."""
        if answer is not None and answer.error is None and (problem := self._shape_problem(call, answer)):
            answer = Answer(error=Refused(Kind.INTERNAL, problem))
        if self._decoupled:
            self._counts.response(call.responses, started_ns, monotonic_ns(), _outcome(call, answer))
        if final:  # which may be long before or after the end of its execution
            known_ns = call.spent.input_ns + call.spent.output_ns
            call.spent = call.spent._replace(infer_ns=max(0, monotonic_ns() - started_ns - known_ns))
        self._deliver(call, None if answer is None else self.response(call, answer), final)

    def _shape_problem(self, call: Call, answer: Answer) -> str:
        """Why the outputs are invalid, or empty. As in Triton, decoupled models may return any number of rows."""
        given = call.checked.inputs
        # as in Triton, no number of rows is expected for an empty batch
        rows = given[0].shape[0] if self._lead and given and not self._decoupled else 0
        if not rows and not self._reshaped:
            return ""
        for tensor in answer.outputs:
            shape = tensor.shape
            if rows and (not shape or shape[0] != rows):
                return (
                    f"model '{self._model}' gave output '{tensor.name}' as {tensor.datatype} {list(shape)} to a "
                    f"request of batch size {rows}; with max_batch_size that has to be its first dimension"
                )
            made = self._reshaped.get(tensor.name)
            if made is not None and not _fits(shape[self._lead :], made[0]):
                return (
                    f"model '{self._model}' gave output '{tensor.name}' as {tensor.datatype} {list(shape)}; its "
                    f"configuration says {[VARIABLE] * self._lead + list(made[0])}"
                )
        return ""

    def response(self, call: Call, answer: Answer) -> InferResponse:
        """The response to a model's answer: only the requested outputs, in their configured shapes."""
        outputs = answer.outputs
        wanted = call.checked.outputs
        if wanted:
            outputs = tuple(tensor for tensor in outputs if tensor.name in wanted)
        elif self.hidden:
            outputs = tuple(tensor for tensor in outputs if tensor.name not in self.hidden)
        if self._reshaped:
            outputs = tuple(map(self._reshape, outputs))
        parameters = dict(answer.parameters) if answer.parameters else {}
        return InferResponse(
            self._model, self._version, call.request.id, outputs, parameters=parameters, error=answer.error
        )

    def fail(self, call: Call, refused: Refused, reason: Reason) -> None:
        """Fail a request that is not running."""
        self._counts.refuse(call, refused, reason)

    def _fail(self, call: Call, refused: Refused) -> None:
        if call.phase is Phase.ENDED:
            return
        self._counts.failure(call, Reason.BACKEND)
        self._deliver(call, InferResponse(self._model, self._version, call.request.id, error=refused), True)

    def _reshape(self, tensor: Tensor) -> Tensor:
        shapes = self._reshaped.get(tensor.name)
        if shapes is None:
            return tensor
        made, configured = shapes
        shape = tensor.shape
        return tensor.shaped(shape[: self._lead] + refilled(shape[self._lead :], made, configured))

    def _deliver(self, call: Call, response: InferResponse | None, final: bool) -> None:
        """Deliver at once, or with `preserve_ordering` in the order in which requests started."""
        order = self._order
        place = self._places.get(call) if order is not None else None
        if order is None or place is None:
            call.respond(response, final)
            return
        if place.held and place.held[-1][1]:
            return
        if response is not None and self._decoupled and place is not order[0]:
            response = response.copied()  # the model may block until it has the memory of those that it has sent
        place.held.append((response, final))
        while order and order[0].held:
            first = order[0]
            held, first.held = first.held, []
            for kept, its_final in held:
                if its_final:
                    order.popleft()
                    del self._places[first.call]
                first.call.respond(kept, its_final)
            if not held[-1][1]:
                return


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(want in (have, VARIABLE) for have, want in zip(shape, dims, strict=True))


def _outcome(call: Call, answer: Answer | None) -> Outcome:
    if call.cancelled:
        return Outcome.CANCEL
    if answer is None:
        return Outcome.EMPTY
    return Outcome.SUCCESS if answer.error is None else Outcome.FAIL


class _Place:
    """A request's position in the delivery order, with its held-back responses."""

    __slots__ = ("call", "held")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.held: list[tuple[InferResponse | None, bool]] = []
