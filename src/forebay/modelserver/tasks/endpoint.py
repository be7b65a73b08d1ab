"""The endpoints of tasks on HTTP: a body becomes inferences, their responses become an answer.

Errors are OpenAI's error objects. A job of more rows than its model takes at once is several inferences. Only so
many of them are under way as keep the model's instances busy: the requests of others need not wait for all of them.
"""

import asyncio
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, Ticket
from forebay.modelserver.ports import Models, ModelView
from forebay.modelserver.tasks.contract import PARAMETER, Answer, Job, Results, Task
from forebay.modelserver.tasks.outflow import Outflow
from forebay.net.exchange import Exchange
from forebay.wire import http1
from forebay.wire.errors import error_body
from forebay.wire.forms.multipart import is_form
from forebay.wire.oip.fields import CROWDED, too_many_values

PREFIX: Final = b"/v1/"
MODELS_PATH: Final = "/v1/models"
RETRYABLE: Final = (b"x-forebay-retryable", b"1")
"""Tells a gateway that another replica may be asked."""
_CODES: Final = {
    Kind.NOT_FOUND: Code.MODEL_NOT_FOUND,
    Kind.UNAVAILABLE: Code.OVERLOADED,
    Kind.INTERNAL: Code.INTERNAL,
    Kind.UNKNOWN: Code.INTERNAL,
}
"""Every other kind is the client's fault."""

_NAMED: Final = re.compile(r"([a-z_]+(?:\[\])?): ")

_encode = msgspec.json.Encoder().encode


class Crowded(Refusal):
    """There is no room for a request now; coming back makes sense after `retry_after_s`."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(Code.OVERLOADED, refused.text)
        self.retry_after_s = refused.retry_after_s


class TaskFront:
    """Answers exchanges whose path begins with `PREFIX`. `table` is task by path."""

    def __init__(self, models: Models, table: Mapping[str, Task], log: structlog.stdlib.BoundLogger) -> None:
        self._models = models
        self._table = table
        self._log = log

    def handle(self, exchange: Exchange) -> None:
        """Answer one exchange, now or later. Our own mistakes are the connection's to answer."""
        path = exchange.path
        try:
            task = self._table.get(path)
            if task is None and path != MODELS_PATH:
                raise Refusal(Code.NOT_FOUND, f"No such path: {path[:200]}.")
            method = b"POST" if task is not None else b"GET"
            if exchange.method != method:
                text = f"{path} takes {method.decode()} only."
                refuse(exchange, Refusal(Code.METHOD_NOT_ALLOWED, text), (b"allow", method))
            elif task is None:
                exchange.respond(200, [http1.JSON], _encode(self._list()))
            else:
                self._start(exchange, task)
        except Refusal as refusal:
            refuse(exchange, refusal)

    def _start(self, exchange: Exchange, task: Task) -> None:
        kind = exchange.header(b"content-type") or b""
        if not is_form(kind) and too_many_values(exchange.body):
            raise Refusal(Code.INVALID_REQUEST, f"The body is too much at once: {CROWDED}.")
        job = task.read(exchange.body, kind)
        try:
            view = self._models.view(job.model, "")
        except Refused as refused:
            raise translated(refused, "model") from None
        outputs = outputs_of(task, view.config)
        work = Work(exchange, job, view, self._models, self._log)
        exchange.on_disconnect = work.cancel
        work.start(outputs)

    def _list(self) -> dict[str, Any]:
        """OpenAI's list of models: those that have a task."""
        tasks = {task.name for task in self._table.values()}
        listed = []
        for name in sorted({each.name for each in self._models.index(ready_only=True)}):
            task = self._models.view(name, "").config.parameters.get(PARAMETER)
            if task in tasks:
                listed.append({"id": name, "object": "model", "created": 0, "owned_by": "forebay", "task": task})
        return {"object": "list", "data": listed}


class Work:
    """A job under way."""

    __slots__ = (
        "_exchange",
        "_job",
        "_log",
        "_lows",
        "_models",
        "_outflow",
        "_outputs",
        "_over",
        "_parts",
        "_tickets",
        "_view",
        "_waiting",
    )

    def __init__(
        self, exchange: Exchange, job: Job, view: ModelView, models: Models, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._exchange = exchange
        self._job = job
        self._view = view
        self._models = models
        self._log = log
        self._lows = range(0)
        """The first row of each inference."""
        self._outputs: tuple[str, ...] = ()
        self._parts: list[list[InferResponse]] = []
        self._tickets: list[Ticket] = []
        self._waiting = 0
        """Inferences that have not ended."""
        self._over = False
        self._outflow: Outflow | None = None

    def start(self, outputs: tuple[str, ...]) -> None:
        """Hand the first inferences to the models. Raises `Refusal`, and then none is left under way."""
        config = self._view.config
        rows_max = max(1, config.max_batch)
        self._lows = range(0, self._job.rows, rows_max)
        self._outputs = outputs
        self._parts = [[] for _ in self._lows]
        self._waiting = len(self._lows)
        try:
            for _ in self._lows[: config.instance_count + 1]:
                self._infer_next()
        except Refused as refused:
            self.cancel()
            raise translated(refused, self._job.param) from None

    def _infer_next(self) -> None:
        """Hand the next inference to the models. Raises `Refused`."""
        job, lows = self._job, self._lows
        part = len(self._tickets)
        inputs = job.inputs(lows[part], min(job.rows, lows[part] + lows.step))
        if not self._view.config.max_batch:  # its tensors have no batch dimension
            inputs = tuple(each.shaped(each.shape[1:]) for each in inputs)
        request = InferRequest(job.model, "", "", inputs, self._outputs, parameters=dict(job.parameters))
        self._tickets.append(self._models.infer(request, partial(self._on_response, part)))

    def _go_on(self) -> None:
        if self._over or len(self._tickets) == len(self._lows):
            return
        try:
            self._infer_next()
        except Refused as refused:
            self._fail(translated(refused, self._job.param))

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._over = True
        for ticket in self._tickets:
            ticket.cancel()

    def _on_response(self, part: int, response: InferResponse | None, final: bool) -> None:
        if self._over:
            return
        try:
            if response is not None:
                if response.error is not None:
                    raise translated(response.error, self._job.param)
                self._take(part, response)
            if final:
                self._end()
        except Refusal as refusal:
            self._fail(refusal)
        except Exception as error:  # supervisor: a mistake with one answer must not stop those who call back
            self._log.error("request handling failed", path=self._exchange.path, exc_info=error)
            self._fail(Refusal(Code.INTERNAL))

    def _take(self, part: int, response: InferResponse) -> None:
        stream = self._job.stream
        if stream is None:
            self._parts[part].append(self._job.keep(response))
            return
        self._flow().add(stream.piece(response))

    def _end(self) -> None:
        self._waiting -= 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)  # who calls back has its own work to finish first
            return
        exchange, job, stream = self._exchange, self._job, self._job.stream
        if stream is not None:
            self._flow().end(stream.last())
            return
        config = self._view.config
        responses = [each for part in self._parts for each in part]
        answer: Answer = job.answer(Results(job.model, config, responses, self._labels))
        exchange.respond(200, [(b"content-type", answer.content_type)], answer.body)

    def _flow(self) -> Outflow:
        if self._outflow is None:
            assert self._job.stream is not None
            self._outflow = Outflow(self._exchange, self._job.stream.content_type)
        return self._outflow

    def _fail(self, refusal: Refusal) -> None:
        """Answer with an error, or say it in the stream; what else is under way is not wanted any more."""
        exchange, stream = self._exchange, self._job.stream
        self.cancel()
        if not exchange.started:
            refuse(exchange, refusal)
        else:
            if stream is not None and stream.failed is not None:
                exchange.write(stream.failed(refusal))
            exchange.abort()

    def _labels(self, output: str) -> Any:
        return self._models.labels(self._job.model, self._view.version, output)


def outputs_of(task: Task, config: ModelConfig) -> tuple[str, ...]:
    """The outputs to ask a model for. Raises `Refusal` if it does not do the task, or lacks what the task needs."""
    found = config.parameters.get(PARAMETER)
    if found != task.name:
        does = f"has the task '{found}'" if found else "has no task; its configuration names none as " + PARAMETER
        raise Refusal(Code.WRONG_TASK, f"Model '{config.name}' {does}, and this needs '{task.name}'.", "model")
    for name in task.outputs:
        if config.output(name) is None:
            text = f"Model '{config.name}' has no output '{name}', which the task '{task.name}' needs."
            raise Refusal(Code.INTERNAL, text)
    return task.outputs + tuple(name for name in task.extras if config.output(name) is not None)


def translated(refused: Refused, param: str) -> Refusal:
    """An error of the protocol as one of this API; `param` is the field that the client has to change.

    A model that takes options says itself which of them is to blame: `language: …`.
    """
    code = _CODES.get(refused.kind, Code.INVALID_REQUEST)
    if refused.retry_after_s and code is Code.OVERLOADED:
        return Crowded(refused)
    if code is Code.MODEL_NOT_FOUND:
        return Refusal(code, refused.text, param)
    if code is not Code.INVALID_REQUEST:
        return Refusal(code, refused.text)
    named = _NAMED.match(refused.text)
    return Refusal(code, refused.text, named[1] if named else param)


def refuse(exchange: Exchange, refusal: Refusal, *headers: http1.Header) -> None:
    """Answer with an error."""
    row = TABLE[refusal.code]
    retryable = [RETRYABLE] if row.retry else []
    if isinstance(refusal, Crowded):
        retryable.append((b"retry-after", b"%d" % refusal.retry_after_s))
    exchange.respond(row.status, [http1.JSON, *retryable, *headers], error_body(refusal, exchange.path))
