"""One request of an ensemble: which steps can start, which responses are ready, which tensors can be freed.

As in Triton a step runs as soon as all its inputs are there, once per response of a decoupled step before it.
Responses leave in the order in which the decoupled step produced them, however long later steps take.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from forebay.core.serving.config import VARIABLE, ModelConfig

V = TypeVar("V")
L = TypeVar("L")
K = TypeVar("K", bound=Hashable)

PLANS_MAX = 64
"""Most plans that are cached, one per set of requested outputs: clients choose them."""


class Start(NamedTuple, Generic[V]):
    """Run step `step` (an index) with these inputs, by the model's names; `run` identifies this run."""

    run: int
    step: int
    inputs: dict[str, V]


@dataclass(slots=True)
class Progress(Generic[V, L]):
    """The actions that follow from an event; the caller must do all of them."""

    starts: list[Start[V]] = field(default_factory=list)
    responses: list[tuple[int, dict[str, V]]] = field(default_factory=list)
    """(number, requested outputs by the ensemble's names); call `sent(number)` when the tensors are no longer
    needed."""
    freed: list[L] = field(default_factory=list)
    """Leases whose tensors are no longer needed: free their memory."""
    ended: bool = False
    """The request is complete. With `error`, that is its last response; else the last of `responses` was, if any."""
    error: str = ""
    """INVALID_ARGUMENT from `begin`, INTERNAL from `result`; from `fail`, that of the failed run."""
    cancel: list[int] = field(default_factory=list)
    """Runs to cancel; their ends must still be reported, by `result` with `final`."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What must run for a set of requested outputs."""

    wanted: tuple[str, ...]
    given: tuple[str, ...]
    """Tensors that come with the request."""
    readers: dict[str, tuple[int, ...]]
    """By tensor: the steps to run that read it."""
    uses: dict[str, int]
    """By tensor: number of readers, including the client. Unlisted tensors are not needed."""


class Dag:
    """The static part of an ensemble that passed `check`; `decoupled` is by step, from that check."""

    __slots__ = ("_plans", "decoupled", "many", "name", "outputs", "sources", "steps")

    def __init__(self, config: ModelConfig, decoupled: Sequence[bool]) -> None:
        self.name = config.name
        self.steps = config.steps
        self.decoupled = tuple(decoupled)
        self.many = any(decoupled)
        self.outputs = tuple(spec.name for spec in config.outputs)
        self.sources = tuple(tuple(dict.fromkeys(step.inputs.values())) for step in config.steps)
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def plan(self, wanted: Sequence[str]) -> _Plan:
        """What must run for these outputs (empty: all)."""
        key = tuple(wanted) or self.outputs
        plan = self._plans.get(key)
        if plan is None:
            plan = self._made(tuple(dict.fromkeys(key)))
            if len(self._plans) < PLANS_MAX:
                self._plans[key] = plan
        return plan

    def _made(self, wanted: tuple[str, ...]) -> _Plan:
        makers = {tensor: index for index, step in enumerate(self.steps) for tensor in step.outputs.values()}
        needed: set[int] = set()
        tensors = list(wanted)
        for tensor in tensors:
            index = makers.get(tensor)
            if index is not None and index not in needed:
                needed.add(index)
                tensors += self.sources[index]
        readers: dict[str, tuple[int, ...]] = {}
        for index in sorted(needed):
            for tensor in self.sources[index]:
                readers[tensor] = (*readers.get(tensor, ()), index)
        uses = {tensor: len(indexes) for tensor, indexes in readers.items()}
        for tensor in wanted:
            uses[tensor] = uses.get(tensor, 0) + 1
        given = tuple(tensor for tensor in uses if tensor not in makers)
        return _Plan(wanted, given, readers, uses)


class _Hold(Generic[L]):
    """The lease of one response: `unread` uses of its tensors have not begun, `reading` are in progress."""

    __slots__ = ("lease", "reading", "unread")

    def __init__(self, lease: L | None) -> None:
        self.lease = lease
        self.unread = 0
        self.reading = 0


class _Cell(Generic[V, L]):
    """An available tensor with remaining uses (None: it will never exist, and its readers run without it)."""

    __slots__ = ("hold", "unread", "value")

    def __init__(self, value: V | None, hold: _Hold[L], unread: int) -> None:
        self.value = value
        self.hold = hold
        self.unread = unread


class _Run(NamedTuple, Generic[L]):
    step: int
    turn: int
    """Which response of the last decoupled step before it this belongs to; 0 if there is none."""
    holds: list[_Hold[L]]


class Flow(Generic[V, L]):
    """One request. V is a tensor, L a lease that frees a response's memory (None: nothing to free)."""

    __slots__ = ("_cells", "_dag", "_made", "_next", "_number", "_over", "_plan", "_runs", "_unsent")

    def __init__(self, dag: Dag, wanted: Sequence[str] = ()) -> None:
        """`wanted`: the requested outputs (empty: all); steps that none of them needs do not run."""
        self._dag = dag
        self._plan = dag.plan(wanted)
        self._cells: dict[tuple[str, int], _Cell[V, L]] = {}
        self._runs: dict[int, _Run[L]] = {}
        self._unsent: dict[int, list[_Hold[L]]] = {}
        self._made: dict[int, int] = {}
        self._number = 0
        self._next = 0
        self._over = False

    def begin(self, inputs: Mapping[str, V], lease: L | None = None) -> Progress[V, L]:
        """Start with the request's inputs, by name; optional ones may be missing."""
        progress: Progress[V, L] = Progress()
        self._store({tensor: inputs.get(tensor) for tensor in self._plan.given}, 0, lease, progress)
        return self._ended(progress)

    def result(
        self, run: int, outputs: Mapping[str, V] | None, lease: L | None = None, *, final: bool
    ) -> Progress[V, L]:
        """A run has produced a response (outputs by the model's names), or only (None) ended."""
        progress: Progress[V, L] = Progress()
        under_way = self._runs.get(run)
        if self._over or under_way is None or outputs is None:
            if lease is not None:
                progress.freed.append(lease)
        else:
            step, turn, _ = under_way
            if self._dag.decoupled[step]:
                turn = self._made.get(step, 0)
                self._made[step] = turn + 1
            named = {tensor: outputs.get(own) for own, tensor in self._dag.steps[step].outputs.items()}
            self._store(named, turn, lease, progress)
        if final and under_way is not None:
            del self._runs[run]
            _freed(under_way.holds, progress.freed)
        return self._ended(progress)

    def fail(self, run: int, text: str) -> Progress[V, L]:
        """A run has failed and ended, and the ensemble with it. `error` of the progress names the step."""
        progress: Progress[V, L] = Progress()
        under_way = self._runs.pop(run, None)
        if under_way is None:
            return progress
        _freed(under_way.holds, progress.freed)
        if not self._over:
            model = self._dag.steps[under_way.step].model
            said = text if model in text else f"step of model '{model}': {text}"
            self._end(progress, f"in ensemble '{self._dag.name}', {said}")
        return progress

    def sent(self, number: int) -> list[L]:
        """The tensors of a response are no longer needed. Returns the leases to free."""
        freed: list[L] = []
        _freed(self._unsent.pop(number), freed)
        return freed

    def abandon(self) -> Progress[V, L]:
        """Cancel the request: `cancel` what runs, free what is `freed`; later results are freed at once."""
        progress: Progress[V, L] = Progress()
        if not self._over:
            self._end(progress, "")
        return progress

    def _store(self, tensors: Mapping[str, V | None], turn: int, lease: L | None, progress: Progress[V, L]) -> None:
        hold = _Hold(lease)
        steps: set[int] = set()
        for tensor, value in tensors.items():
            uses = self._plan.uses.get(tensor, 0)
            if uses:
                self._cells[tensor, turn] = _Cell(value, hold, uses)
                hold.unread += uses
                steps.update(self._plan.readers.get(tensor, ()))
        for step in sorted(steps):
            if all((tensor, turn) in self._cells for tensor in self._dag.sources[step]):
                self._start(step, turn, progress)
        while all((tensor, self._next) in self._cells for tensor in self._plan.wanted):
            holds, values = self._taken(self._plan.wanted, self._next)
            self._unsent[self._next] = holds
            progress.responses.append((self._next, values))
            self._next += 1

    def _start(self, step: int, turn: int, progress: Progress[V, L]) -> None:
        holds, values = self._taken(self._dag.sources[step], turn)
        inputs = {own: values[tensor] for own, tensor in self._dag.steps[step].inputs.items() if tensor in values}
        self._number += 1
        self._runs[self._number] = _Run(step, turn, holds)
        progress.starts.append(Start(self._number, step, inputs))

    def _taken(self, tensors: Sequence[str], turn: int) -> tuple[list[_Hold[L]], dict[str, V]]:
        """Begin one use of each tensor; tensors without further uses are dropped, so that they live no longer than
        it."""
        holds, values = [], {}
        for tensor in tensors:
            cell = self._cells[tensor, turn]
            cell.unread -= 1
            cell.hold.unread -= 1
            cell.hold.reading += 1
            holds.append(cell.hold)
            if cell.value is not None:
                values[tensor] = cell.value
            if not cell.unread:
                del self._cells[tensor, turn]
        return holds, values

    def _ended(self, progress: Progress[V, L]) -> Progress[V, L]:
        if self._runs or self._over:
            return progress
        stuck = bool(self._cells) or not (self._next or self._dag.many)
        self._end(
            progress,
            f"in ensemble '{self._dag.name}', unexpected deadlock, at least one output is not set while no more"
            " ensemble steps can be made"
            if stuck
            else "",
        )
        progress.ended = True
        return progress

    def _end(self, progress: Progress[V, L], error: str) -> None:
        self._over = True
        progress.ended = bool(error)
        progress.error = error
        progress.cancel = list(self._runs)
        holds = {id(cell.hold): cell.hold for cell in self._cells.values()}
        self._cells.clear()
        for hold in holds.values():
            hold.unread = 0
            if not hold.reading and hold.lease is not None:
                progress.freed.append(hold.lease)


def _freed(holds: list[_Hold[L]], freed: list[L]) -> None:
    """The uses have ended; `freed` gets the leases for which they were the last."""
    for hold in holds:
        hold.reading -= 1
        if not hold.reading and not hold.unread and hold.lease is not None:
            freed.append(hold.lease)


class Gates(Generic[K]):
    """Enforces `inflight_max` of an ensemble: concurrent runs of each step over all requests; others wait in order.

    0: unlimited. The number of waiting runs is bounded by what earlier steps may have in flight.
    """

    __slots__ = ("_inflight_max", "_inside", "_line")

    def __init__(self, inflight_max: int, steps: int) -> None:
        self._inflight_max = inflight_max
        self._inside = [0] * steps
        self._line: list[OrderedDict[K, None]] = [OrderedDict() for _ in range(steps)]

    def enter(self, step: int, key: K) -> bool:
        """Whether the run may start now; otherwise it waits, and a later `leave` returns its key."""
        if self._inflight_max and self._inside[step] >= self._inflight_max:
            self._line[step][key] = None
            return False
        self._inside[step] += 1
        return True

    def leave(self, step: int) -> K | None:
        """A run of the step has ended. Returns the key of the run that starts now, if any."""
        if self._line[step]:
            return self._line[step].popitem(last=False)[0]
        self._inside[step] -= 1
        return None

    def drop(self, step: int, key: K) -> bool:
        """Cancel a waiting run. False: it is not (or no longer) waiting."""
        return self._line[step].pop(key, False) is None


def carried_shape(shape: tuple[int, ...], made_rows: int, dims: tuple[int, ...], batches: bool) -> tuple[int, ...]:
    """The shape of a tensor passed between a model that batches and one that does not (Triton's rule).

    `made_rows`: batch size of the request that made it, 0: its producer does not batch. `dims`, `batches`: the
    reader's.
    """
    if batches == bool(made_rows):
        return shape
    fits = len(shape) == len(dims) and all(a == b or VARIABLE in {a, b} for a, b in zip(shape, dims, strict=True))
    if batches and fits:
        return (1, *shape)
    if not batches and not fits and made_rows == 1:
        return shape[1:]
    return shape
