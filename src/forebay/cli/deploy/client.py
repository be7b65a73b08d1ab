"""A client of the admin API: responses are decoded, and every error says what to do."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec

from forebay.cli.running.address import admin_address
from forebay.cli.server import base_url, bearer, checks, refusal
from forebay.cli.settings import NOT_REACHED, UserError
from forebay.wire.documents import UNREADABLE

T = TypeVar("T")
CONNECT_TIMEOUT_S: Final = 5.0
LOOK_TIMEOUT_S: Final = 10.0
TOKEN: Final = "FOREBAY_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_BYTES_MAX: Final = 1024
AWAY_S_MAX: Final = 300.0
"""How long commands that wait for something bear a cluster that does not answer."""
AGAIN_S: Final = 1.0
LATER: Final = (408, 429, 502, 503, 504)
PROBLEMS: Final = 422
"""Status of a response that lists problems, and is decoded like a success."""


def token(file: Path | None) -> str | None:
    """The API key to send: from the file, else from the environment. Raises `UserError`."""
    if file is None:
        return os.environ.get(TOKEN, "").strip() or None
    try:
        with file.open("rb") as stream:
            text = stream.read(TOKEN_BYTES_MAX).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"--token-file: {file} cannot be read ({reason}).") from None
    if not text:
        raise UserError(f"--token-file: {file} is empty. `forebay keys create --admin ROLE > {file}` fills it.")
    return text


class Busy(UserError):  # noqa: N818 - states the condition
    """The admin API cannot answer now; a retry may succeed."""


def is_passing(error: UserError) -> bool:
    """Whether a retry may succeed."""
    return isinstance(error, Busy) or error.exit_code == NOT_REACHED


class Admin:
    """The admin API of one cluster. Every method raises `UserError`."""

    def __init__(self, url: str | None = None, token_file: Path | None = None, file: Path | None = None) -> None:
        found, self._origin = admin_address(url, file)
        self.url = base_url(found, self._origin)
        self._headers = bearer(token(token_file), "--token-file" if token_file else TOKEN)
        self._checks = checks(self.url)
        self._request: Callable[..., httpx.Response] = partial(httpx.request, trust_env=False, verify=self._checks)

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Requests inside the context share connections."""
        alone = self._request
        with httpx.Client(trust_env=False, verify=self._checks) as client:
            self._request = client.request
            try:
                yield
            finally:
                self._request = alone

    def get(self, path: str, kind: type[T], **query: str | int) -> T:
        """GET a document."""
        return self._value(self.raw("GET", path, query=query), kind)

    def get_patiently(self, path: str, kind: type[T], away_s_max: float) -> T:
        """GET a document; while the cluster does not answer, as when control is restarted, ask again for so long."""
        until = time.monotonic() + away_s_max
        while True:
            try:
                return self.get(path, kind)
            except UserError as error:
                if not is_passing(error) or time.monotonic() >= until:
                    raise
            time.sleep(AGAIN_S)

    def get_slowly(self, path: str, kind: type[T], **query: str | int) -> T:
        """GET a document, without a timeout."""
        return self._value(self.raw("GET", path, query=query, timeout_s=None), kind)

    def send(self, method: str, path: str, kind: type[T], body: object) -> T:
        """Send a change, without a timeout."""
        return self._value(self.raw(method, path, body, timeout_s=None), kind)

    def put_bytes(self, path: str, kind: type[T], content: bytes, timeout_s: float, **query: str | int) -> T:
        """PUT bytes. Raises `Busy` too."""
        return self._value(self.raw("PUT", path, content, query, timeout_s), kind)

    def raw(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = LOOK_TIMEOUT_S,
    ) -> bytes:
        """The body of a successful response. A `bytes` body is sent as it is, any other one as JSON."""
        try:
            answer = self._request(
                method,
                f"{self.url}{path}",
                params=query,
                headers=self._headers,
                content=body if body is None or isinstance(body, bytes) else msgspec.json.encode(body),
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            )
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise UserError(
                f"No cluster runs at {self.url} ({self._origin}). Start one with `forebay up`; "
                "if it runs elsewhere, set --url or FOREBAY_ADMIN_URL, or give its file with -f.",
                NOT_REACHED,
            ) from None
        except httpx.TimeoutException:
            raise UserError(
                f"{self.url} ({self._origin}) did not answer in time: control hangs, or its machine is overloaded.",
                NOT_REACHED,
            ) from None
        except httpx.HTTPError as error:
            raise self._unexpected(error) from None
        if answer.is_success or answer.status_code == PROBLEMS:
            return answer.content
        if b'"error"' not in answer.content:
            raise self._unexpected(f"HTTP {answer.status_code}")
        raise (Busy if answer.status_code in LATER else UserError)(self._refused(answer))

    def _refused(self, answer: httpx.Response) -> str:
        text = refusal(answer)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            how = "The key that was sent is not valid." if self._headers else "No key was sent."
            return f"{text}\n{how} Set a valid key in {TOKEN}, or give its file with --token-file."
        if answer.status_code == httpx.codes.FORBIDDEN and not self._headers:
            return f"{text}\nWithout keys, only the account that runs the cluster, and root, may change it."
        return text

    def _value(self, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except UNREADABLE as error:
            raise self._unexpected(error) from None

    def _unexpected(self, why: object) -> UserError:
        return UserError(
            f"{self.url} does not answer like the admin API of this version of Forebay ({why}).", NOT_REACHED
        )
