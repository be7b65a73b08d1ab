"""An ensemble that runs in one process: the models of its steps, one after the other, for a whole batch.

What a step makes is passed to the next ones as it is. As long as every step answers the whole batch in one array per
output, nothing is split or copied; otherwise, as with Python models, each request has arrays of its own.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from forebay.core.serving.config import ModelConfig, Step
from forebay.core.serving.ensemble import in_order
from forebay.engines.tensor import create
from forebay.engines.tensor.measures import Family, Measuring
from forebay.engines.tensor.protocol import (
    Array,
    Backend,
    CallModel,
    Emit,
    Informed,
    Loaded,
    Request,
    Response,
    Rows,
    Stack,
)
from forebay.modelserver.process.messages import Configure

NO_RESPONSE: Final = "it gave no response"
RESCHEDULED: Final = "it rescheduled the request, which no step of an ensemble can"
PLANS_MAX: Final = 100

Tensors = dict[str, Array]
"""By their names in the ensemble."""


class Steps:
    """The models of an ensemble's steps. Implements `Backend`."""

    def __init__(self, models: Sequence[Configure]) -> None:
        self._models = models
        """In the order of the steps; a model of several steps is loaded once."""
        self._loaded: dict[tuple[str, str], Backend] = {}
        self._steps: list[_Step] = []
        """In an order in which they can run."""
        self._outputs: tuple[str, ...] = ()
        self._plans: dict[frozenset[str], list[_Step]] = {}

    def load(self, config: ModelConfig, folder: Path, instance: int, call: CallModel) -> Loaded:
        found: list[Loaded] = []
        for model in self._models:
            key = (model.config.name, model.folder)
            if key in self._loaded:
                continue
            backend = create(model.backend)
            if isinstance(backend, Informed) and model.document:
                backend.tell(model.document)
            found.append(backend.load(model.config, Path(model.folder), instance, call))
            self._loaded[key] = backend
        for index in in_order(config):
            model = self._models[index]
            self._steps.append(_Step(config.name, config.steps[index], self._loaded[model.config.name, model.folder]))
        self._outputs = tuple([spec.name for spec in config.outputs])
        return Loaded(
            threads=all([each.threads for each in found]),
            measures=any([each.measures for each in found]),
        )

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response | None]:
        if type(requests) is Stack:
            plan = self._plan(requests.wanted)
            return self.through(_Batch(requests, dict(requests.inputs), instance, emit), plan)
        plan = self._plan([request.wanted for request in requests])
        return self._apart(instance, requests, [dict(request.inputs) for request in requests], plan)

    def measured(self) -> tuple[Family, ...]:
        return tuple(
            [
                family
                for backend in self._loaded.values()
                if isinstance(backend, Measuring)
                for family in backend.measured()
            ]
        )

    def close(self) -> None:
        with ExitStack() as closing:  # also after one that fails
            for backend in self._loaded.values():
                closing.callback(backend.close)

    def _plan(self, wanted: Sequence[tuple[str, ...]]) -> "list[_Step]":
        """The steps that these requested outputs need, in order; empty: all outputs."""
        key = frozenset(self._outputs if () in wanted else [name for each in wanted for name in each])
        plan = self._plans.get(key)
        if plan is None:
            plan, needed = [], set(key)
            for step in reversed(self._steps):
                if not needed.isdisjoint(step.outputs.values()):
                    plan.insert(0, step)
                    needed.update(step.inputs.values())
            if len(self._plans) < PLANS_MAX:
                self._plans[key] = plan
        return plan

    def through(self, batch: "_Batch", plan: "Sequence[_Step]") -> Sequence[Response]:
        """Run these steps. The responses to the requests that were not answered early."""
        if not plan:
            return Rows(self._answers(batch.tensors), batch.stack.sizes)
        step, early = plan[0], _Early(self, batch, plan)
        made = step.run(batch.instance, batch.stack.of(step.fed(batch.tensors), step.wanted), early)
        return self.onward(batch.part(early.requests, len(batch.stack)) if early.requests else batch, plan, made)

    def onward(self, batch: "_Batch", plan: "Sequence[_Step]", made: Sequence[Response | None]) -> Sequence[Response]:
        """`through`, where the first of these steps has made that."""
        if type(made) is Rows:
            plan[0].keep(batch.tensors, made.outputs)
            return self.through(batch, plan[1:])
        values = [each.outputs for each in Rows(batch.tensors, batch.stack.sizes)]
        failed = plan[0].take(values, list(range(len(values))), made)
        return self._apart(batch.instance, list(batch.stack), values, plan[1:], failed)

    def _apart(
        self,
        instance: int,
        requests: Sequence[Request],
        values: list[Tensors],
        plan: "Sequence[_Step]",
        failed: dict[int, Response] | None = None,
    ) -> Sequence[Response]:
        """Run these steps with tensors of each request. `failed`: those that have ended, by index."""
        failed = failed or {}
        for step in plan:
            left = [index for index in range(len(values)) if index not in failed]
            if not left:
                break
            asked = [
                msgspec.structs.replace(requests[index], inputs=step.fed(values[index]), wanted=step.wanted)
                for index in left
            ]
            kept = _Kept()
            made = step.run(instance, asked, kept)
            failed |= step.take(values, left, [*kept.responses, *made])
        return [failed.get(index) or Response(self._answers(tensors)) for index, tensors in enumerate(values)]

    def _answers(self, tensors: Tensors) -> Tensors:
        return {name: tensors[name] for name in self._outputs if name in tensors}


class _Step:
    """A step and its model."""

    def __init__(self, ensemble: str, step: Step, backend: Backend) -> None:
        self.inputs = step.inputs
        self.outputs = step.outputs
        self.wanted = tuple(step.outputs)
        self._model = step.model
        self._ensemble = ensemble
        self._backend = backend

    def run(self, instance: int, requests: Sequence[Request], early: "_Early | _Kept") -> Sequence[Response | None]:
        """One response for each request that `early` has not taken. Raises RuntimeError, which names the step, if the
        batch fails.
        """
        try:
            made = self._backend.execute(instance, requests, early)
        except Exception as error:  # a model may raise anything; this names the step, and the batch fails as before
            raise RuntimeError(self._said(str(error) or type(error).__name__)) from error
        left = len(requests) - early.requests
        if len(made) != left:
            raise RuntimeError(self._said(f"it gave {len(made)} responses to {left} requests"))
        return made

    def fed(self, tensors: Tensors) -> Tensors:
        """Its inputs; what does not exist, as a client's optional input may not, is left out."""
        return {own: tensors[name] for own, name in self.inputs.items() if name in tensors}

    def keep(self, tensors: Tensors, outputs: Mapping[str, Array]) -> None:
        """Add what it has made."""
        tensors.update({name: outputs[own] for own, name in self.outputs.items() if own in outputs})

    def take(
        self, values: list[Tensors], places: Sequence[int], made: Sequence[Response | None]
    ) -> dict[int, Response]:
        """Add what it has made for the requests at these places; returns the errors of the others."""
        failed = {}
        for place, response in zip(places, made, strict=True):
            if response is None:
                failed[place] = Response(error=self._said(NO_RESPONSE))
            elif response.error:
                failed[place] = Response(error=self._said(response.error), kind=response.kind)
            elif response.reschedule:
                failed[place] = Response(error=self._said(RESCHEDULED))
            else:
                self.keep(values[place], response.outputs)
        return failed

    def _said(self, text: str) -> str:
        said = text if self._model in text else f"step of model '{self._model}': {text}"
        return f"in ensemble '{self._ensemble}', {said}"


class _Batch:
    """The requests of a batch, or of a part of it, and their tensors so far."""

    __slots__ = ("_emit", "_whole", "answered", "instance", "stack", "tensors")

    def __init__(
        self, stack: Stack, tensors: Tensors, instance: int, emit: Emit, whole: "_Batch | None" = None
    ) -> None:
        """`whole`: of which it is a part."""
        self.stack = stack
        self.tensors = tensors
        self.instance = instance
        self.answered = 0
        """The first requests, which have been answered."""
        self._emit = emit
        self._whole = whole

    def part(self, start: int, end: int) -> "_Batch":
        """The requests from index `start` to before `end`."""
        sizes = self.stack.sizes
        first = sum(sizes[:start])
        rows = slice(first, first + sum(sizes[start:end]))
        tensors = {name: array[rows] for name, array in self.tensors.items()}
        return _Batch(self.stack.part(start, end), tensors, self.instance, self._emit, self)

    def answer(self, responses: Sequence[Response]) -> None:
        """Answer the first requests that are not answered."""
        if self._whole is None:
            self._emit(self.answered, responses, True)
        else:
            self._whole.answer(responses)
        self.answered += len(responses)


class _Early:
    """Takes the first requests of a batch through the later steps, while the others are in one. Implements `Emit`."""

    def __init__(self, steps: Steps, batch: _Batch, plan: Sequence[_Step]) -> None:
        self._steps = steps
        self._batch = batch
        self._plan = plan
        """That step and the later ones."""
        self.requests = 0
        """Those taken."""

    def __call__(self, index: int, response: Response | Sequence[Response] | None, final: bool) -> None:
        made = _several(response)
        part = self._batch.part(self.requests, self.requests + len(made))
        self.requests += len(made)
        try:
            responses = self._steps.onward(part, self._plan, made)
        except RuntimeError as error:  # a later step has failed: that is not the business of the one that runs
            responses = [Response(error=str(error))] * (len(made) - part.answered)
        part.answer(responses)


class _Kept:
    """Keeps early responses. Implements `Emit`."""

    def __init__(self) -> None:
        self.responses: list[Response] = []

    @property
    def requests(self) -> int:
        """Number of requests that they answer."""
        return len(self.responses)

    def __call__(self, index: int, response: Response | Sequence[Response] | None, final: bool) -> None:
        for each in _several(response):  # copies: the model may use the memory again
            outputs = {name: array.copy() for name, array in each.outputs.items()}
            self.responses.append(msgspec.structs.replace(each, outputs=outputs))


def _several(response: Response | Sequence[Response] | None) -> Sequence[Response]:
    if response is None or isinstance(response, Response):
        raise RuntimeError("only decoupled models can stream responses")
    return response
