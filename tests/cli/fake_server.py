"""A small OpenAI-compatible server whose model names select its behaviour."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("The", " capital", " of", " France", " is", " Paris", ".")
MODELS = ("chat", "no-usage", "refuse", "error-event", "cut", "hang", "slow", "rude", "embed")


class FakeServer(ThreadingHTTPServer):
    """Remembers every request document it got."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.documents: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.closing = threading.Event()
        self.models: tuple[str, ...] = MODELS
        self.key: str | None = None
        """The key that listing the models requires."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that leave; all other errors as ever."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """The server, listening; closed at the end."""
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.server.key and self.headers["authorization"] != f"Bearer {self.server.key}":
            error = {"message": "There is no API key in the request.", "code": "invalid_api_key"}
            self._json(401, {"error": error})
            return
        self._json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]})

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.documents.append(document)
        self.server.authorizations.append(self.headers["authorization"])
        if document["model"] == "refuse":
            error = {"message": "The waiting queue is full.", "type": "rate_limit_error", "code": "queue_full"}
            self._json(429, {"error": error}, {"retry-after": "7"})
        elif document["model"] == "hang":
            self.server.closing.wait(30)
            self.close_connection = True
        elif self.path.endswith("/embeddings"):
            count = len(document["input"])
            data = [{"index": i, "embedding": [0.0, 1.0]} for i in range(count)]
            self._json(200, {"data": data, "usage": {"prompt_tokens": 5 * count, "total_tokens": 5 * count}})
        elif document.get("stream"):
            self._stream(document)
        else:
            usage = {"prompt_tokens": 9, "completion_tokens": 7}
            message = {"role": "assistant", "content": "".join(WORDS)}
            self._json(200, {"choices": [{"message": message, "text": "".join(WORDS)}], "usage": usage})

    def _json(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, document: dict[str, Any]) -> None:
        model = document["model"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        text = "\x1b[2Jcleared" if model == "rude" else None
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if model == "slow":
            self._drip()
            return
        for word in [text] if text else WORDS:
            self._event({"choices": [{"index": 0, "text": word, "delta": {"content": word}}]})
        if model == "cut":
            self.close_connection = True
            return
        if model == "error-event":
            self._event({"error": {"message": "The replica was lost.", "code": "stream_interrupted"}})
        else:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            if model != "no-usage":
                self._event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}})
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _drip(self) -> None:
        """Words until the client goes away or the server closes."""
        self.close_connection = True
        with suppress(OSError):
            for number in range(1000):
                self._event({"choices": [{"index": 0, "delta": {"content": f"word {number} "}}]})
                if self.server.closing.wait(0.02):
                    return

    def _event(self, document: object) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()
