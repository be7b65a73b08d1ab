"""Merges requests for models that take a batch as one array, and splits the results.

The server sends several requests at once only to models that batch, so the first dimension of their arrays is the
batch. Requests with different shapes run separately, one group for each shape.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from forebay.core.serving.config import ModelConfig
from forebay.engines.tensor.arrays import joined, made_by
from forebay.engines.tensor.protocol import Array, Request, Response, Rows, Stack, failed

Run = Callable[[dict[str, Array], Sequence[str]], dict[str, Array]]
"""Inputs by name, and names of existing outputs that are wanted → outputs by name, in that order.

Raises one of `FAILURES`; backends translate their libraries' exceptions.
"""

Join = Callable[[Sequence[Array]], Array]
"""Arrays → one array, concatenated along the first dimension."""

FAILURES: Final = (RuntimeError, ValueError)


def execute(requests: Sequence[Request], outputs: Sequence[str], run: Run, join: Join = joined) -> Sequence[Response]:
    """One response for each request, in order. `outputs` are all outputs of the model.

    If a batch fails, its requests are run one by one, so that one request cannot fail the others.
    """
    if type(requests) is Stack:
        return _together(requests, outputs, run)
    groups = _alike(requests)
    if len(groups) == 1:
        return _of_group(requests, outputs, run, join)
    responses = [Response()] * len(requests)
    for places in groups:
        group = [requests[place] for place in places]
        for place, response in zip(places, _of_group(group, outputs, run, join), strict=True):
            responses[place] = response
    return responses


def answers(config: ModelConfig, found: Collection[str]) -> tuple[str, ...]:
    """Configured outputs, sequence states included; all outputs if none is configured."""
    return tuple(name for name in made_by(config) if name in found) or tuple(found)


def unknown(request: Request, outputs: Sequence[str]) -> str:
    """The error for the first wanted output that does not exist; empty: all exist."""
    strange = next((name for name in request.wanted if name not in outputs), "")
    return f"unexpected inference output '{strange}'" if strange else ""


def _alone(request: Request, outputs: Sequence[str], run: Run) -> Response:
    problem = unknown(request, outputs)
    if problem:
        return Response(error=problem)
    try:
        return Response(run(request.inputs, request.wanted or outputs))
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


def _of_group(group: Sequence[Request], outputs: Sequence[str], run: Run, join: Join) -> Sequence[Response]:
    first = group[0].inputs
    if len(group) == 1 or not first or not all(array.ndim for array in first.values()):
        return [_alone(request, outputs, run) for request in group]
    inputs = {name: join([request.inputs[name] for request in group]) for name in first}
    sizes = [len(next(iter(request.inputs.values()))) for request in group]
    wanted = [request.wanted for request in group]
    return _together(Stack(inputs, sizes, wanted, lambda place, _: group[place]), outputs, run)


def _together(stack: Stack, outputs: Sequence[str], run: Run) -> Sequence[Response]:
    wanted = stack.wanted
    first = wanted[0]
    alike = wanted.count(first) == len(wanted)
    asked = first if alike else tuple(dict.fromkeys([name for each in wanted for name in each]))
    if set(asked).issubset(outputs):
        try:
            found = run(stack.inputs, outputs if () in wanted else asked)
        except FAILURES:
            pass
        else:
            return _apart(stack, found, alike=alike)
    return [_alone(request, outputs, run) for request in stack]


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
