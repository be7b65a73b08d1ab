"""The server under test, as clients see it: an HTTP address and, if given, a gRPC address."""

import json
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from forebay.cli.conformance.check import Json, shown, without_paths
from forebay.cli.conformance.tensors import rounded, unpacked
from forebay.cli.server import checks

if TYPE_CHECKING:
    from forebay.cli.conformance.rpc import Rpc

TIMEOUT_S: Final = 30.0
"""Timeout of one response; models of the suite load within it."""

CONNECTIONS_MAX: Final = 64
HEADER_LENGTH: Final = "inference-header-content-length"
CONNECTED: Final = "connection.connect_tcp.started"
SENT: Final = "http11.send_request_headers.started"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded JSON body, or the text if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return self.body.decode("latin-1")

    def seen(self) -> dict[str, Json]:
        """Status and body: the observation of a response without tensors."""
        body = self.json
        if isinstance(body, dict) and set(body) == {"error"}:
            return {"status": self.status, "error": without_paths(body["error"])}
        return {"status": self.status, "body": body}

    def inferred(self) -> dict[str, Json]:
        """The observation of an inference: outputs with their values, whatever their encoding."""
        length = self.headers.get(HEADER_LENGTH)
        if self.status != 200:
            return self.seen()
        try:
            head = json.loads(self.body[: int(length)] if length else self.body)
        except ValueError:
            return {"status": self.status, "body": shown(self.body.decode("latin-1"))}
        if not isinstance(head, dict) or "model_name" not in head:
            return self.seen()
        at = int(length) if length else len(self.body)
        outputs = []
        for output in head.get("outputs", ()):
            size = (output.get("parameters") or {}).get("binary_data_size")  # KServe sends null
            if size is None:
                outputs.append({**output, "data": rounded(output["datatype"], output.get("data"))})
                continue
            outputs.append({**output, "data": _values(output["datatype"], self.body[at : at + size])})
            at += size
        rest: dict[str, Json] = {} if at == len(self.body) else {"left over": len(self.body) - at}
        return {"status": self.status, **head, "outputs": by_name(outputs), **rest}


def by_name(outputs: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Outputs sorted by name, as no server promises an order."""
    return sorted(outputs, key=lambda output: str(output.get("name")))


def _values(datatype: str, data: bytes) -> Json:
    try:
        return unpacked(datatype, data)
    except (struct.error, KeyError):
        return f"damaged: {data[:40]!r}"


@dataclass(slots=True)
class Server:
    """Server under test; `extensions` are those it claims."""

    http: httpx.AsyncClient
    rpc: "Rpc | None" = None
    metrics: str | None = None
    """URL of the Prometheus metrics."""
    name: str = ""
    """Server name in its metadata."""
    extensions: Sequence[str] = ()
    models: Sequence[str] = ()
    """Models that are ready, for checks that work with any model."""
    may_infer: bool = False
    """Whether the first of `models` was named by the user and may be run."""

    async def ask(
        self, method: str, path: str, body: Json | bytes = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request; a body that is not bytes is sent as JSON. Raises httpx.HTTPError without a response."""
        given = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given.setdefault("content-type", "application/json")
        answer = await self._answered(method, path, body or b"", given)
        return Answer(
            answer.status_code, {key.lower(): value for key, value in answer.headers.items()}, answer.content
        )

    async def _answered(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """Retry on a new connection if a kept-alive one was closed meanwhile (RFC 9112 section 9.3).

        Some servers close it after an error without announcing that; this says nothing about the next request.
        """
        while True:
            steps: set[str] = set()
            try:
                return await self.http.request(
                    method, path, content=body, headers=headers, extensions={"trace": _noting(steps)}
                )
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                if SENT not in steps or CONNECTED in steps:
                    raise

    async def get(self, path: str) -> Answer:
        """GET."""
        return await self.ask("GET", path)

    async def post(self, path: str, body: Json | bytes = None) -> Answer:
        """POST."""
        return await self.ask("POST", path, body)

    async def reload(self, *models: str) -> None:
        """Unload and load models again, which resets their counters."""
        for step in ("unload", "load"):
            for model in models:
                await self.post(f"/v2/repository/models/{model}/{step}", {})

    async def infer(
        self, model: str, body: Json, binary: bytes = b"", version: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Infer. With `binary` the binary extension's header gives the length of the JSON."""
        at = f"/versions/{version}" if version else ""
        text = json.dumps(body).encode()
        more = {"content-type": "application/octet-stream" if binary else "application/json"}
        if binary:
            more[HEADER_LENGTH] = str(len(text))
        return await self.ask("POST", f"/v2/models/{model}{at}/infer", text + binary, {**more, **(headers or {})})


def _noting(steps: set[str]) -> Callable[[str, Mapping[str, object]], Awaitable[None]]:
    """Trace function for httpx: collects the names of the steps of a request."""

    async def note(step: str, _: Mapping[str, object]) -> None:
        steps.add(step)

    return note


def client(
    url: str, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """A client without special features: no compression, no proxies from the environment."""
    return httpx.AsyncClient(
        verify=checks(url, tls),
        base_url=url.rstrip("/"),
        timeout=TIMEOUT_S,
        trust_env=False,
        headers={"accept-encoding": "identity", **(headers or {})},
        limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
    )
