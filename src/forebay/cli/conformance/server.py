"""The server under test, as clients see it: one HTTP address and, if given, one of gRPC."""

import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from forebay.cli.conformance.check import Json, placeless, shown
from forebay.cli.conformance.tensors import rounded, unpacked

if TYPE_CHECKING:
    from forebay.cli.conformance.rpc import Rpc

TIMEOUT_S: Final = 30.0
"""For one answer; models of the suite are loaded within it."""

CONNECTIONS_MAX: Final = 64
HEADER_LENGTH: Final = "inference-header-content-length"
CONNECTED: Final = "connection.connect_tcp.started"
SENT: Final = "http11.send_request_headers.started"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body's JSON; the text itself where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return self.body.decode("latin-1")

    def seen(self) -> dict[str, Json]:
        """Status and body: the observation of an answer that carries no tensors."""
        body = self.json
        if isinstance(body, dict) and set(body) == {"error"}:
            return {"status": self.status, "error": placeless(body["error"])}
        return {"status": self.status, "body": body}

    def inferred(self) -> dict[str, Json]:
        """The observation of an inference: outputs with their values, whatever form they came in."""
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
            size = (output.get("parameters") or {}).get("binary_data_size")  # KServe answers null
            if size is None:
                outputs.append({**output, "data": rounded(output["datatype"], output.get("data"))})
                continue
            outputs.append({**output, "data": _values(output["datatype"], self.body[at : at + size])})
            at += size
        rest: dict[str, Json] = {} if at == len(self.body) else {"left over": len(self.body) - at}
        return {"status": self.status, **head, "outputs": by_name(outputs), **rest}


def by_name(outputs: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Sorted: outputs are found by their names, and no server promises an order."""
    return sorted(outputs, key=lambda output: str(output.get("name")))


def _values(datatype: str, data: bytes) -> Json:
    try:
        return unpacked(datatype, data)
    except (struct.error, KeyError):
        return f"damaged: {data[:40]!r}"


@dataclass(slots=True)
class Server:
    """`extensions` are those it claims."""

    http: httpx.AsyncClient
    rpc: "Rpc | None" = None
    metrics: str | None = None
    """URL of the metrics in Prometheus' format."""
    name: str = ""
    """What it calls itself."""
    extensions: Sequence[str] = ()
    models: Sequence[str] = ()
    """Names of models that are ready, for checks that take any."""
    may_infer: bool = False
    """The first of `models` was named by the user, and may run."""

    async def ask(
        self, method: str, path: str, body: Json | bytes = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request; a body that is not bytes goes as JSON. Raises httpx.HTTPError if there is no answer."""
        given = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given.setdefault("content-type", "application/json")
        answer = await self._answered(method, path, body or b"", given)
        return Answer(
            answer.status_code, {key.lower(): value for key, value in answer.headers.items()}, answer.content
        )

    async def _answered(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """A connection that was kept may be closed by the server at any time (RFC 9112 section 9.3): then another.

        Some servers close it behind an error without saying so; that is no finding about the request after it.
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
        """Unload models and load them again: their counters begin anew."""
        for step in ("unload", "load"):
            for model in models:
                await self.post(f"/v2/repository/models/{model}/{step}", {})

    async def infer(
        self, model: str, body: Json, binary: bytes = b"", version: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Ask a model. With `binary` the binary extension's header says where the JSON ends."""
        at = f"/versions/{version}" if version else ""
        text = json.dumps(body).encode()
        more = {"content-type": "application/octet-stream" if binary else "application/json"}
        if binary:
            more[HEADER_LENGTH] = str(len(text))
        return await self.ask("POST", f"/v2/models/{model}{at}/infer", text + binary, {**more, **(headers or {})})


def _noting(steps: set[str]) -> Callable[[str, Mapping[str, object]], Awaitable[None]]:
    """For httpx's extension `trace`: the names of what a request goes through."""

    async def note(step: str, _: Mapping[str, object]) -> None:
        steps.add(step)

    return note


def client(url: str) -> httpx.AsyncClient:
    """A client that asks for nothing special: no compression, no proxies of the environment."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=TIMEOUT_S,
        trust_env=False,
        headers={"accept-encoding": "identity"},
        limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
    )
