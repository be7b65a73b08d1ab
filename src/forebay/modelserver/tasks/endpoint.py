"""HTTP endpoints of tasks: a request body becomes inferences, and their responses become one response.

Errors are OpenAI's error objects. A job with more rows than the model's batch size takes several inferences. Only as
many are in flight as keep the model's instances busy, so that other requests need not wait for all of them.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import structlog

from forebay.core.errors import Code, Refusal
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import InferRequest, InferResponse, Ticket
from forebay.core.task_tensors import PARAMETER
from forebay.modelserver.http.answering import deadline_of
from forebay.modelserver.ports import Models, ModelView
from forebay.modelserver.tasks.contract import Answer, ContractViolation, Job, Results, Task
from forebay.modelserver.tasks.errors import Failure, contract_violated, note, refuse, translated
from forebay.modelserver.tasks.output_check import OutputCheck
from forebay.modelserver.tasks.response_stream import ResponseStream
from forebay.net.exchange import Exchange
from forebay.net.replica_protocol import DEADLINE, USAGE
from forebay.wire import http1
from forebay.wire.apis.request_fields import CODING, coded, compressed
from forebay.wire.forms.multipart import is_form
from forebay.wire.oip.fields import CROWDED, too_many_values

PREFIX: Final = b"/v1/"
MODELS_PATH: Final = "/v1/models"
_encode = msgspec.json.Encoder().encode


class TaskFront:
    """Handles exchanges whose path begins with `PREFIX`. `table` maps paths to tasks."""

    def __init__(self, models: Models, table: Mapping[str, Task], log: structlog.stdlib.BoundLogger) -> None:
        self._models = models
        self._table = table
        self._log = log

    def handle(self, exchange: Exchange) -> None:
        """Handle one exchange, now or later."""
        path = exchange.path
        try:
            task = self._table.get(path)
            one = unquote(path.removeprefix(MODELS_PATH + "/")) if path.startswith(MODELS_PATH + "/") else ""
            if task is None and path != MODELS_PATH and not one:
                raise Refusal(Code.NOT_FOUND, f"No such path: {path[:200]}.")
            method = b"POST" if task is not None else b"GET"
            if exchange.method != method:
                text = f"{path} takes {method.decode()} only."
                refuse(exchange, Refusal(Code.METHOD_NOT_ALLOWED, text), self._log, (b"allow", method))
            elif task is None:
                exchange.respond(200, [http1.JSON], _encode(self._one(one) if one else self._list()))
            else:
                self._start(exchange, task)
        except Refusal as refusal:
            refuse(exchange, coded(refusal, exchange.header(CODING)), self._log)
        except Exception as error:  # supervisor: a bug costs one response, which has the id under which it is logged
            refuse(exchange, ours(error), self._log)

    def _start(self, exchange: Exchange, task: Task) -> None:
        kind = exchange.header(b"content-type") or b""
        try:
            deadline = deadline_of(exchange)
        except Refused as refused:
            raise Refusal(Code.INVALID_REQUEST, refused.text, DEADLINE.decode()) from None
        if task.forms and is_form(kind):
            if (refusal := compressed(exchange.header(CODING))) is not None:
                raise refusal
        elif too_many_values(exchange.body):
            raise Refusal(Code.INVALID_REQUEST, f"The body is too much at once: {CROWDED}.")
        self._run(exchange, task, task.read(exchange.body, kind), deadline)

    def _run(self, exchange: Exchange, task: Task, job: Job, deadline: float) -> None:
        """Start a job on the version that serves now. Raises `Refusal`."""
        try:
            view = self._models.view(job.model, "")
        except Refused as refused:
            raise translated(refused, "model", job.model) from None
        outputs = outputs_of(task, view.config)
        again = partial(self._run, exchange, task, job, deadline)
        work = Work(exchange, job, view, self._models, self._log, deadline=deadline, again=again)
        exchange.on_disconnect = work.cancel
        work.start(task.name, outputs)

    def _list(self) -> dict[str, Any]:
        """OpenAI's list of models; contains those that have a task."""
        names = sorted({each.name for each in self._models.index(ready_only=True)})
        listed = [self._described(name) for name in names]
        return {"object": "list", "data": [each for each in listed if each is not None]}

    def _one(self, name: str) -> dict[str, Any]:
        """One entry of that list. Raises `Refusal`."""
        try:
            described = self._described(name)
        except Refused as refused:
            raise translated(refused, "model", name) from None
        if described is None:
            raise Refusal(Code.MODEL_NOT_FOUND, f"The model '{name[:128]}' has no task.", "model")
        return described

    def _described(self, name: str) -> dict[str, Any] | None:
        task = self._models.view(name, "").config.parameters.get(PARAMETER)
        if task not in {each.name for each in self._table.values()}:
            return None
        return {"id": name, "object": "model", "created": 0, "owned_by": "forebay", "task": task}


class Work:
    """A job in progress."""

    __slots__ = (
        "_again",
        "_check",
        "_deadline",
        "_exchange",
        "_job",
        "_log",
        "_lows",
        "_models",
        "_outputs",
        "_over",
        "_parts",
        "_response_stream",
        "_tickets",
        "_view",
        "_waiting",
    )

    def __init__(
        self,
        exchange: Exchange,
        job: Job,
        view: ModelView,
        models: Models,
        log: structlog.stdlib.BoundLogger,
        *,
        deadline: float,
        again: Callable[[], None],
    ) -> None:
        """`again` starts the job anew: its model has been replaced. It may raise `Refusal`."""
        self._again = again
        self._exchange = exchange
        self._job = job
        self._view = view
        self._models = models
        self._log = log
        self._deadline = deadline
        self._lows = range(0)
        """First row of each inference."""
        self._outputs: tuple[str, ...] = ()
        self._parts: list[list[InferResponse]] = []
        self._tickets: list[Ticket] = []
        self._waiting = 0
        """Inferences that have not ended."""
        self._over = False
        self._response_stream: ResponseStream | None = None
        self._check: OutputCheck

    def start(self, task: str, outputs: tuple[str, ...]) -> None:
        """Start the first inferences. Raises `Refusal` after cancelling those already started."""
        config = self._view.config
        rows_max = max(1, config.max_batch)
        self._lows = range(0, self._job.rows, rows_max)
        self._outputs = outputs
        self._parts = [[] for _ in self._lows]
        self._waiting = len(self._lows)
        sizes = [min(self._job.rows - low, rows_max) for low in self._lows]
        self._check = OutputCheck(task, config, sizes)
        try:
            for _ in self._lows[: config.instance_count + 1]:
                self._infer_next()
        except Refused as refused:
            self.cancel()
            raise self._translated(refused, len(self._tickets)) from None

    def _infer_next(self) -> None:
        """Start the next inference. Raises `Refused`."""
        job, lows = self._job, self._lows
        part = len(self._tickets)
        inputs = job.inputs(lows[part], min(job.rows, lows[part] + lows.step))
        if not self._view.config.max_batch:  # its tensors have no batch dimension
            inputs = tuple(each.shaped(each.shape[1:]) for each in inputs)
        request = InferRequest(
            job.model, "", "", inputs, self._outputs, parameters=dict(job.parameters), deadline=self._deadline
        )
        self._tickets.append(self._models.infer(request, partial(self._on_response, part)))

    def _go_on(self) -> None:
        if self._over or len(self._tickets) == len(self._lows):
            return
        try:
            if _serving(self._models.view(self._job.model, "")) == _serving(self._view):
                self._infer_next()
            else:
                self.cancel()  # results of two versions, such as vectors, must not be mixed in one response
                self._again()
        except Refused as refused:
            self._fail(self._translated(refused, len(self._tickets)))
        except Refusal as refusal:
            self._fail(refusal)

    def _translated(self, refused: Refused, part: int) -> Refusal:
        job, low = self._job, self._lows[part]
        rows = range(low, min(job.rows, low + self._lows.step)) if job.rows > 1 else None
        return translated(refused, job.param, job.model, rows)

    def cancel(self) -> None:
        """Cancel all inferences."""
        self._over = True
        for ticket in self._tickets:
            ticket.cancel()

    def _on_response(self, part: int, response: InferResponse | None, final: bool) -> None:
        if self._over:
            return
        try:
            if response is not None:
                if response.error is not None:
                    raise self._translated(response.error, part)
                self._check.check(part, response)
                self._take(part, response)
            if final:
                self._check.end(part)
                self._end()
        except Refusal as refusal:
            self._fail(refusal)
        except ContractViolation as violation:
            self._fail(contract_violated(self._job.model, violation))
        # supervisor: a bug in writing one response must not affect the model's other callbacks
        except Exception as error:
            self._fail(ours(error))

    def _take(self, part: int, response: InferResponse) -> None:
        stream = self._job.stream
        if stream is None:
            self._parts[part].append(self._job.keep(response))
            return
        self._flow().add(stream.piece(response))

    def _end(self) -> None:
        self._waiting -= 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)  # deferred: the caller is in the middle of a batch
            return
        exchange, job, stream = self._exchange, self._job, self._job.stream
        if stream is not None:
            self._flow().end(stream.last())
            return
        config = self._view.config
        responses = [each for part in self._parts for each in part]
        answer: Answer = job.answer(Results(job.model, config, responses, self._labels))
        usage = (USAGE, b"%d,0,0" % answer.tokens)
        exchange.respond(200, [(b"content-type", answer.content_type), usage], answer.body)

    def _flow(self) -> ResponseStream:
        if self._response_stream is None:
            assert self._job.stream is not None
            self._response_stream = ResponseStream(self._exchange, self._job.stream.content_type)
        return self._response_stream

    def _fail(self, refusal: Refusal) -> None:
        """Respond with an error, or report it in the stream; cancels all other inferences."""
        exchange, stream = self._exchange, self._job.stream
        self.cancel()
        if not exchange.started:
            refuse(exchange, refusal, self._log)
        else:
            note(exchange, self._log, refusal)
            if stream is not None and stream.failed is not None:
                exchange.write(stream.failed(refusal))
            exchange.abort()

    def _labels(self, output: str) -> Any:
        return self._models.labels(self._job.model, self._view.version, output)


def _serving(view: ModelView) -> tuple[Any, ...]:
    """What all inferences of a job must have in common."""
    return view.version, view.config.max_batch, view.config.outputs


def outputs_of(task: Task, config: ModelConfig) -> tuple[str, ...]:
    """The outputs to request. Raises `Refusal` if the model does not have the task or lacks a required output."""
    found = config.parameters.get(PARAMETER)
    if found != task.name:
        does = f"has the task '{found}'" if found else "has no task; its configuration names none as " + PARAMETER
        raise Refusal(Code.WRONG_TASK, f"Model '{config.name}' {does}, and this needs '{task.name}'.", "model")
    for name in task.outputs:
        if config.output(name) is None:
            text = f"Model '{config.name}' has no output '{name}', which the task '{task.name}' needs."
            raise Failure(text)
    return task.outputs + tuple(name for name in task.extras if config.output(name) is not None)


def ours(error: Exception) -> Refusal:
    """An internal error as shown to clients."""
    refusal = Refusal(Code.INTERNAL)
    refusal.__cause__ = error
    return refusal
