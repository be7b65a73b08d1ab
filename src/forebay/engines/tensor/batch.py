"""Merges requests for models that take a batch as one array, and splits the results.

The server sends several requests at once only to models that batch, so the first dimension of their arrays is the
batch. Requests with different shapes run separately, one group for each shape.

A large batch need not be fastest as a whole. On a CPU, what one layer makes of it may not fit into the core's cache
until the next layer reads it. `MicroBatches` finds how many rows a model is to be given at once. What has run is then
answered while the rest of the batch runs.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec.structs import replace

from forebay.core.serving.config import ModelConfig
from forebay.engines.tensor.arrays import joined, made_by
from forebay.engines.tensor.protocol import Array, Emit, Request, Response, Rows, Stack, failed

Run = Callable[[dict[str, Array], Sequence[str]], dict[str, Array]]
"""Inputs by name, and names of existing outputs that are wanted → outputs by name, in that order.

Raises one of `FAILURES`; backends translate their libraries' exceptions.
"""

Join = Callable[[Sequence[Array]], Array]
"""Arrays → one array, concatenated along the first dimension."""

FAILURES: Final = (RuntimeError, ValueError)

RUNS: Final = 7
"""Of batches with each number of rows in a comparison."""
QUARTILE: Final = 1
"""What counts of their times, in order: only the slow ones are chance."""
EQUAL: Final = 1.01
"""Times that differ by less are the same; more rows at once are better then."""
CLOSE: Final = 1.05
"""Numbers of rows that take longer do not take part in the next comparison,"""
HOPELESS: Final = 1.3
"""and those that take this much longer leave this one"""
PRUNED_AFTER: Final = 4
"""after so many batches of each: some are slow because the process was stopped."""
REST, REST_MOST = 256, 1_024
"""Batches until the next comparison, twice as many each time: caches are shared, and so is the machine."""
SMALLER_MOST: Final = 128
"""So many smaller batches in a row end a first comparison of large ones, which are rare then."""
SHORT_NS: Final = 2_000_000
"""A batch that takes less stays whole: each run has a cost of its own."""
EARLY_NS: Final = 20_000_000
"""Between answers of a batch,"""
EARLY_SHARED_NS: Final = 100_000_000
"""and on a single core, which the model shares with the server: each time costs it 1 to 2 ms there."""


def execute(
    requests: Sequence[Request],
    outputs: Sequence[str],
    run: Run,
    join: Join = joined,
    *,
    micro: "MicroBatches | None" = None,
    emit: Emit | None = None,
) -> Sequence[Response]:
    """One response for each request, in order. `outputs` are all outputs of the model.

    If a batch fails, its requests are run one by one, so that one request cannot fail the others. With `micro` it may
    run in parts, and then the first requests are answered through `emit` as soon as their rows have run.
    """
    how = _How(run, micro, emit)
    if type(requests) is Stack:
        return _together(requests, outputs, how)
    groups = _alike(requests)
    if len(groups) == 1:
        return _of_group(requests, outputs, how, join)
    how = _How(run, micro, None)  # they are not answered in order
    responses = [Response()] * len(requests)
    for places in groups:
        group = [requests[place] for place in places]
        for place, response in zip(places, _of_group(group, outputs, how, join), strict=True):
            responses[place] = kept(response)
    return responses


class _How:
    """How to run rows."""

    def __init__(self, run: Run, micro: "MicroBatches | None", emit: Emit | None) -> None:
        self._run = run
        self._micro = micro
        self._emit = emit

    def run(self, inputs: dict[str, Array], wanted: Sequence[str], early: "_Early | None" = None) -> dict[str, Array]:
        """Outputs by name, without the rows that `early` has answered. Raises one of `FAILURES`."""
        return self._run(inputs, wanted) if self._micro is None else self._micro.run(self._run, inputs, wanted, early)

    def early(self, stack: Stack) -> "_Early | None":
        """For requests that want the same outputs."""
        return None if self._micro is None or self._emit is None else _Early(stack, self._emit)


class _Early:
    """Answers the first requests of a batch, while the others run."""

    def __init__(self, stack: Stack, emit: Emit) -> None:
        self._stack = stack
        self._emit = emit
        self.requests = self.rows = 0
        """Those that are answered."""

    def answer(self, made: list[dict[str, Array]], end: int) -> list[dict[str, Array]]:
        """Answer requests whose rows are all before `end`. `made`: outputs of the rows up to there that are not
        answered. Returns those that remain, in memory of their own unless all do.
        """
        sizes = self._stack.sizes
        first, start = self.requests, self.rows
        while self.rows + sizes[self.requests] <= end:
            self.rows += sizes[self.requests]
            self.requests += 1
        if self.requests == first:
            return made
        whole = {name: joined([piece[name] for piece in made]) for name in made[0]}
        count = self.rows - start
        left = [] if self.rows == end else [{name: array[count:].copy() for name, array in whole.items()}]
        answered = {name: array[:count] for name, array in whole.items()}
        self._emit(first, Rows(answered, sizes[first : self.requests]), True)
        return left


def early_ns() -> int:
    """Least time between answers of a batch, on the cores that this process may use."""
    return EARLY_NS if len(os.sched_getaffinity(0)) > 1 else EARLY_SHARED_NS


def answers(config: ModelConfig, found: Collection[str]) -> tuple[str, ...]:
    """Configured outputs, sequence states included; all outputs if none is configured."""
    return tuple(name for name in made_by(config) if name in found) or tuple(found)


def unknown(request: Request, outputs: Sequence[str]) -> str:
    """The error for the first wanted output that does not exist; empty: all exist."""
    strange = next((name for name in request.wanted if name not in outputs), "")
    return f"unexpected inference output '{strange}'" if strange else ""


def _alone(request: Request, outputs: Sequence[str], how: _How) -> Response:
    problem = unknown(request, outputs)
    if problem:
        return Response(error=problem)
    try:
        return Response(how.run(request.inputs, request.wanted or outputs))
    except FAILURES as error:
        return failed(error)


def _alike(requests: Sequence[Request]) -> list[list[int]]:
    """Indexes of requests whose inputs differ only in the number of rows."""
    groups: list[tuple[dict[str, Array], list[int]]] = []
    for place, request in enumerate(requests):
        for inputs, places in groups:
            if _same(inputs, request.inputs):
                places.append(place)
                break
        else:
            groups.append((request.inputs, [place]))
    return [places for _, places in groups]


def _same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    if one.keys() != other.keys():
        return False
    for name, array in one.items():
        found = other[name]
        if array.dtype != found.dtype or array.ndim != found.ndim or array.shape[1:] != found.shape[1:]:
            return False
    return True


def _of_group(group: Sequence[Request], outputs: Sequence[str], how: _How, join: Join) -> Sequence[Response]:
    first = group[0].inputs
    if len(group) == 1 or not first or not all(array.ndim for array in first.values()):
        return [_alone(request, outputs, how) for request in group]
    inputs = {name: join([request.inputs[name] for request in group]) for name in first}
    sizes = [len(next(iter(request.inputs.values()))) for request in group]
    wanted = [request.wanted for request in group]
    return _together(Stack(inputs, sizes, wanted, lambda place, _: group[place]), outputs, how)


def _together(stack: Stack, outputs: Sequence[str], how: _How) -> Sequence[Response]:
    """The responses to requests that were not answered early."""
    wanted = stack.wanted
    first = wanted[0]
    alike = wanted.count(first) == len(wanted)
    asked = first if alike else tuple(dict.fromkeys([name for each in wanted for name in each]))
    early = how.early(stack) if alike else None
    found: dict[str, Array] | None = None
    if set(asked).issubset(outputs):
        with suppress(*FAILURES):
            found = how.run(stack.inputs, outputs if () in wanted else asked, early)
    if early is not None and early.requests:
        stack = stack.part(early.requests, len(stack))
    if found is not None:
        return _apart(stack, found, alike=alike)
    return [kept(_alone(request, outputs, how)) for request in stack]


def kept(response: Response) -> Response:
    """With outputs in memory of their own: a model may answer in the same memory again in its next run."""
    return replace(response, outputs={name: array.copy() for name, array in response.outputs.items()})


def _apart(stack: Stack, found: dict[str, Array], *, alike: bool) -> Sequence[Response]:
    """Split the outputs of a batch by request; `alike`: all requests want the same outputs."""
    total = sum(stack.sizes)
    for name, array in found.items():
        rows = len(array) if array.ndim else 0
        if rows != total:
            text = f"output '{name}' has {rows} rows for a batch of {total}; a batching model must keep their number"
            return [Response(error=text) for _ in stack.sizes]
    if alike:
        return Rows(found, stack.sizes)
    responses = []
    start = 0
    for wanted, size in zip(stack.wanted, stack.sizes, strict=True):
        names = wanted or found
        responses.append(Response({name: found[name][start : start + size] for name in names}))
        start += size
    return responses


class MicroBatches:
    """Runs batches of a model whose rows are independent, a number of rows at a time. Any thread may use it."""

    def __init__(self, rows: int | None = None, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """`rows` at a time; 0: whole batches; None: as many as is fastest, by comparisons now and then."""
        self._rows = rows
        self._clock_ns = clock_ns
        self._early_ns = early_ns()
        self._whole = rows == 0
        self._known = False
        """Whether a batch has run: the first one runs as a whole, and shows whether the model keeps its inputs."""
        self._kinds: dict[int, _Kind] = {}
        self._lock = threading.Lock()

    def run(
        self, run: Run, inputs: dict[str, Array], wanted: Sequence[str], early: _Early | None = None
    ) -> dict[str, Array]:
        """`run(inputs, wanted)`, but perhaps in several calls, and without the rows that `early` has answered."""
        rows = 0 if self._whole else _rows(inputs)
        if rows < 2 or not self._known:
            self._known = True
            return run(inputs, wanted)
        part = partial(_part, run, inputs, wanted)
        if self._rows is not None:
            return self._cut(part, rows, self._rows, early)
        whole = (rows - 1).bit_length()
        with self._lock:
            kind = self._kind(inputs, rows)
            size = kind.turn(whole)
            if kind.compares(whole):
                early = None  # it takes time
        begun_ns = self._clock_ns()
        made = self._cut(part, rows, 1 << size, early)
        with self._lock:
            kind.note(whole, size, self._clock_ns() - begun_ns, rows)
        return made

    def chosen(self) -> dict[int, int]:
        """Bytes of a row, fewer than that → how many rows of the largest batches are run at once. Empty: nothing is
        to be found out, or no batch has run.
        """
        if self._whole:
            return {}
        with self._lock:
            return {1 << size: kind.chosen() for size, kind in self._kinds.items()}

    def _kind(self, inputs: dict[str, Array], rows: int) -> "_Kind":
        size = (sum([array.nbytes for array in inputs.values()]) // rows).bit_length()
        kind = self._kinds.get(size)
        if kind is None:
            kind = self._kinds[size] = _Kind()
        return kind

    def _cut(
        self, part: Callable[[int, int], dict[str, Array]], rows: int, most: int, early: _Early | None
    ) -> dict[str, Array]:
        """Run all rows, at most so many at once."""
        count = -(-rows // most)
        if count == 1:
            return part(0, rows)
        pieces: list[dict[str, Array]] = []
        first: dict[str, Array] = {}
        seen: set[tuple[str, int]] = set()
        start, since_ns = 0, self._clock_ns()
        for number in range(1, count + 1):
            end = rows * number // count
            try:
                piece = part(start, end)
            except FAILURES:
                break
            first = first or piece
            if not _fit(first, piece, end - start, seen):
                break
            pieces.append(piece)
            start = end
            if early is not None and end < rows and self._clock_ns() - since_ns >= self._early_ns:
                left = early.answer(pieces, end)
                if left is not pieces:
                    pieces, since_ns = left, self._clock_ns()
                    seen.clear()  # what is answered may be overwritten
        else:
            return {name: joined([piece[name] for piece in pieces]) for name in pieces[0]}
        made = part(0 if early is None else early.rows, rows)  # with the same error, if it is the request's
        self._whole = True
        return made


class _Kind:
    """How many rows of about one size to run at once: a power of two, found by trying several in turn.

    Sizes are exponents of two. Only the largest batches take part in comparisons; what they show holds for all.
    """

    def __init__(self) -> None:
        self._largest = 0
        self._rest, self._next_rest = 0, REST
        self._tried: dict[int, list[int]] = {}
        """The sizes in a comparison, and nanoseconds for a row."""
        self._costs: dict[int, int] = {}
        """What the last one has shown."""
        self._compared = False
        """Whether there was one of the largest batches."""
        self._smaller = 0
        """Batches in a row that took no part in the first one."""

    def turn(self, whole: int) -> int:
        """The size for a batch that is `whole` itself: the best, or in a comparison the one with the fewest turns."""
        self._smaller = self._smaller + 1 if whole < self._largest and not self._compared else 0
        if whole > self._largest or self._smaller > SMALLER_MOST:  # a new comparison, of all sizes
            self._largest, self._rest, self._next_rest = whole, 0, REST
            self._compared, self._smaller = False, 0
            self._tried = {size: [] for size in range(whole, -1, -1)}
        elif whole == self._largest and self._rest:
            self._rest -= 1
        elif whole == self._largest:
            fewest = min([len(times) for times in self._tried.values()])
            return next(size for size, times in self._tried.items() if len(times) == fewest)
        return self._best(whole)

    def compares(self, whole: int) -> bool:
        """Whether a batch that is `whole` itself takes part in a comparison now."""
        return whole == self._largest and not self._rest

    def chosen(self) -> int:
        """How many rows of the largest batches are run at once, between comparisons."""
        return 1 << self._best(self._largest)

    def note(self, whole: int, size: int, spent_ns: int, rows: int) -> None:
        """A batch was run like that."""
        times = self._tried.get(size)
        if times is None or not self.compares(whole):
            return
        if size == whole and spent_ns < SHORT_NS:
            self._costs.clear()
            self._compare(())
            return
        times.append(spent_ns // rows)
        least = min([len(each) for each in self._tried.values()])
        if least == PRUNED_AFTER:
            fastest = min([min(each) for each in self._tried.values()])
            self._tried = {each: found for each, found in self._tried.items() if min(found) < HOPELESS * fastest}
        elif least >= RUNS:
            self._costs = {each: sorted(found)[QUARTILE] for each, found in self._tried.items()}
            limit = CLOSE * min(self._costs.values())
            self._compare([each for each, cost in self._costs.items() if cost < limit])

    def _best(self, whole: int) -> int:
        costs = {size: cost for size, cost in self._costs.items() if size <= whole}
        least = min(costs.values(), default=0)
        return max([size for size, cost in costs.items() if cost <= EQUAL * least], default=whole)

    def _compare(self, sizes: Collection[int]) -> None:
        """Next, after a rest, compare these sizes, the best and its neighbours."""
        self._compared = True
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, REST_MOST)
        best = self._best(self._largest)
        near = {best - 1, best, best + 1, *sizes}
        self._tried = {size: [] for size in sorted(near, reverse=True) if 0 <= size <= self._largest}


def _part(run: Run, inputs: dict[str, Array], wanted: Sequence[str], start: int, end: int) -> dict[str, Array]:
    """Run the rows from `start` to before `end`."""
    return run({name: array[start:end] for name, array in inputs.items()}, wanted)


def _rows(inputs: dict[str, Array]) -> int:
    """Their common number of rows; 0: they have none."""
    rows = 0
    for array in inputs.values():
        if not array.ndim or (rows and len(array) != rows):
            return 0
        rows = len(array)
    return rows


def _fit(first: dict[str, Array], made: dict[str, Array], rows: int, seen: set[tuple[str, int]]) -> bool:
    """Whether outputs have so many rows and can be put behind the first ones. `seen`: where those before begin."""
    for name, array in made.items():
        other = first[name]
        shape = array.shape
        if not shape or shape[0] != rows or shape[1:] != other.shape[1:] or array.dtype != other.dtype:
            return False
        if array.size:
            place: tuple[str, int] = (name, array.__array_interface__["data"][0])
            if place in seen:
                return False  # a model that keeps its outputs has overwritten one
            seen.add(place)
    return True
