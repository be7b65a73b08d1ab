"""What all tasks have in common: routing, errors, streams, and client disconnects."""

import asyncio
import gzip
import struct
from typing import Any

import pytest
from tests.modelserver.tasks.rig import document, rig
from tests.net.rig import run, until

from forebay.core.errors import Refusal
from forebay.core.serving.values import InferResponse
from forebay.modelserver.tasks.contract import Answer, Job, Stream, Task
from forebay.modelserver.tasks.tensors import as_bytes, strings
from forebay.wire.errors import error_event
from forebay.wire.oip import fields

THREE = {"model": "lengths", "input": ["a", "b", "c"]}


def speak(stream: bool, **more: Any) -> Task:
    """A task of models that answer with words; the body is the text."""

    def piece(response: InferResponse) -> bytes:
        return b"".join(as_bytes(response.outputs[0]))

    def read(body: bytes, content_type: bytes) -> Job:
        return Job(
            "words",
            lambda low, high: (strings("TEXT", [body], (high - low, 1)),),
            lambda results: Answer(b"+".join(map(piece, results.responses)), content_type),
            stream=Stream(b"text/plain", piece, **more) if stream else None,
        )

    return Task("recite", read, ("WORD",))


def test_models_with_a_task_are_listed() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = document(await it.ask("/v1/models", b"", "GET"))
            tasks = {each["id"]: each["task"] for each in answer["data"]}
            assert (tasks["lengths"], tasks["overlap"], tasks["capitals"]) == ("embed", "rerank", "classify")
            assert not {"plain", "words"} & set(tasks)
            one = await it.ask("/v1/models/lengths", b"", "GET")
            assert document(one) == next(each for each in answer["data"] if each["id"] == "lengths")
            for name in ("nobody", "plain"):
                missing = await it.ask(f"/v1/models/{name}", b"", "GET")
                assert (missing.status, document(missing)["error"]["code"]) == (404, "model_not_found")

    run(main())


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/v1/nothing", "POST", 404, "not_found"),
        ("/v1/embeddings/", "POST", 404, "not_found"),
        ("/v1/embeddings?x=1", "GET", 405, "method_not_allowed"),
        ("/v1/models", "POST", 405, "method_not_allowed"),
    ],
)
def test_unknown_path_or_method_is_rejected(path: str, method: str, status: int, code: str) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask(path, THREE, method)
            assert (answer.status, document(answer)["error"]["code"]) == (status, code)
            allowed = {"GET": b"POST", "POST": b"GET"}[method] if status == 405 else None
            assert answer.headers.get(b"allow") == allowed

    run(main())


@pytest.mark.parametrize(
    ("model", "status", "code", "param"),
    [
        ("nobody", 404, "model_not_found", "model"),
        ("overlap", 400, "wrong_task", "model"),
        ("plain", 400, "wrong_task", "model"),
        ("vague", 500, "internal_error", None),
        ("buggy", 500, "internal_error", None),
        ("full", 503, "overloaded", None),
    ],
)
def test_unusable_model_is_an_error(model: str, status: int, code: str, param: str | None) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", {**THREE, "model": model})
            error = document(answer)["error"]
            assert (answer.status, error["code"], error["param"]) == (status, code, param)
            assert all(ticket.cancelled for ticket in it.models.tickets) or model == "buggy"

    run(main())


def test_error_does_not_repeat_all_of_a_long_name() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", {**THREE, "model": "x" * 100_000})
            assert (answer.status, document(answer)["error"]["code"]) == (404, "model_not_found")
            assert len(answer.body) < 5_000

    run(main())


@pytest.mark.parametrize(
    ("kind", "status", "code", "param"),
    [
        ("INVALID_ARGUMENT", 400, "invalid_request", "input"),
        ("UNSUPPORTED", 400, "invalid_request", "input"),
        ("NOT_FOUND", 404, "model_not_found", "input"),
        ("UNAVAILABLE", 503, "overloaded", None),
        ("DEADLINE_EXCEEDED", 504, "deadline_exceeded", None),
        ("INTERNAL", 500, "internal_error", None),
        ("UNKNOWN", 500, "internal_error", None),
    ],
)
def test_model_errors_map_to_api_errors(kind: str, status: int, code: str, param: str | None) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", {"model": "picky", "input": [kind, kind, kind]})
            error = document(answer)["error"]
            assert (answer.status, error["code"], error["param"]) == (status, code, param)
            ours = error["message"].endswith("failed; the log has the request id.")
            assert ours if status == 500 else error["message"] == "not this"
            assert answer.headers.get(b"x-forebay-retryable") == (b"1" if status == 503 else None)
            assert answer.headers.get(b"retry-after") == (b"3" if status in (503, 504) else None)
            assert all(ticket.cancelled for ticket in it.models.tickets)

    run(main())


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (["a", "b", "c", "bad"], "input[3]"),
        (["a", "b", "bad"], "input[2]"),
        (["bad", "a"], "input[0]"),
        (["bad"], "input"),
    ],
)
def test_error_names_the_index_of_the_invalid_input(given: list[str], param: str) -> None:
    async def main() -> None:
        async with rig() as it:
            error = document(await it.ask("/v1/embeddings", {"model": "choosy", "input": given}))["error"]
            assert (error["param"], error["message"]) == (param, f"{param}: not this")
            error = document(await it.ask("/v1/embeddings", {"model": "picky", "input": ["INVALID_ARGUMENT"]}))[
                "error"
            ]
            assert (error["param"], error["message"]) == ("input", "not this")

    run(main())


def test_compressed_body_is_named_as_such() -> None:
    async def main() -> None:
        async with rig() as it:
            body = gzip.compress(b'{"model": "lengths", "input": "abc"}')
            answer = await it.ask("/v1/embeddings", body, content_encoding="gzip")
            error = document(answer)["error"]
            assert (answer.status, error["code"], error["param"]) == (415, "unsupported_encoding", "content-encoding")
            plain = await it.ask("/v1/embeddings", {"model": "lengths", "input": "abc"}, content_encoding="identity")
            assert plain.status == 200

    run(main())


def test_lone_surrogate_is_reported() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", b'{"model": "lengths", "input": "\\ud83d"}')
            error = document(answer)["error"]
            assert (answer.status, error["code"]) == (400, "invalid_json")
            assert "\\ud83d is half of a surrogate pair (byte 31)" in error["message"]
            cut = document(await it.ask("/v1/embeddings", b'{"model": "lengths'))["error"]
            assert "truncated" in cut["message"]

    run(main())


@pytest.mark.interpreted
def test_body_with_too_many_values_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "ODD_BYTES_MAX", 100)
    monkeypatch.setattr(fields, "VALUES_MAX", 20)

    async def main() -> None:
        async with rig() as it:
            for words, status in ((["a"] * 50, 400), (["a" * 200], 200)):
                answer = await it.ask("/v1/embeddings", {"model": "lengths", "input": words})
                assert answer.status == status

    run(main())


def test_large_request_queues_only_a_few_batches_at_once() -> None:
    async def main() -> None:
        async with rig() as it:
            asked = asyncio.ensure_future(  # noqa: TID251
                it.ask("/v1/embeddings", {"model": "silent", "input": ["x"] * 9})
            )
            await until(lambda: len(it.models.tickets) == 2)
            it.line.writer.transport.abort()
            await until(lambda: all(ticket.cancelled for ticket in it.models.tickets))
            asked.cancel()
            assert len(it.models.tickets) == 2, "one runs, one is next"
        async with rig() as it:
            answer = document(await it.ask("/v1/embeddings", {"model": "lengths", "input": ["x"] * 9}))
            assert len(answer["data"]) == 9
            assert [each.inputs[0].shape[0] for each in it.models.requests] == [2, 2, 2, 2, 1]

    run(main())


def test_request_whose_model_is_replaced_meanwhile_starts_anew() -> None:
    async def main() -> None:
        async with rig() as it:
            it.models.replaced_after = 3
            answer = document(
                await it.ask("/v1/embeddings", {"model": "lengths", "input": ["x" * n for n in range(1, 10)]})
            )
            assert [each["embedding"][0] for each in answer["data"]] == list(range(1, 10))
            assert [each.inputs[0].shape[0] for each in it.models.requests] == [2, 2, 2, 4, 4, 1]
            assert [ticket.cancelled for ticket in it.models.tickets] == [True, True, True, False, False, False]

    run(main())


def test_rejection_of_a_later_batch_fails_the_request() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", {"model": "fills", "input": ["x"] * 9})
            assert (answer.status, document(answer)["error"]["code"]) == (503, "overloaded")
            assert [ticket.cancelled for ticket in it.models.tickets] == [True, True]

    run(main())


def test_client_disconnect_cancels_its_inferences() -> None:
    async def main() -> None:
        async with rig() as it:
            asked = asyncio.ensure_future(it.ask("/v1/embeddings", {**THREE, "model": "silent"}))  # noqa: TID251
            await until(lambda: len(it.models.tickets) == 2)
            it.line.writer.transport.abort()
            await until(lambda: all(ticket.cancelled for ticket in it.models.tickets))
            asked.cancel()

    run(main())


def test_decoupled_responses_are_joined_or_streamed() -> None:
    async def main() -> None:
        last = {"last": lambda: b"."}
        async with rig(whole=speak(False), pieces=speak(True), ended=speak(True, **last)) as it:
            for path, body, expected in (
                ("whole", b"one two", b"one+two"),
                ("whole", b" ", b""),
                ("pieces", b"one two", b"onetwo"),
                ("pieces", b" ", b""),
                ("ended", b"one two", b"onetwo."),
            ):
                answer = await it.ask(f"/v1/{path}", body, content_type="text/plain")
                assert (answer.status, answer.headers[b"content-type"]) == (200, b"text/plain")
                assert answer.body == expected
            size, text = struct.unpack("<I6s", it.models.requests[-1].inputs[0].data[:10])
            assert (size, text) == (7, b"one tw")

    run(main())


def test_error_is_a_response_before_the_first_chunk_and_aborts_the_stream_after() -> None:
    def failed(refusal: Refusal) -> bytes:
        return error_event(refusal.code, refusal.text)

    async def main() -> None:
        async with rig(pieces=speak(True)) as it:
            answer = await it.ask("/v1/pieces", b"fail one")
            said = "The model 'words' failed; the log has the request id."
            assert (answer.status, document(answer)["error"]["message"]) == (500, said)
            with pytest.raises(asyncio.IncompleteReadError):
                await it.ask("/v1/pieces", b"one fail two")
        async with rig(pieces=speak(True, failed=failed)) as it:
            it.line.send(b"POST /v1/pieces HTTP/1.1\r\nhost: a\r\ncontent-length: 12\r\n\r\none fail two")
            said = await it.line.rest()
            assert b"one" in said
            assert b"The model 'words' failed" in said
            assert b"lost the thread" not in said
            assert b"two" not in said

    run(main())
