"""Ragged batching: requests with different shapes are concatenated in one dimension, as in Triton.

Additional inputs generated here describe where requests end and which shapes they have. Outputs have a row for each
row of the batch, or are concatenated according to the shapes of an input.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

from forebay.core.serving.config import MICRO_BATCH, VARIABLE, BatchKind, ModelConfig
from forebay.engines.tensor import batch
from forebay.engines.tensor.arrays import DTYPES, joined
from forebay.engines.tensor.batch import FAILURES, Join, MicroBatches, Run
from forebay.engines.tensor.measures import MICRO_BATCH_ROWS, Family, Measure, Series
from forebay.engines.tensor.protocol import Array, Emit, Request, Response, failed

Shape = tuple[int, ...]


class Ragged:
    """Builds a model's batches according to its configuration."""

    def __init__(self, config: ModelConfig, join: Join = joined, *, version: str = "1", cpu: bool = True) -> None:
        """`cpu`: whether it runs on one, where large batches are not always the fastest."""
        self._join = join
        self._labels = (("model", config.name), ("version", version))
        self._made = config.batch_inputs
        self._flat = frozenset(spec.name for spec in config.inputs if spec.allow_ragged and config.max_batch)
        self._scattered = config.scattered
        self._dims = {spec.name: spec.dims if spec.reshape is None else spec.reshape for spec in config.outputs}
        self._plain = not (self._made or self._flat or self._scattered)
        rows = config.parameters.get(MICRO_BATCH)
        cuts = cpu and self._plain and config.batching is not None and config.max_batch > 1
        self._micro = MicroBatches(None if rows is None else int(rows)) if cuts else None
        self.measures = cuts and rows is None
        """Whether `measured` has something to tell."""

    def execute(
        self, requests: Sequence[Request], outputs: Sequence[str], run: Run, emit: Emit | None = None
    ) -> Sequence[Response]:
        """One response for each request, in order, as in `batch.execute`."""
        if self._plain:
            return batch.execute(requests, outputs, run, self._join, micro=self._micro, emit=emit)
        whole = list(requests)
        responses = [Response()] * len(whole)
        for places in self._alike(whole):
            group = [whole[place] for place in places]
            for place, response in zip(places, self._of_group(group, outputs, run), strict=True):
                responses[place] = batch.kept(response)
        return responses

    def measured(self) -> tuple[Family, ...]:
        """What was found about the model's batches, as a gauge."""
        if self._micro is None:
            return ()
        now_ns = time.monotonic_ns()
        series = [
            Series((*self._labels, ("row_bytes_below", str(below))), rows, now_ns)
            for below, rows in sorted(self._micro.chosen().items())
        ]
        return (Family(MICRO_BATCH_ROWS, Measure.GAUGE, "", tuple(series)),)

    def _alike(self, requests: Sequence[Request]) -> list[list[int]]:
        """Indexes of requests that can be merged: their non-ragged inputs have the same shapes."""
        found: dict[object, list[int]] = {}
        for place, request in enumerate(requests):
            shapes = [
                (name, array.dtype, array.ndim, () if name in self._flat else array.shape[1:])
                for name, array in request.inputs.items()
            ]
            found.setdefault(tuple(sorted(shapes, key=lambda each: each[0])), []).append(place)
        return list(found.values())

    def _of_group(self, group: Sequence[Request], outputs: Sequence[str], run: Run) -> Sequence[Response]:
        """Run a group; if it fails, run its requests one by one, so that one request cannot fail the others."""
        problems = [Response(error=batch.unknown(request, outputs)) for request in group]
        wanted = tuple(dict.fromkeys(name for request in group for name in request.wanted or outputs))
        try:
            if not any(problem.error for problem in problems):
                return self._apart(group, run(self._feed(group), wanted), outputs)
        except FAILURES as error:
            problems = [failed(error)]
        if len(group) == 1:
            return problems
        alone = (response for request in group for response in self._of_group([request], outputs, run))
        return [batch.kept(response) for response in alone]

    def _feed(self, group: Sequence[Request]) -> dict[str, Array]:
        feed = {}
        for name in group[0].inputs:
            arrays = [request.inputs[name] for request in group]
            feed[name] = self._join([array.reshape(-1) for array in arrays] if name in self._flat else arrays)
        for made in self._made:
            array = _MAKERS[made.kind](_shapes(group, made.source))
            feed |= dict.fromkeys(made.targets, np.ascontiguousarray(array, DTYPES[made.datatype]))
        return feed

    def _apart(self, group: Sequence[Request], found: dict[str, Array], outputs: Sequence[str]) -> Sequence[Response]:
        """Split the outputs by request. Raises `ValueError` if the sizes do not match."""
        parts = {
            name: self._scatter(name, array, group) if name in self._scattered else _rows(name, array, group)
            for name, array in found.items()
        }
        return [
            Response({name: parts[name][place] for name in request.wanted or outputs})
            for place, request in enumerate(group)
        ]

    def _scatter(self, name: str, array: Array, group: Sequence[Request]) -> list[Array]:
        wanted = (VARIABLE, *self._dims[name])
        shapes = [
            tuple(given[place] if size == VARIABLE else size for place, size in enumerate(wanted))
            for given in _shapes(group, self._scattered[name])
        ]
        sizes = [prod(shape) for shape in shapes]
        if sum(sizes) != array.size:
            raise ValueError(f"output '{name}' has {array.size} elements for a batch whose requests have {sizes}")
        flat = array.reshape(-1)
        return [part.reshape(shape) for part, shape in zip(_split(flat, sizes), shapes, strict=True)]


def _shapes(group: Sequence[Request], source: str) -> list[Shape]:
    if any(source not in request.inputs for request in group):
        raise ValueError(f"input '{source}', which determines the batch, is missing")
    return [request.inputs[source].shape for request in group]


def _rows(name: str, array: Array, group: Sequence[Request]) -> list[Array]:
    sizes = [next((len(each) for each in request.inputs.values()), 1) for request in group]
    have = len(array) if array.ndim else 0
    if have != sum(sizes):
        raise ValueError(
            f"output '{name}' has {have} rows for a batch of {sum(sizes)}; a batching model must keep their number"
        )
    return list(_split(array, sizes))


def _split(array: Array, sizes: Sequence[int]) -> Iterator[Array]:
    start = 0
    for size in sizes:
        yield array[start : start + size]
        start += size


def _counts(shapes: Sequence[Shape]) -> list[int]:
    return [prod(shape) for shape in shapes]


def _item_shapes(shapes: Sequence[Shape]) -> Array:
    items = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(items, np.int64).reshape(len(items), len(shapes[0]) - 1)


_MAKERS: dict[BatchKind, Callable[[Sequence[Shape]], object]] = {
    BatchKind.COUNT: _counts,
    BatchKind.ENDS: lambda shapes: np.cumsum(_counts(shapes)),
    BatchKind.BOUNDS: lambda shapes: np.cumsum([0, *_counts(shapes)]),
    BatchKind.LARGEST: lambda shapes: np.zeros(max(_counts(shapes))),
    BatchKind.SHAPES: _item_shapes,
    BatchKind.SHAPES_FLAT: lambda shapes: _item_shapes(shapes).reshape(-1),
}
"""Functions of the shapes that a batch input's source has in the requests."""
