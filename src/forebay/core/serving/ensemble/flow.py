"""One request of an ensemble: which steps can start, and which responses are ready.

As in Triton a step runs as soon as all its inputs are there, once per response of a decoupled step before it.
Responses leave in the order in which the decoupled step produced them, however long later steps take. A tensor is
kept until its last reader has started.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from forebay.core.serving.config import VARIABLE, ModelConfig, Step

V = TypeVar("V")
K = TypeVar("K", bound=Hashable)

PLANS_MAX = 64
"""Most plans that are cached, one per set of requested outputs: clients choose them."""


class Start(Generic[V]):
    """Run step `step` (an index) with these inputs, by the model's names; `run` identifies this run."""

    __slots__ = ("inputs", "run", "step")

    def __init__(self, run: int, step: int, inputs: dict[str, V]) -> None:
        self.run = run
        self.step = step
        self.inputs = inputs


class Progress(Generic[V]):
    """The actions that follow from an event; the caller must do all of them."""

    __slots__ = ("cancel", "ended", "error", "responses", "starts")

    def __init__(self) -> None:
        self.starts: list[Start[V]] = []
        self.responses: list[dict[str, V]] = []
        """Requested outputs, by the ensemble's names."""
        self.ended = False
        """The request is complete. With `error`, that is its last response; else the last of `responses` was, if
        any."""
        self.error = ""
        """INVALID_ARGUMENT from `begin`, INTERNAL from `result`; from `fail`, that of the failed run."""
        self.cancel: list[int] = []
        """Runs to cancel; their ends must still be reported, by `result` with `final`."""


class _Plan:
    """What must run for a set of requested outputs: tensors and steps by number; the client is the last reader."""

    __slots__ = ("feeds", "given", "makes", "needs", "readers", "sources", "uses", "wanted")

    def __init__(self, steps: Sequence[Step], wanted: tuple[str, ...]) -> None:
        makers = {tensor: index for index, step in enumerate(steps) for tensor in step.outputs.values()}
        running: set[int] = set()
        names = list(wanted)
        for tensor in names:  # the list grows while it is iterated
            index = makers.get(tensor)
            if index is not None and index not in running:
                running.add(index)
                names += steps[index].inputs.values()
        number = {tensor: at for at, tensor in enumerate(dict.fromkeys(names))}
        self.wanted = [(tensor, number[tensor]) for tensor in wanted]
        self.given = [(tensor, at) for tensor, at in number.items() if tensor not in makers]
        """Tensors that come with the request."""
        inputs = [steps[index].inputs if index in running else {} for index in range(len(steps))]
        self.feeds = [[(own, number[tensor]) for own, tensor in fed.items()] for fed in inputs]
        """By step: its inputs, by the model's names, and their tensors."""
        self.makes = [
            [(own, number[tensor]) for own, tensor in step.outputs.items() if tensor in number] for step in steps
        ]
        """By step: its outputs that are needed."""
        self.sources = [list(dict.fromkeys([at for _, at in feed])) for feed in [*self.feeds, self.wanted]]
        """By reader: the tensors that it needs, each once."""
        self.needs = [len(source) for source in self.sources]
        self.readers: list[list[int]] = [[] for _ in number]
        """By tensor."""
        for reader, source in enumerate(self.sources):
            for at in source:
                self.readers[at].append(reader)
        self.uses = [len(readers) for readers in self.readers]


class Dag:
    """The static part of an ensemble that passed `check`; `decoupled` is by step, from that check."""

    __slots__ = ("_plans", "decoupled", "many", "name", "outputs", "steps")

    def __init__(self, config: ModelConfig, decoupled: Sequence[bool]) -> None:
        self.name = config.name
        self.steps = config.steps
        self.decoupled = tuple(decoupled)
        self.many = any(decoupled)
        self.outputs = tuple([spec.name for spec in config.outputs])
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def plan(self, wanted: Sequence[str]) -> _Plan:
        """What must run for these outputs (empty: all)."""
        key = tuple(wanted) or self.outputs
        plan = self._plans.get(key)
        if plan is None:
            plan = _Plan(self.steps, tuple(dict.fromkeys(key)))
            if len(self._plans) < PLANS_MAX:
                self._plans[key] = plan
        return plan


class _Turn(Generic[V]):
    """The tensors of one response of the last decoupled step before them; without one, of the request."""

    __slots__ = ("kept", "lacking", "unread", "values")

    def __init__(self, plan: _Plan) -> None:
        self.values: list[V | None] = [None] * len(plan.uses)
        """None: not there yet, or it will never exist, and its readers run without it."""
        self.unread = plan.uses.copy()
        """By tensor: readers that have not had it."""
        self.lacking = plan.needs.copy()
        """By reader: tensors that are not there yet."""
        self.kept = 0
        """Tensors that are there and have not been read by all."""


class Flow(Generic[V]):
    """One request. V is a tensor."""

    __slots__ = ("_dag", "_made", "_next", "_number", "_over", "_plan", "_runs", "_turns")

    def __init__(self, dag: Dag, wanted: Sequence[str] = ()) -> None:
        """`wanted`: the requested outputs (empty: all); steps that none of them needs do not run."""
        self._dag = dag
        self._plan = dag.plan(wanted)
        self._turns: dict[int, _Turn[V]] = {}
        """Those that have tensors."""
        self._runs: dict[int, tuple[int, int]] = {}
        """Step and turn, of the runs under way."""
        self._made: dict[int, int] = {}
        """Responses so far, by decoupled step."""
        self._number = 0
        self._next = 0
        """The turn of the next response."""
        self._over = False

    def begin(self, inputs: Mapping[str, V]) -> Progress[V]:
        """Start with the request's inputs, by name; optional ones may be missing."""
        progress: Progress[V] = Progress()
        self._store(self._plan.given, inputs, 0, progress)
        return self._ended(progress)

    def result(self, run: int, outputs: Mapping[str, V] | None, *, final: bool) -> Progress[V]:
        """A run has produced a response (outputs by the model's names), or only (None) ended."""
        progress: Progress[V] = Progress()
        under_way = self._runs.get(run)
        if under_way is None:
            return progress
        if outputs is not None and not self._over:
            step, turn = under_way
            if self._dag.decoupled[step]:
                turn = self._made.get(step, 0)
                self._made[step] = turn + 1
            self._store(self._plan.makes[step], outputs, turn, progress)
        if final:
            del self._runs[run]
        return self._ended(progress)

    def fail(self, run: int, text: str) -> Progress[V]:
        """A run has failed and ended, and the ensemble with it. `error` of the progress names the step."""
        progress: Progress[V] = Progress()
        under_way = self._runs.pop(run, None)
        if under_way is not None and not self._over:
            model = self._dag.steps[under_way[0]].model
            said = text if model in text else f"step of model '{model}': {text}"
            self._end(progress, f"in ensemble '{self._dag.name}', {said}")
        return progress

    def abandon(self) -> Progress[V]:
        """Cancel the request: `cancel` what runs."""
        progress: Progress[V] = Progress()
        if not self._over:
            self._end(progress, "")
        return progress

    def _store(
        self, tensors: list[tuple[str, int]], values: Mapping[str, V], number: int, progress: Progress[V]
    ) -> None:
        """Keep these tensors, and start the steps that now have all of theirs."""
        plan = self._plan
        turn = self._turns.get(number)
        if turn is None:
            turn = self._turns[number] = _Turn(plan)
        ready: list[int] = []
        for name, at in tensors:
            turn.values[at] = values.get(name)
            turn.kept += 1
            for reader in plan.readers[at]:
                turn.lacking[reader] -= 1
                if not turn.lacking[reader]:
                    ready.append(reader)
        for step in sorted(ready):
            if step < len(plan.feeds):
                self._number += 1
                self._runs[self._number] = (step, number)
                progress.starts.append(Start(self._number, step, self._taken(plan.feeds[step], step, turn, number)))
        client = len(plan.feeds)
        next_turn = self._turns.get(self._next)
        while next_turn is not None and not next_turn.lacking[client]:
            progress.responses.append(self._taken(plan.wanted, client, next_turn, self._next))
            self._next += 1
            next_turn = self._turns.get(self._next)

    def _taken(self, names: list[tuple[str, int]], reader: int, turn: _Turn[V], number: int) -> dict[str, V]:
        """The tensors of a reader. Those that nobody else will read are dropped, so that they live no longer."""
        values: dict[str, V] = {}
        for name, at in names:
            value = turn.values[at]
            if value is not None:
                values[name] = value
        for at in self._plan.sources[reader]:
            turn.unread[at] -= 1
            if not turn.unread[at]:
                turn.values[at] = None
                turn.kept -= 1
        if not turn.kept:
            del self._turns[number]
        return values

    def _ended(self, progress: Progress[V]) -> Progress[V]:
        if self._runs or self._over:
            return progress
        stuck = bool(self._turns) or not (self._next or self._dag.many)
        self._end(
            progress,
            f"in ensemble '{self._dag.name}', unexpected deadlock, at least one output is not set while no more"
            " ensemble steps can be made"
            if stuck
            else "",
        )
        progress.ended = True
        return progress

    def _end(self, progress: Progress[V], error: str) -> None:
        self._over = True
        progress.ended = bool(error)
        progress.error = error
        progress.cancel = list(self._runs)
        self._turns.clear()


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
