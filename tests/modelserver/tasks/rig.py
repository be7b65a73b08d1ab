"""The task endpoints on a free port over in-memory models named after what they do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import structlog
from tests.modelserver.http.rig import FakeModels, FakeTicket
from tests.modelserver.openapi_check import fits
from tests.net.rig import Answer, Peer, peer, serving

from forebay.core.model import Limits
from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse, Tensor, Ticket
from forebay.core.task_tensors import PARAMETER
from forebay.modelserver.http.options import BODY_BYTES_MAX
from forebay.modelserver.ports import IndexEntry, ModelView
from forebay.modelserver.tasks.contract import Task
from forebay.modelserver.tasks.endpoint import TaskFront
from forebay.modelserver.tasks.table import TASKS
from forebay.modelserver.tasks.tensors import as_texts, numbers, strings

F32, I32, BYTES = Datatype.FP32, Datatype.INT32, Datatype.BYTES
Run = Callable[[InferRequest], list[InferResponse | None]]
"""The responses to a request; the last one is final, and may be None."""


def served(task: str, max_batch: int, inputs: str, **outputs: Datatype) -> ModelConfig:
    """The configuration of a model of texts that has a task."""
    return ModelConfig(
        "a model",
        "python",
        max_batch=max_batch,
        inputs=tuple(TensorSpec(name, BYTES, (1,)) for name in inputs.split()),
        outputs=tuple(TensorSpec(name, datatype, (-1,)) for name, datatype in outputs.items()),
        parameters={PARAMETER: task} if task else {},
    )


def texts(request: InferRequest, place: int = 0) -> list[str]:
    """The elements of an input."""
    return as_texts(request.inputs[place])


def one_response(*outputs: Tensor) -> list[InferResponse | None]:
    """One response, whose buffers are valid only during its delivery."""
    held = tuple(Tensor(each.name, each.datatype, each.shape, memoryview(bytearray(each.data))) for each in outputs)
    return [InferResponse("m", "1", "", held)]


def lengths(request: InferRequest) -> list[InferResponse | None]:
    """The vector of a text is its length and 0.5; its length is also how many tokens it has."""
    sizes = [len(each) for each in texts(request)]
    vectors = np.array([[size, 0.5] for size in sizes], np.float32)
    return one_response(numbers("EMBEDDING", F32, vectors), numbers("TOKENS", I32, np.array(sizes)[:, None]))


def overlap(request: InferRequest) -> list[InferResponse | None]:
    """A document is as good as it has letters of the query."""
    pairs = zip(texts(request), texts(request, 1), strict=True)
    scores = [[len(set(query) & set(document))] for query, document in pairs]
    return one_response(numbers("SCORE", F32, np.array(scores, np.float32)))


def cuts(request: InferRequest) -> list[InferResponse | None]:
    """Reads only three letters of a document."""
    long = bytes(len(each) > 3 for each in texts(request, 1))
    return one_response(*overlap(request)[0].outputs, Tensor("TRUNCATED", Datatype.BOOL, (len(long), 1), long))


def letters(request: InferRequest) -> list[InferResponse | None]:
    """The labels of a text are its letters, in order; each scores less than the one before it."""
    rows = texts(request)
    width = max(map(len, rows))
    labels = [row[at : at + 1] for row in rows for at in range(width)]
    scores = np.tile(1 / np.arange(1, width + 1), (len(rows), 1))
    return one_response(strings("LABEL", labels, (len(rows), width)), numbers("SCORE", F32, scores))


def capitals(request: InferRequest) -> list[InferResponse | None]:
    """The entities of a text are its words that begin with a capital; `Beyond` makes them too long."""
    rows = texts(request)
    found = [[word for word in row.split() if word[0].isupper()] for row in rows]
    width = max(map(len, found))
    filled = [row + [""] * (width - len(row)) for row in found]
    shape = len(rows), width
    at = [[text.find(word) for word in row] for text, row in zip(rows, filled, strict=True)]
    starts = np.array(at, np.int32).reshape(shape)
    ends = starts + np.array([[len(word) for word in row] for row in filled], np.int32).reshape(shape)
    ends += np.array([["Beyond" in row] for row in filled])
    labels = ["NAME" if word else "" for row in filled for word in row]
    return one_response(strings("LABEL", labels, shape), numbers("START", I32, starts), numbers("END", I32, ends))


def picky(request: InferRequest) -> list[InferResponse | None]:
    """The text is the kind of error that it gets."""
    refused = Refused(Kind[texts(request)[0]], "[request id: <id_unknown>] not this", 3)
    return [InferResponse("m", "1", "", error=refused)]


def choosy(request: InferRequest) -> list[InferResponse | None]:
    """One text is enough to refuse all, and the model says which it was."""
    rows = texts(request)
    step = "[request id: <id_unknown>] in ensemble 'a', step of model 'b': in ensemble 'b', step of model 'c': "
    text = f"{step}input[{rows.index('bad')}]: not this" if "bad" in rows else ""
    return [InferResponse("m", "1", "", error=Refused(Kind.INVALID_ARGUMENT, text))] if text else lengths(request)


def buggy(request: InferRequest) -> list[InferResponse | None]:
    """What no model should give."""
    return one_response(Tensor("EMBEDDING", F32, (3, 3), b"1234"))


def words(request: InferRequest) -> list[InferResponse | None]:
    """Each word of the text is a response; the end comes by itself."""
    said: list[InferResponse | None] = []
    for word in texts(request)[0].split():
        error = Refused(Kind.INTERNAL, "lost the thread") if word == "fail" else None
        outputs = () if error else (strings("WORD", [word], (1,)),)
        said.append(InferResponse("m", "1", "", outputs, error=error))
    return [*said, None]


EMBED = served("embed", 2, "TEXT", EMBEDDING=F32, TOKENS=I32)
CLASSIFY = served("classify", 4, "INPUT", LABEL=BYTES, SCORE=F32)
SPEAK = replace(served("recite", 0, "TEXT", WORD=BYTES), decoupled=True)
MODELS: Mapping[str, tuple[ModelConfig, Run]] = {
    "lengths": (EMBED, lengths),
    "uncounted": (
        served("embed", 8, "TEXT", EMBEDDING=F32),
        lambda request: one_response(lengths(request)[0].outputs[0]),
    ),
    "overlap": (served("rerank", 4, "QUERY DOCUMENT", SCORE=F32), overlap),
    "cuts": (served("rerank", 2, "QUERY DOCUMENT", SCORE=F32, TRUNCATED=Datatype.BOOL), cuts),
    "letters": (CLASSIFY, letters),
    "alone": (served("classify", 0, "INPUT", LABEL=BYTES, SCORE=F32), letters),
    "capitals": (served("classify", 8, "INPUT", LABEL=BYTES, START=I32, END=I32), capitals),
    "picky": (EMBED, picky),
    "choosy": (EMBED, choosy),
    "buggy": (EMBED, buggy),
    "silent": (EMBED, lambda _: []),
    "full": (EMBED, lambda _: []),
    "fills": (EMBED, lengths),
    "vague": (served("embed", 2, "TEXT", VECTOR=F32), lengths),
    "plain": (served("", 2, "TEXT", EMBEDDING=F32), lengths),
    "words": (SPEAK, words),
}


class TaskModels(FakeModels):
    """The models of `MODELS`."""

    replaced_after = 0
    """After how many requests a version 2 is there, that takes larger batches; 0: never."""

    def view(self, name: str, version: str) -> ModelView:
        if name not in MODELS:
            raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        config = replace(MODELS[name][0], name=name)
        if self.replaced_after and len(self.requests) >= self.replaced_after:
            return ModelView(replace(config, max_batch=4), {}, "2", ("2",))
        return ModelView(config, {}, "1", ("1",))

    def index(self, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(name, "1", "READY") for name in MODELS]

    def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
        if len(self.requests) == {"full": 1, "fills": 2}.get(request.model):
            raise Refused(Kind.UNAVAILABLE, "Exceeds maximum queue size")
        self.requests.append(request)
        responses = MODELS[request.model][1](request)
        for n, response in enumerate(responses, 1):
            asyncio.get_running_loop().call_soon(self._tell, on_response, response, n == len(responses))
        self.tickets.append(FakeTicket())
        return self.tickets[-1]

    @staticmethod
    def _tell(on_response: OnResponse, response: InferResponse | None, final: bool) -> None:
        on_response(response, final)
        for each in response.outputs if response else ():
            if isinstance(each.data, memoryview):
                each.data[:] = b"\xee" * len(each.data)  # somebody else's now


class Rig:
    """The endpoints, what is behind them, and one connection to them."""

    def __init__(self, models: TaskModels, line: Peer) -> None:
        self.models = models
        self.line = line

    async def ask(self, path: str, document: Any, method: str = "POST", **headers: str) -> Answer:
        """One request and its answer; a document that is not bytes goes as JSON."""
        body = document if isinstance(document, bytes) else msgspec.json.encode(document)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {path} HTTP/1.1\r\nhost: a\r\n{lines}content-length: {len(body)}\r\n\r\n"
        self.line.send(head.encode() + body)
        answer = await self.line.answer()
        kind = answer.headers.get(b"content-type", b"").decode()
        fits(method, path, answer.status, kind, answer.body)
        return answer


@contextlib.asynccontextmanager
async def rig(**more: Task) -> AsyncIterator[Rig]:
    """The endpoints of the product; `more` are others, by the last part of their path."""
    models = TaskModels()
    table = {**TASKS, **{f"/v1/{name}": task for name, task in more.items()}}
    front = TaskFront(models, table, structlog.get_logger())
    async with serving(front.handle, Limits(body_bytes_max=BODY_BYTES_MAX)) as server, peer(server.port) as line:
        yield Rig(models, line)


def document(answer: Answer) -> Any:
    """The JSON of an answer."""
    return msgspec.json.decode(answer.body)
