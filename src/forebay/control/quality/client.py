"""Sends requests to replicas at their own ports, as a client would."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import httpx
import msgspec

from forebay.core.errors import OK, Code
from forebay.wire.documents import UNREADABLE

ANSWER_BYTES_MAX: Final = 4 * 1_048_576
CONNECTIONS_MAX: Final = 64
EMBEDDED_CHARS_MAX: Final = 1000
"""Of a text: many embedding models take 512 tokens, and reject longer texts."""
BAD_REQUEST: Final = 400
SERVER_ERROR: Final = 500
CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"


class Unreachable(Exception):  # noqa: N818 - a fact, not a mistake
    """The connection failed: nothing was sent."""


class Lost(Exception):  # noqa: N818
    """The request was sent, but no complete response came back in time."""


class Answer(NamedTuple):
    """A response."""

    status: int
    body: bytes


class ModelClient(Protocol):
    """Sends requests."""

    async def ask(self, url: str, path: str, body: bytes, timeout_s: float) -> Answer:
        """POST a JSON body. Raises `Unreachable` or `Lost`."""


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """A ready replica, and the name of its model."""

    url: str
    """Such as `http://127.0.0.1:8100`."""
    model: str


class Reply(NamedTuple):
    """The outcome of a request."""

    code: str
    """`ok`, or one of our error codes."""
    text: str = ""


class HttpModelClient:
    """The `ModelClient` used in production, over HTTP."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            verify=False,  # noqa: S501 - plain HTTP between units; saves loading certificates
            trust_env=False,
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX),
        )

    async def ask(self, url: str, path: str, body: bytes, timeout_s: float) -> Answer:
        """See `ModelClient`."""
        headers = {"content-type": "application/json"}
        found = bytearray()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", url + path, content=body, headers=headers, timeout=timeout_s) as answer,
            ):
                async for chunk in answer.aiter_bytes():
                    found += chunk
                    if len(found) > ANSWER_BYTES_MAX:
                        raise Lost(f"a response of more than {ANSWER_BYTES_MAX} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Unreachable(str(error)) from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise Lost(str(error) or f"no response within {timeout_s:g} s") from error
        return Answer(answer.status_code, bytes(found))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def chat(client: ModelClient, target: ReplicaTarget, request: Mapping[str, object], timeout_s: float) -> Reply:
    """Send a chat request without `model`. Raises `Unreachable`."""
    body = msgspec.json.encode({**request, "model": target.model})
    try:
        answer = await client.ask(target.url, CHAT, body, timeout_s)
    except Lost:
        return Reply(Code.REPLICA_LOST)
    if answer.status >= BAD_REQUEST:
        return Reply(_code(answer))
    try:
        return Reply(OK, msgspec.json.decode(answer.body, type=_Completion).choices[0].message.content or "")
    except (*UNREADABLE, IndexError):
        return Reply(Code.INTERNAL)


async def embed(
    client: ModelClient, target: ReplicaTarget, texts: Sequence[str], timeout_s: float
) -> list[list[float]] | None:
    """The vectors of the texts' beginnings; None if they cannot be had for any reason."""
    beginnings = [text[:EMBEDDED_CHARS_MAX] for text in texts]
    body = msgspec.json.encode({"model": target.model, "input": beginnings, "encoding_format": "float"})
    try:
        answer = await client.ask(target.url, EMBEDDINGS, body, timeout_s)
        data = msgspec.json.decode(answer.body, type=_Embeddings).data
    except (Unreachable, Lost, *UNREADABLE):
        return None
    return [each.embedding for each in data] if len(data) == len(texts) else None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Vector(msgspec.Struct):
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Vector]


class _Problem(msgspec.Struct):
    code: str | None = None


class _Refused(msgspec.Struct):
    error: _Problem


def _code(answer: Answer) -> Code:
    """The error code of an error response; for codes that are not ours, the nearest one."""
    try:
        code = msgspec.json.decode(answer.body, type=_Refused).error.code
        return Code(code or "")
    except (*UNREADABLE, ValueError):
        return Code.INTERNAL if answer.status >= SERVER_ERROR else Code.INVALID_REQUEST
