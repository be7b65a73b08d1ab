"""The generate extension: JSON in, JSON or server-sent events out, without tensors."""

import json
from typing import Final

from forebay.cli.conformance.cases.refused import ONES
from forebay.cli.conformance.check import Check, Json, without_paths
from forebay.cli.conformance.server import Answer, Server

WHOLE: Final[dict[str, bytes | Json]] = {
    "one word": {"text_input": "hello"},
    "two words": {"text_input": "hello there"},
    "no words": {"text_input": ""},
    "id": {"text_input": "hello", "id": "order 7"},
    "another input": {"text_input": "hello", "REPEAT": 1},
    "an unknown field": {"text_input": "hello", "colour": "green"},
    "an unknown object": {"text_input": "hello", "colour": {"a": 1}},
    "parameters": {"text_input": "hello", "parameters": {"colour": "green"}},
    "input missing": {"REPEAT": 1},
    "input of another type": {"text_input": 7},
    "input a list": {"text_input": ["hello"]},
    "input of two": {"text_input": ["hello", "there"]},
    "input null": {"text_input": None},
    "number a string": {"text_input": "hello", "REPEAT": "1"},
    "error": {"text_input": "oops"},
    "word, then error": {"text_input": "hello oops"},
    "not JSON": b"hello",
    "empty": b"",
    "a list": [],
}


def events(answer: Answer) -> Json:
    """The events of an SSE stream; for any other response its body."""
    kind = answer.headers.get("content-type", "")
    seen: dict[str, Json] = {"status": answer.status, "content type": kind}
    if "event-stream" not in kind:
        return {**seen, **answer.seen()}
    lines = [line for line in answer.body.decode().split("\n") if line]
    parsed: list[Json] = [json.loads(line[6:]) if line.startswith("data: ") else line for line in lines]
    for event in parsed:
        if isinstance(event, dict) and "error" in event:
            event["error"] = without_paths(event["error"])
    return {**seen, "events": parsed}


def _whole(name: str, body: bytes | Json) -> Check:
    async def run(server: Server) -> Json:
        return (await server.post("/v2/models/speak/generate", body)).seen()

    return Check(f"generate/{name}", run, ("speak",))


def _stream(name: str, body: bytes | Json) -> Check:
    async def run(server: Server) -> Json:
        return events(await server.post("/v2/models/speak/generate_stream", body))

    return Check(f"generate/stream, {name}", run, ("speak",))


async def _numbers(server: Server) -> Json:
    body: Json = {"IN0": ONES, "IN1": [1, 2, 3, 4]}
    return (await server.post("/v2/models/plain/generate", body)).seen()


async def _number(server: Server) -> Json:
    """A scalar stands for a tensor of one element."""
    answers = [await server.post("/v2/models/about/generate", {"IN": each}) for each in (1, [1], 1.5, True)]
    return [answer.seen() for answer in answers]


async def _version(server: Server) -> Json:
    paths = ["versions/1/generate", "versions/9/generate", "versions/1/generate_stream"]
    return [events(await server.post(f"/v2/models/speak/{path}", {"text_input": "hello"})) for path in paths]


async def _get(server: Server) -> Json:
    return [(await server.get(f"/v2/models/speak/{path}")).seen() for path in ("generate", "generate_stream")]


async def _decoupled_infer(server: Server) -> Json:
    """Plain inference of a decoupled model."""
    given = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
    return (await server.infer("speak", {"inputs": [given]})).inferred()


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        *(_whole(name, body) for name, body in WHOLE.items()),
        *(_stream(name, body) for name, body in WHOLE.items()),
        Check("generate/numbers", _numbers, ("plain",)),
        Check("generate/one number", _number, ("about",)),
        Check("generate/versions", _version, ("speak",)),
        Check("generate/with GET", _get, ("speak",)),
        Check("generate/infer instead", _decoupled_infer, ("speak",)),
    ]
