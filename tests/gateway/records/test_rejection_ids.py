"""What the listener answers by itself: its answers carry an id, and that id finds them in all books."""

from pathlib import Path

import pytest
from tests.gateway.records.rig import audit_ids, decision_ids
from tests.gateway.rig import Worker, chat, cluster, post
from tests.net.rig import peer, run, until

from forebay.core.model import Limits, RecordsSpec
from forebay.gateway.records.verifying import verify

LIMITS = Limits(body_bytes_max=1000, header_bytes_max=8000, body_timeout_s=0.05)
MESSAGES = b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n"


@pytest.mark.parametrize(
    ("data", "status", "code", "path"),
    [
        (b"nonsense\r\n\r\n", 400, "bad_http", ""),
        (post(chat(pad="x" * 2000)), 413, "body_too_large", "/v1/chat/completions"),
        (b"GET /v1/models?key=1 HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 9000, 431, "headers_too_large", "/v1/models"),
        (MESSAGES + b"\r\nslow", 408, "request_timeout", "/v1/messages"),
    ],
)
def test_rejected_request_is_found_by_its_id(tmp_path: Path, data: bytes, status: int, code: str, path: str) -> None:
    folder, ids = tmp_path / "records", []

    async def main() -> None:
        async with cluster(tmp_path, Worker(), limits=LIMITS, records=RecordsSpec(str(folder))) as front:
            answer = await front.ask(data)
            id = answer.headers[b"x-request-id"]
            assert (answer.status, id[:4]) == (status, b"req-")
            assert answer.headers.get(b"request-id") == (id if path in ("/v1/messages", "/v1/models") else None)
            await until(lambda: len(front.lines()) == 1)
            (line,) = front.lines()
            assert (line["request_id"], line["status"], line["code"]) == (id.decode(), status, code)
            assert (line["path"], line["model"]) == (path, "")
            assert await front.metric(f'forebay_requests_total{{code="{code}",model="unknown"}}') == 1
            ids.append(id.decode())

    run(main())
    assert decision_ids(folder) == audit_ids(folder) == ids
    assert verify(folder / "gateway-0").ok


def test_rejection_keeps_the_request_id_of_the_client(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), limits=LIMITS) as front, peer(front.port) as client:
            client.send(post(chat(pad="x" * 2000), b"/v1/messages", b"x-request-id: mine-1"))
            assert (await client.answer()).headers[b"x-request-id"] == b"mine-1"

    run(main())


def test_bytes_after_a_request_do_not_get_its_id(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), limits=LIMITS) as front, peer(front.port) as client:
            client.send(post(chat(), b"/v1/messages", b"x-request-id: mine-1") + b"\x00nonsense\r\n")
            assert (await client.answer()).headers[b"x-request-id"] == b"mine-1"
            answer = await client.answer()
            assert (answer.status, answer.headers[b"x-request-id"][:4]) == (400, b"req-")

    run(main())
