"""The sequence scheduler: `core.serving.sequences` on real instances, with control inputs and implicit state."""

import asyncio
from collections.abc import Iterator
from math import inf, prod
from pathlib import Path
from struct import pack
from time import monotonic
from typing import Final

from forebay.core.serving.batcher import WaitUntil
from forebay.core.serving.config import ELEMENT_BYTES, VARIABLE, Datatype, ModelConfig, SequenceBatching, State
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.sequences import BACKLOG_EXPIRED, Life, Row, Run, Sequencer, control_values, id_flaw
from forebay.core.serving.values import Tensor
from forebay.modelserver.alarm import Alarm
from forebay.modelserver.models.running.call import Call, Phase
from forebay.modelserver.models.running.counting import Reason
from forebay.modelserver.models.running.execution import Batch, Executor
from forebay.modelserver.models.running.inputs import LENGTH, prefix, size_bytes
from forebay.modelserver.process.values import Done, Work

INITIAL_FOLDER: Final = "initial_state"
"""Subfolder of the model's folder with initial states of sequences."""

LOST: Final = "the process that had this sequence is gone; start the sequence again"

_FLOATS: Final = {Datatype.FP16: "<e", Datatype.FP32: "<f", Datatype.FP64: "<d"}


class SequenceScheduler:
    """Schedules the requests of one model version with sequence batching."""

    def __init__(self, config: ModelConfig, folder: Path, executor: Executor, instances: int) -> None:
        batching = config.sequences
        assert batching is not None
        self._config = config
        self._batching = batching
        self._executor = executor
        self._sequencer: Sequencer[Call] = Sequencer(config.name, batching, config.max_batch, range(instances))
        self._instances = set(range(instances))
        self._leaving: set[int] = set()
        """Those that take no new sequences and are to be removed when theirs have ended."""
        self._moved = asyncio.Event()
        self._usable = set(executor.usable())
        """Those whose process was up at the last look."""
        self._resting: dict[int, float] = {}
        """Those that had nothing to run at the last look, and until when at least if nothing changes: if they asked
        for scarce resources whenever one of them was granted some, they would wake each other for ever."""
        self._initial = {state.input: _initial(state, config, folder) for state in batching.states}
        self._states = tuple(state.output for state in batching.states)
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._pump)
        self._woken = False
        _check_controls(batching)
        executor.on_free = self._on_free
        executor.hidden = frozenset(self._states) - {spec.name for spec in config.outputs}

    @property
    def waiting(self) -> int:
        """Requests that wait for a batch."""
        return self._sequencer.waiting

    def set_instances(self, instances: int) -> None:
        """Update the number of instances: others are gone, and with them the sequences that they had left."""
        self._keep(instances)
        for instance in self._instances - set(range(instances)):
            self._fail(self._sequencer.lost(instance, monotonic()), "its instance has been removed")
            if not self._sequencer.retired(instance):
                self._sequencer.retire(instance)
        self._instances = set(range(instances))
        self._leaving &= self._instances
        self._change()

    def retire(self, instances: int) -> None:
        """New sequences go to the first so many instances only; `left` waits until the others have none."""
        self._keep(instances)
        for instance in self._instances - set(range(instances)) - self._leaving:
            self._sequencer.retire(instance)
            self._leaving.add(instance)
        self._change()

    async def left(self) -> None:
        """Wait until the sequences of all instances that `retire` has named have ended, or it is closed."""
        while not all(map(self._sequencer.retired, self._leaving)):
            self._moved.clear()
            await self._moved.wait()

    def _keep(self, instances: int) -> None:
        """So many instances are there and take sequences."""
        for instance in range(instances):
            if instance not in self._instances or instance in self._leaving:
                self._sequencer.add(instance, monotonic())
                self._leaving.discard(instance)

    def submit(self, call: Call) -> None:
        """Queue a request. Raises `Refused`, also if its sequence has not been started."""
        request, checked = call.request, call.checked
        problem = id_flaw(self._config.name, self._batching, request.sequence_id)
        if problem:
            raise Refused(Kind.INVALID_ARGUMENT, prefix(request.id) + problem)
        self._sequencer.offer(
            call,
            request.sequence_id,
            start=request.sequence_start,
            end=request.sequence_end,
            rows=checked.rows,
            shape=checked.shape,
            now=monotonic(),
            timeout_s=request.timeout_us / 1e6,
        )
        self._change()

    def cancel(self, call: Call) -> None:
        """Cancel a request and those queued after it in its sequence, which cannot run without it."""
        if call.phase is Phase.RUNNING:
            self._executor.cancel(call)
            return
        for other in self._sequencer.cancel(call, monotonic()):
            self._executor.fail(other, Refused(Kind.CANCELLED, "an earlier request was cancelled"), Reason.CANCELED)
        self._change()

    def wake(self) -> None:
        """Check soon whether a batch can start."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._pump)

    def _change(self) -> None:
        """Sequences or instances have changed: look at all instances soon."""
        self._resting.clear()
        self.wake()

    def close(self, refused: Refused) -> None:
        """Fail all queued requests with this error; no batch runs any more."""
        for call in self._sequencer.end():
            self._executor.fail(call, refused, Reason.OTHER)
        self._alarm.close()
        self._moved.set()

    def _pump(self) -> None:
        """Expire what has timed out, start what can start, and set the alarm for the next time-based event."""
        self._woken = False
        now = monotonic()
        self._note_lost(now)
        due = self._sequencer.due()
        if due is not None and due <= now:
            self._resting.clear()
        # before instances are polled: a sequence that expires here may free its slot for a waiting one
        for call in self._sequencer.expire(now):  # as in Triton, no request id before the text
            self._executor.fail(call, Refused(Kind.UNAVAILABLE, BACKLOG_EXPIRED), Reason.REJECTED)
        self._resting = {instance: until for instance, until in self._resting.items() if until > now}
        for instance in self._executor.idle(self._resting):
            verdict = self._sequencer.poll(instance, now)
            if isinstance(verdict, Run):
                self._start(verdict)
                continue
            self._executor.spare(instance)
            self._resting[instance] = verdict.at if isinstance(verdict, WaitUntil) else inf
        times = [until for until in self._resting.values() if until < inf]
        due = self._sequencer.due()
        if due is not None:
            times.append(due)
        if times:
            self._alarm.set(min(times))
        self._moved.set()

    def _note_lost(self, now: float) -> None:
        """End the sequences of lost processes, which held the model's state, even if none of their requests runs."""
        usable = set(self._executor.usable())
        if usable != self._usable:
            self._resting.clear()
        for instance in sorted(self._usable - usable):
            self._fail(self._sequencer.lost(instance, now), LOST)
        self._usable = usable

    def _start(self, run: "Run[Call]") -> None:
        calls = [row.item for row in run.rows]
        first = next(call for call in calls if call is not None)
        works = [self._work(row, first) for row in run.rows]
        rows = sum((call or first).checked.rows for call in calls)
        self._executor.run(run.instance, calls, works, rows, run)

    def _work(self, row: "Row[Call]", first: Call) -> Work:
        call = row.item
        controls = tuple(self._controls(row))
        if call is None:
            inputs = tuple(_zeros(tensor) for tensor in first.checked.inputs)
            if any(tensor.datatype is Datatype.BYTES for tensor in inputs):
                # zeroed data would have other string lengths, hence another number of elements
                inputs = first.checked.inputs
            return Work("", (*inputs, *controls, *self._initial.values()), first.checked.outputs)
        request = call.request
        wanted = call.checked.outputs
        if wanted:
            wanted = tuple(dict.fromkeys((*wanted, *self._states)))
        assert row.life is not None
        return Work(
            request.id,
            (*call.checked.inputs, *controls, *self._state_of(row.life).values()),
            wanted,
            request.parameters,
            correlation_id=row.life.corrid,
            start=row.start,
            end=row.end,
            timeout_us=request.timeout_us,
            priority=request.priority,
        )

    def _controls(self, row: "Row[Call]") -> Iterator[Tensor]:
        shape = (1, 1) if self._config.max_batch else (1,)
        for control, value in control_values(self._batching.controls, row):
            yield Tensor(control.tensor, control.datatype, shape, _element(control.datatype, value))

    def _state_of(self, life: Life) -> dict[str, Tensor]:
        state = life.state
        return state if isinstance(state, dict) else self._initial

    def _on_free(self, batch: Batch, done: Done) -> None:
        run = batch.plan
        assert isinstance(run, Run)
        now = monotonic()
        if done.failure is None and self._states:
            self._keep_states(run, done)
        if batch.rescheduled:
            self._finish_iteration(run, batch.rescheduled, now)
        else:
            self._sequencer.done(run, now)
        if done.failure is not None and done.failure.kind is Kind.UNAVAILABLE:
            self._fail(self._sequencer.lost(run.instance, now), LOST)
        self._resting.clear()
        self._pump()

    def _finish_iteration(self, run: "Run[Call]", rescheduled: "tuple[Call, ...]", now: float) -> None:
        """The batch has finished, and an iterative model has rescheduled these requests."""
        again = frozenset(call for call in rescheduled if not call.cancelled)
        self._fail(self._sequencer.done(run, now, again), LOST)
        for call in rescheduled:
            if call.cancelled:
                self._executor.fail(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)

    def _keep_states(self, run: "Run[Call]", done: Done) -> None:
        for row, answer in zip(run.rows, done.answers, strict=True):
            if row.life is None or answer is None or answer.error is not None:
                continue
            made = {tensor.name: tensor for tensor in answer.outputs}
            state = dict(self._state_of(row.life))
            for declared in self._batching.states:
                tensor = made.get(declared.output)
                if tensor is not None:
                    state[declared.input] = tensor.copied().named(declared.input)
            row.life.state = state

    def _fail(self, calls: list[Call], text: str) -> None:
        for call in calls:
            self._executor.fail(call, Refused(Kind.UNAVAILABLE, prefix(call.request.id) + text), Reason.OTHER)


def _check_controls(batching: SequenceBatching) -> None:
    """Raises `Refused` if a control's values do not fit its type."""
    for control in batching.controls:
        for value in control.false_true:
            try:
                _element(control.datatype, value)
            except (OverflowError, ValueError):
                text = f"sequence batching control '{control.tensor}': {value} does not fit {control.datatype}"
                raise Refused(Kind.INVALID_ARGUMENT, text) from None


def _element(datatype: Datatype, value: float | str) -> bytes:
    """The bytes of a single-element tensor."""
    if datatype is Datatype.BYTES:
        data = str(value).encode()
        return LENGTH.pack(len(data)) + data
    width = ELEMENT_BYTES[datatype]
    if isinstance(value, str):
        return bytes(width)
    if datatype in _FLOATS:
        return pack(_FLOATS[datatype], value)
    # correlation ids that are too long lose their upper bytes
    return (int(value) % (1 << 8 * width)).to_bytes(width, "little")


def _initial(state: State, config: ModelConfig, folder: Path) -> Tensor:
    """The initial state of a sequence: a file or zeros. Raises `Refused` if the file is too short."""
    dims = state.initial_dims or tuple(1 if size == VARIABLE else size for size in state.dims)
    shape = (1, *dims) if config.max_batch else dims
    size = prod(dims) * ELEMENT_BYTES.get(state.datatype, LENGTH.size)
    data = bytes(size)
    if state.initial_file:
        try:
            data = (folder / INITIAL_FOLDER / state.initial_file).read_bytes()
        except OSError as error:
            text = f"initial state '{state.initial_file}' cannot be read: {error.strerror}"
            raise Refused(Kind.INVALID_ARGUMENT, text) from None
        if state.datatype is not Datatype.BYTES:
            if len(data) < size:
                text = (
                    f"initial state '{state.initial_file}' has {len(data)} bytes; state '{state.input}' needs {size}"
                )
                raise Refused(Kind.INVALID_ARGUMENT, text)
            data = data[:size]
    return Tensor(state.input, state.datatype, shape, data)


def _zeros(tensor: Tensor) -> Tensor:
    """A tensor of zeros with the same size."""
    return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(size_bytes(tensor.data)))
