"""Models that violate the contract of their task: no incomplete response may look complete."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs
from tests.modelserver.tasks import rig as rigs
from tests.modelserver.tasks.rig import BYTES, EMBED, F32, I32, document, one_response, rig, served
from tests.net.rig import run, serving

from forebay.core.model import Limits
from forebay.core.serving.config import Datatype, ModelConfig
from forebay.core.serving.values import InferRequest, InferResponse, Tensor
from forebay.core.task_tensors import CONTRACTS
from forebay.modelserver.tasks.endpoint import TaskFront
from forebay.modelserver.tasks.table import TASKS
from forebay.modelserver.tasks.tensors import numbers, strings
from forebay.net.exchange import Exchange

TWO = {"/v1/embeddings": {"input": ["a", "b"]}, "/v1/rerank": {"query": "q", "documents": ["a", "b"]}}
TWO["/v1/classify"] = {"input": ["a", "b"]}
TWO["/v1/images/detections"] = {"image": ["aaaa", "aaaa"]}
NAN = float("nan")
RERANK = served("rerank", 4, "QUERY DOCUMENT", SCORE=F32)
CLASSIFY = served("classify", 4, "INPUT", LABEL=BYTES, SCORE=F32)
DETECT = served("detect-objects", 4, "IMAGE", LABEL=BYTES, SCORE=F32, BOX=F32)
BOXES = numbers("BOX", F32, np.zeros((2, 1, 4)))


def floats(name: str, *values: Any) -> Tensor:
    return numbers(name, F32, np.array(values, np.float32))


TOKENS = numbers("TOKENS", I32, np.array([[1], [1]]))
LABELS = strings("LABEL", ["x", "y"], (2, 1))
BAD: Mapping[str, tuple[str, ModelConfig, tuple[Tensor, ...], str]] = {
    "short": ("/v1/embeddings", EMBED, (floats("EMBEDDING", [1, 2]), TOKENS), "'TOKENS' of shape [2, 1] beside"),
    "short-both": (
        "/v1/embeddings",
        EMBED,
        (floats("EMBEDDING", [1, 2]), floats("X", 1)),
        "1 rows of 'EMBEDDING' for 2",
    ),
    "alone": (
        "/v1/embeddings",
        replace(EMBED, max_batch=0),
        (floats("EMBEDDING", [1], [2]),),
        "2 rows of 'EMBEDDING'",
    ),
    "nan": (
        "/v1/embeddings",
        EMBED,
        (floats("EMBEDDING", [1, NAN], [1, 2]), TOKENS),
        "'EMBEDDING' with numbers that",
    ),
    "none": ("/v1/embeddings", EMBED, (TOKENS,), "it gave no 'EMBEDDING'"),
    "whole": (
        "/v1/embeddings",
        EMBED,
        (numbers("EMBEDDING", I32, np.ones((2, 2))), TOKENS),
        "'EMBEDDING' as INT32",
    ),
    "inf": (
        "/v1/rerank",
        RERANK,
        (floats("SCORE", [1], [float("inf")]),),
        "'SCORE' with numbers that are not finite",
    ),
    "pairs": ("/v1/rerank", RERANK, (floats("SCORE", [1, 2], [3, 4]),), "4 rows of 'SCORE' for 2"),
    "latin": (
        "/v1/classify",
        CLASSIFY,
        (strings("LABEL", [b"\xe9", b"y"], (2, 1)),),
        "'LABEL' with bytes that are not",
    ),
    "uneven": ("/v1/classify", CLASSIFY, (LABELS, floats("SCORE", [1, 2], [3, 4])), "'SCORE' of shape [2, 2] beside"),
    "boxless": ("/v1/images/detections", DETECT, (LABELS, floats("SCORE", [1], [1])), "it gave no 'BOX'"),
    "signs": (
        "/v1/images/detections",
        DETECT,
        (strings("LABEL", [b"\xff", b"y"], (2, 1)), floats("SCORE", [1], [1]), BOXES),
        "'LABEL' with bytes that are not UTF-8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_contract_violation_names_the_model_and_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config, outputs, said = BAD[name]

    def give(_: InferRequest) -> list[InferResponse | None]:
        return one_response(*outputs)

    monkeypatch.setattr(rigs, "MODELS", {name: (config, give)})

    async def main() -> None:
        async with rig() as it:
            answer = await it.ask(path, {"model": name, **TWO[path]}, x_request_id="mine")
            error = document(answer)["error"]
            assert (answer.status, error["code"], answer.headers[b"x-request-id"]) == (500, "internal_error", b"mine")
            assert error["message"].startswith(f"The model '{name}' violates the contract of its task: it gave ")
            assert said in error["message"]

    with capture_logs() as lines:
        run(main())
    assert [line["request_id"] for line in lines if "request_id" in line] == ["mine"]


def test_model_exception_is_logged_and_not_returned() -> None:
    ids: list[str] = []

    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", {"model": "picky", "input": "INTERNAL"})
            assert answer.status == 500
            assert b"not this" not in answer.body
            ids.append(answer.headers[b"x-request-id"].decode())

    with capture_logs() as lines:
        run(main())
    [line] = [line for line in lines if line.get("request_id") == ids[0]]
    assert line["reason"] == "[request id: <id_unknown>] not this"


def test_internal_error_has_the_request_id_in_response_and_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs.TaskModels, "view", lambda *_: 1 // 0)

    ids: list[str] = []

    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", {"model": "lengths", "input": "a"})
            assert (answer.status, document(answer)["error"]["code"]) == (500, "internal_error")
            ids.append(answer.headers[b"x-request-id"].decode())

    with capture_logs() as lines:
        run(main())
    [line] = [line for line in lines if line.get("request_id") == ids[0]]
    assert isinstance(line["exc_info"], ZeroDivisionError)


def test_error_of_a_replica_has_one_request_id_which_is_that_of_the_log() -> None:
    async def main() -> None:
        front = TaskFront(rigs.TaskModels(), TASKS, structlog.get_logger())

        def handle(exchange: Exchange) -> None:
            exchange.extra += b"x-request-id: named\r\n"
            front.handle(exchange)

        async with serving(handle, Limits()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = b'{"model":"picky","input":"INTERNAL"}'
            head = b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 500")
        assert re.findall(rb"x-request-id: (\S+)", answer) == [b"named"]

    with capture_logs() as lines:
        run(main())
    assert [line["request_id"] for line in lines if "request_id" in line] == ["named"]


def test_task_outputs_match_their_contracts() -> None:
    for task in TASKS.values():
        outputs = CONTRACTS[task.name].outputs
        assert set(task.outputs) == {each.name for each in outputs if not each.optional}
        assert set(task.extras) == {each.name for each in outputs if each.optional}
    assert {task.name for task in TASKS.values()} == set(CONTRACTS)
    assert Datatype.BF16 not in {
        each for c in CONTRACTS.values() for output in c.outputs for each in output.datatypes
    }
