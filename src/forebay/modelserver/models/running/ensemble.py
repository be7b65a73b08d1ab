"""Ensembles: requests that run through several models; tensors pass between steps as views of shared memory."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from time import monotonic, monotonic_ns
from typing import Final, NamedTuple

from forebay.core.serving.config import ModelConfig, Step
from forebay.core.serving.ensemble import LATEST, Dag, Flow, Gates, Progress, Start, carried_shape
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, Parameter, Tensor, Ticket
from forebay.modelserver.models.context import ModelAccess
from forebay.modelserver.models.running.call import NOTHING_SPENT, Call, Phase, Spent
from forebay.modelserver.models.running.counting import Counts, Reason
from forebay.modelserver.models.running.inputs import Contract

SETTLE_S: Final = 5.0
"""How long a request waits for the reload of all steps when a reloaded one does not fit the others."""
SETTLE_POLL_S: Final = 0.02
"""Time between two checks of whether they fit."""


class _Sequence(NamedTuple):
    """Sequence fields passed between steps: response parameters of a step may move the rest to another sequence."""

    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


class _Value:
    """A tensor on its way between steps."""

    __slots__ = ("made_rows", "sequence", "tensor")

    def __init__(self, tensor: Tensor, made_rows: int, sequence: _Sequence | None) -> None:
        self.tensor = tensor
        self.made_rows = made_rows
        """Batch size of the request that produced it; 0: the producer does not batch."""
        self.sequence = sequence
        """Sequence set by the step that produced it; None: it comes from the client."""


class _Run:
    """One run of a step: waiting for its in-flight limit, or under way."""

    __slots__ = ("call", "inputs", "number", "request", "rows", "sequence", "step")

    def __init__(self, request: "_Request", start: Start[_Value]) -> None:
        self.request = request
        self.number = start.run
        self.step = start.step
        """Index in the configuration."""
        self.inputs = start.inputs
        self.rows = 0
        """Batch size of what it makes; 0: its model does not batch."""
        self.sequence: _Sequence = request.from_client
        self.call: Call | None = None
        """Its request, while that is under way."""

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """A response of the step's model."""
        self.request.on_response(self, response, final)


class Ensemble:
    """Runs the requests of one ensemble."""

    def __init__(self, config: ModelConfig, version: str, dag: Dag, counts: Counts, models: ModelAccess) -> None:
        self.config = config
        self.version = version
        self.dag = dag
        self.counts = counts
        self.models = models
        self.gates: Gates[_Run] = Gates(config.inflight_max, len(config.steps))
        self.dims = {spec.name: spec.dims for spec in config.outputs}
        self.loop = asyncio.get_running_loop()
        self._requests: dict[Call, _Request] = {}
        self._checked = self._interfaces()

    @property
    def outdated(self) -> bool:
        """Whether a step now takes or gives other tensors than when this ensemble was loaded."""
        return self._checked != self._interfaces()

    def _interfaces(self) -> list[object]:
        models = [self.models.lookup(step.model, step.version) for step in self.config.steps]
        return [None if model is None else (model.inputs, model.outputs, model.max_batch) for model in models]

    @property
    def waiting(self) -> int:
        """Always 0: only the steps' models queue."""
        return 0

    def submit(self, call: Call) -> None:
        """Start a request."""
        request = self._requests[call] = _Request(self, call)
        self.loop.call_soon(request.begin)

    def cancel(self, call: Call) -> None:
        """Cancel a request together with its steps."""
        request = self._requests.get(call)
        if request is not None:
            request.abandon()
            self.end(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)

    def set_instances(self, instances: int) -> None:
        """An ensemble has no instances."""

    def wake(self) -> None:
        """Nothing to do: no batches start here."""

    def close(self, refused: Refused) -> None:
        """Fail all requests with this error."""
        for call, request in list(self._requests.items()):
            request.abandon()
            self.end(call, refused)

    def follow(self, step: int) -> None:
        """A run of the step ended: start the next one that waits for its in-flight slot."""
        follower = self.gates.leave(step)
        if follower is not None:  # deferred: it may end at once, have another one follow, and so on
            self.loop.call_soon(follower.request.start, follower)

    def end(self, call: Call, refused: Refused | None = None, reason: Reason = Reason.OTHER) -> None:
        """Forget a finished request; with an error, fail it."""
        self._requests.pop(call, None)
        if refused is not None:
            self.counts.refuse(call, refused, reason)


class _Request:
    """One request in an ensemble."""

    def __init__(self, owner: Ensemble, call: Call) -> None:
        self._owner = owner
        self._call = call
        self._flow: Flow[_Value] = Flow(owner.dag, call.checked.outputs)
        self._runs: dict[int, _Run] = {}
        """Step runs that have not ended."""
        request = call.request
        self.from_client = _Sequence(request.sequence_id, request.sequence_start, request.sequence_end)
        self._began_ns = 0
        self._spent = NOTHING_SPENT
        self._settle_until = 0.0
        """Set once it has to start again: with the steps it started with, it cannot end."""
        self._again: Ticket | None = None

    def begin(self) -> None:
        """Feed the inputs into the ensemble."""
        if self._call.phase is Phase.ENDED:
            return
        self._began_ns = monotonic_ns()
        self._call.phase = Phase.RUNNING
        rows = self._call.checked.rows if self._owner.config.max_batch else 0
        inputs = {tensor.name: _Value(tensor, rows, None) for tensor in self._call.checked.inputs}
        self._proceed(self._flow.begin(inputs), Kind.INVALID_ARGUMENT)

    def abandon(self) -> None:
        """Cancel all steps."""
        self._cancel(self._flow.abandon().cancel)
        if self._again is not None:
            self._again.cancel()

    def start(self, run: _Run) -> None:
        """Run a step that the in-flight limit admits."""
        if run.number not in self._runs:  # its request has ended meanwhile
            self._owner.follow(run.step)
            return
        step = self._owner.config.steps[run.step]
        model = self._owner.models.lookup(step.model, step.version)
        request = self._call.request
        for value in run.inputs.values():
            if value.sequence is not None:
                run.sequence = value.sequence
                break
        sequence = run.sequence
        step_request = InferRequest(
            model=step.model,
            version="" if step.version < 0 else str(step.version),
            id=request.id,
            inputs=tuple([_carried(model, name, value) for name, value in run.inputs.items()]),
            outputs=() if model is not None and _makes_just(model, step) else tuple(step.outputs),
            parameters=request.parameters,
            priority=request.priority,
            timeout_us=request.timeout_us,
            deadline=request.deadline,
            sequence_id=sequence.sequence_id,
            sequence_start=sequence.sequence_start,
            sequence_end=sequence.sequence_end,
        )
        try:
            call = run.call = self._owner.models.infer(step_request, run.on_response)
            run.rows = call.checked.rows if model is not None and model.max_batch else 0
            if self._call.watch is not None:
                call.watch = self._call.watch.step(call)
        except Refused as refused:
            if refused.kind is Kind.INVALID_ARGUMENT and self._owner.outdated:
                self._start_again(run)
            else:
                self._failed(run, self._step_error(run, model, step_request, refused))

    def _start_again(self, run: _Run) -> None:
        """A reloaded step does not take what the others give: run the whole request again when all steps fit."""
        self._leave(run)
        request = self._call.request
        self._settle_until = min(monotonic() + SETTLE_S, request.deadline or inf)
        self.abandon()
        if self._call.responses or request.sequence_id or request.sequence_start:  # cannot be repeated
            self._settle_until = 0.0
        self._owner.loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Repeat the request once all steps fit, or the ensemble is reloaded; fail it if that takes too long, or if
        it cannot be repeated."""
        call, owner = self._call, self._owner
        if call.phase is Phase.ENDED:
            return
        number = int(call.request.version or LATEST)
        current = owner.models.lookup(owner.config.name, number)
        if current is owner.config and owner.outdated and monotonic() < self._settle_until:
            owner.loop.call_later(SETTLE_POLL_S, self._settle)
            return
        name = owner.config.name
        unsettled = Refused(Kind.UNAVAILABLE, f"in ensemble '{name}', steps are being reloaded; retry the request", 1)
        if current is None or not self._settle_until or (current is owner.config and owner.outdated):
            owner.end(call, unsettled)
            return
        try:
            self._again = owner.models.infer(call.request, self._passed_on)
        except Refused as refused:
            owner.end(call, refused)

    def _passed_on(self, response: InferResponse | None, final: bool) -> None:
        """A response of the repeated request, which is counted where it ran."""
        if final:
            self._owner.end(self._call)
        self._call.respond(response, final)

    def _step_error(self, run: _Run, model: ModelConfig | None, request: InferRequest, refused: Refused) -> Refused:
        """A step's rejection; INTERNAL, not the client's error, if only tensors made by other steps are invalid."""
        config = self._owner.config
        made = {tensor for step in config.steps for tensor in step.outputs.values()}
        fed = {own: tensor for own, tensor in config.steps[run.step].inputs.items() if tensor in made}
        if refused.kind is not Kind.INVALID_ARGUMENT or model is None or _fits(model, request.inputs):
            return refused
        own = replace(model, inputs=tuple([spec for spec in model.inputs if spec.name not in fed]))
        if not fed or not _fits(own, tuple([each for each in request.inputs if each.name not in fed])):
            return refused
        makers = {step.model for step in config.steps if not set(fed.values()).isdisjoint(step.outputs.values())}
        named = " and ".join([f"'{maker}'" for maker in sorted(makers)])
        text = f"step of model '{model.name}' cannot take what model {named} made: {refused.text}"
        return Refused(Kind.INTERNAL, text)

    def on_response(self, run: _Run, response: InferResponse | None, final: bool) -> None:
        """A response of a step."""
        call = run.call
        assert call is not None, "responses come after `infer` has returned"
        if call.watch is not None:
            call.watch.on_step_response(response, final)
        outputs: dict[str, _Value] | None = None
        if response is not None:
            if response.error is not None:
                if not final:
                    call.cancel()  # else its next response would find that this run has ended
                self._failed(run, response.error)
                return
            sequence = _next_sequence(response, run.sequence)
            outputs = {tensor.name: _Value(tensor, run.rows, sequence) for tensor in response.outputs}
        if final:
            ours, its = self._spent, call.spent
            self._spent = Spent(
                ours.input_ns + its.input_ns, ours.infer_ns + its.infer_ns, ours.output_ns + its.output_ns
            )
            self._leave(run)
        self._proceed(self._flow.result(run.number, outputs, final=final), Kind.INTERNAL)

    def _failed(self, run: _Run, refused: Refused) -> None:
        self._leave(run)
        self._proceed(self._flow.fail(run.number, refused.text), refused.kind, refused.retry_after_s)

    def _leave(self, run: _Run) -> None:
        """A step run ended."""
        del self._runs[run.number]
        run.call = None  # it refers to this run: both would wait for the garbage collector, with their tensors
        self._owner.follow(run.step)

    def _proceed(self, progress: Progress[_Value], kind: Kind, retry_after_s: int = 0) -> None:
        """Act on what a flow event triggered."""
        call, owner = self._call, self._owner
        last = len(progress.responses) - 1
        for index, values in enumerate(progress.responses):
            final = progress.ended and not progress.error and index == last
            if final:
                self._count()
                owner.end(call)
            call.respond(self._response(values), final)
        starts = [_Run(self, start) for start in progress.starts]
        for run in starts:
            self._runs[run.number] = run
        for run in starts:
            if run.number in self._runs and owner.gates.enter(run.step, run):
                self.start(run)
        if progress.ended and call.phase is not Phase.ENDED:
            if progress.error:
                owner.end(call, Refused(kind, progress.error, retry_after_s))
            else:
                self._count()
                owner.end(call)
                call.respond(None, True)
        if progress.cancel:
            self._cancel(progress.cancel)

    def _cancel(self, runs: Sequence[int]) -> None:
        for number in runs:
            run = self._runs.get(number)
            if run is not None and run.call is not None:
                run.call.cancel()
                self._leave(run)
            elif run is not None:
                del self._runs[number]
                self._owner.gates.drop(run.step, run)
            self._flow.result(number, None, final=True)

    def _response(self, values: dict[str, _Value]) -> InferResponse:
        owner = self._owner
        batches = owner.config.max_batch > 0
        outputs = []
        parameters: dict[str, Parameter] = {}
        for name, value in values.items():
            tensor, sequence = value.tensor, value.sequence
            shape = carried_shape(tensor.shape, value.made_rows, owner.dims.get(name, ()), batches)
            outputs.append(Tensor(name, tensor.datatype, shape, tensor.data))
            if sequence is not None:  # sent even if there is no sequence, as in Triton
                parameters["sequence_id"] = sequence.sequence_id
                parameters["sequence_start"] = sequence.sequence_start
                parameters["sequence_end"] = sequence.sequence_end
        return InferResponse(
            owner.config.name, owner.version, self._call.request.id, tuple(outputs), parameters=parameters
        )

    def _count(self) -> None:
        call, spent = self._call, self._spent
        self._owner.counts.success(call, self._began_ns, spent, call.checked.rows)
        self._owner.counts.execution(call.checked.rows, spent)
        call.spent = spent


def _fits(model: ModelConfig, inputs: tuple[Tensor, ...]) -> bool:
    """Whether the model accepts these inputs."""
    try:
        Contract(model).check(InferRequest(model.name, "", "", inputs))
    except Refused:
        return False
    return True


def _next_sequence(response: InferResponse, before: _Sequence) -> _Sequence:
    """The sequence in which the request goes on after a step's response."""
    parameters = response.parameters
    if not parameters or parameters.keys().isdisjoint(_Sequence._fields):
        return before
    id = parameters.get("sequence_id", before.sequence_id)
    return _Sequence(
        id if isinstance(id, str) else int(id),
        bool(parameters.get("sequence_start")),
        bool(parameters.get("sequence_end")),
    )


def _carried(model: ModelConfig | None, name: str, value: _Value) -> Tensor:
    """A tensor with the name and shape that the consuming model expects."""
    tensor = value.tensor
    shape = tensor.shape
    if model is not None and (model.max_batch > 0) != (value.made_rows > 0):
        spec = model.input(name)
        if spec is not None:
            shape = carried_shape(shape, value.made_rows, spec.dims, model.max_batch > 0)
    if name == tensor.name and shape is tensor.shape:
        return tensor
    return Tensor(name, tensor.datatype, shape, tensor.data)


def _makes_just(model: ModelConfig, step: Step) -> bool:
    """Whether the step uses all outputs of its model: then there is no need to name them."""
    return model.sequences is None and len(model.outputs) == len(step.outputs)
