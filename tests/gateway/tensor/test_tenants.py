"""Keys and limits hold for tensors as for words; their tokens are counted by bytes."""

import asyncio
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.gateway.rig import JSON, Worker, cluster, post, read_until
from tests.gateway.tensor.test_tensor import BASE, INFER, echo
from tests.net.rig import peer, run, until

from forebay.core.model import RecordsSpec, TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.net.server import Exchange
from forebay.registry.keys import change_keys

READ_S: Final = 1.0
"""More than it takes to read a thousand words, by any estimate."""
TENANT = Tenant("team", ("net",), limits=Quota(tokens_per_day=1500))
KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)
BEARER = b"authorization: Bearer " + KEY.encode()


def test_tensor_requests_need_a_key_and_count_against_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    change_keys(keys, lambda _: ((RECORD,), None))
    spec = TenancySpec((TENANT,), str(keys), str(tmp_path / "counts.json"), str(tmp_path / "leases.json"))
    folder = tmp_path / "records"

    async def main() -> None:
        records = RecordsSpec(str(folder), prompts=True)
        async with cluster(tmp_path, Worker(echo, "net-0", "net"), base=BASE, tenancy=spec, records=records) as front:
            for request in (
                post(b"{}", INFER),
                b"GET /v2/models/net HTTP/1.1\r\nhost: a\r\n\r\n",
                post(b"", b"/v2/repository/index"),
            ):
                refused = await front.ask(request)
                assert refused.status == 401
                assert msgspec.json.decode(refused.body)["error"]
            assert (await front.get(b"/v2/health/live")).status == 200
            assert (await front.ask(post(b"{}", b"/v2/models/other/infer", BEARER))).status in (403, 404)
            index = await front.ask(post(b"", b"/v2/repository/index", BEARER))
            assert msgspec.json.decode(index.body) == [{"name": "net", "state": "READY"}]

            assert (await front.ask(post(b"\xff" * 4000, INFER, BEARER))).status == 200
            over = await front.ask(post(b"\xff" * 4000, INFER, BEARER))
            assert (over.status, "tokens" in msgspec.json.decode(over.body)["error"]) == (429, True)

    run(main())
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"/v2/models/net/infer" in written


FORM = b"content-type: multipart/form-data; boundary=xx"
FILE = b"--xx\r\ncontent-disposition: form-data; name=%b%b\r\n\r\n%b\r\n"
UPLOAD = FILE % (b"file", b'; filename="a.wav"', b"\xff" * 100_000) + FILE % (b"model", b"", b"net") + b"--xx--\r\n"
PICTURE = msgspec.json.encode({"model": "net", "image": "A" * 100_000})
BLOB = msgspec.json.encode({"model": "net", "data": ["A" * 100_000]})
WORDS = msgspec.json.encode({"model": "net", "query": "q", "documents": ["word " * 1000]})


def test_audio_and_image_requests_reserve_no_tokens_and_texts_by_length(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    change_keys(keys, lambda _: ((RECORD,), None))
    tenants = (Tenant("team", ("net",), limits=Quota(tokens_per_day=1500)),)
    spec = TenancySpec(tenants, str(keys), str(tmp_path / "counts.json"), str(tmp_path / "leases.json"))
    told = b"0,0,0"

    def answer(exchange: Exchange) -> None:
        exchange.respond(200, [JSON, (b"x-forebay-usage", told)], b"{}")

    async def main() -> None:
        nonlocal told
        prompt = 'forebay_prompt_tokens_total{model="net"}'
        async with cluster(tmp_path, Worker(answer, "net-0", "net"), base=BASE, tenancy=spec) as front:
            binary = (b"content-type: application/octet-stream", b"inference-header-content-length: 0")
            for request in (
                post(UPLOAD, b"/v1/audio/transcriptions", FORM, BEARER),
                post(PICTURE, b"/v1/images/ocr", BEARER),
                post(BLOB, b"/v1/classify", BEARER),
                post(b"\xff" * 100_000, INFER, BEARER, *binary),
            ):
                assert (await front.ask(request)).status == 200
                assert await front.metric(prompt) == 0
            told = b"700,0,0"
            assert (await front.ask(post(WORDS, b"/v1/rerank", BEARER))).status == 200
            assert await front.metric(prompt) == 700
            assert (await front.ask(post(WORDS, b"/v1/rerank", BEARER))).status == 429

    run(main())


def test_requests_without_reported_tokens_are_billed_by_their_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(echo, "net-0", "net"), base=BASE) as front:
            assert (await front.ask(post(UPLOAD, b"/v1/audio/transcriptions", FORM))).status == 200
            assert await front.metric('forebay_prompt_tokens_total{model="net"}') == 0
            assert (await front.ask(post(WORDS, b"/v1/rerank"))).status == 200
            assert 1200 < await front.metric('forebay_prompt_tokens_total{model="net"}') < 1300

    run(main())


@pytest.mark.parametrize(("path", "begun"), [(b"/v1/rerank", False), (INFER, False), (b"/v1/audio/speech", True)])
def test_clients_that_leave_are_billed_the_text_that_a_model_server_has_read(
    tmp_path: Path, path: bytes, begun: bool
) -> None:
    """Otherwise one that always leaves just before the end would be under no limit."""
    text = msgspec.json.encode({"model": "net", "query": "word " * 1000, "input": "", "documents": []})

    def answer(exchange: Exchange) -> None:
        if begun:
            exchange.start(200, [(b"content-type", b"audio/wav"), (b"transfer-encoding", b"chunked")], b"first part")

    async def main() -> None:
        name = "net-0"
        server = Worker(answer, name, "net")
        async with cluster(tmp_path, server, base=BASE) as front:
            async with peer(front.port) as client:
                client.send(post(text, path))
                await until(lambda: bool(server.requests))
                if begun:
                    await read_until(client, b"first part")
                enough_at = asyncio.get_running_loop().time() + READ_S
                await until(lambda: asyncio.get_running_loop().time() > enough_at)
            await until(lambda: bool(front.lines()))
            assert front.lines()[-1]["code"] == "client_closed"
            assert 1200 < await front.metric('forebay_prompt_tokens_total{model="net"}') < 1300

    run(main())
