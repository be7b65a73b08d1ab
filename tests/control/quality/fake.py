"""A replica without a model: an HTTP server with scripted responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

Body = dict[str, Any]
Replying = Callable[[str, Body], "tuple[int, Body | bytes] | None"]
"""Path and body to status and body; None: hang up."""
STRANGER: "tuple[int, Body]" = (404, {})
"""Its port was another's before, whose callers may still come."""


def chatting(reply: Callable[[str], str]) -> Replying:
    """A chat model that answers the last message."""

    def replying(path: str, body: Body) -> tuple[int, Body]:
        if path != "/v1/chat/completions":
            return STRANGER
        return 200, {"choices": [{"message": {"content": reply(body["messages"][-1]["content"])}}]}

    return replying


def refusing(status: int, code: str) -> Replying:
    """A model that answers everything with an error."""
    return lambda path, body: (status, {"error": {"message": "no", "code": code}})


def embedding(vector: Callable[[str], list[float]]) -> Replying:
    """An embedding model."""

    def replying(path: str, body: Body) -> tuple[int, Body]:
        if path != "/v1/embeddings":
            return STRANGER
        return 200, {"data": [{"embedding": vector(text)} for text in body["input"]]}

    return replying


@asynccontextmanager
async def replica(replying: Replying, heard: list[Body] | None = None) -> AsyncIterator[str]:
    """Serve on a free port; the value is the URL. `heard` gets the bodies of all requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        if heard is not None:
            heard.append(body)
        found = replying(head.decode().split()[1], body)
        if found is not None:
            status, answer = found
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode())
            writer.write(data)
            with suppress(ConnectionError):  # who asked may have heard enough
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
