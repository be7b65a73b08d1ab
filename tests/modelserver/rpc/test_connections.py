"""gRPC connections: invalid calls, TLS, pings, connection age, deadlines, metadata, compression."""

import asyncio
import random
import re
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tests.modelserver.rpc.raw import INFER, STREAM
from tests.modelserver.rpc.rig import FOUR, infer_request, rig, until
from tests.net.rig import run
from tests.wire.http2.peer import window

from forebay.core.model import TlsSpec
from forebay.core.serving.values import InferResponse
from forebay.modelserver.rpc import calls
from forebay.modelserver.rpc.front import RpcTls
from forebay.net import http2
from forebay.net import tls as net_tls
from forebay.net.http2 import Http2Server, Keepalive
from forebay.net.tls import BadPair, load
from forebay.wire.http2 import frames as h2
from forebay.wire.http2.grpc import framed, packed


def message(model: str = "echo") -> bytes:
    data = infer_request(model).SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


# --- what calls say


@pytest.mark.parametrize(
    ("headers", "data", "found"),
    [
        ({"path": "/none"}, b"", b"grpc-status\x0212"),
        ({"grpc_encoding": "br"}, b"", b"grpc-status\x0212"),
        ({"grpc_timeout": "soon"}, b"", b"grpc-status\x0213"),
        ({"method": "GET"}, b"", b":status\x03405"),
        ({"content-type": "text/html"}, b"", b":status\x03415"),
        ({}, b"", b"grpc-status\x0213"),
        ({}, b"\0\0\0\0\x09abc", b"grpc-status\x0213"),
        ({}, message() * 2, b"grpc-status\x0212"),
        ({}, b"\0\0\0\0\x03abc", b"grpc-status\x013"),
        ({}, b"\1\0\0\0\x03abc", b"grpc-status\x0213"),
    ],
)
def test_invalid_calls_are_rejected_and_the_connection_stays_open(
    tmp_path: Path, headers: dict[str, str], data: bytes, found: bytes
) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw()
            client.ask(1, data, **headers)
            assert found in await client.until(h2.HEADERS)
            client.ask(3, message())
            assert FOUR in await client.until(h2.DATA)

    run(main())


def test_deadline_ends_the_call_and_cancels_its_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw()
            client.ask(1, message("slow"), grpc_timeout="1m")
            assert b"grpc-status\x014" in await client.until(h2.HEADERS)
            assert it.models.tickets[0].cancelled
            before = asyncio.get_running_loop().time()
            client.ask(3, message(), grpc_timeout="20S")
            assert FOUR in await client.until(h2.DATA)
            assert 20 <= it.models.requests[-1].deadline - before < 30

    run(main())


def test_matching_metadata_is_forwarded_as_parameters(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, forwarded_headers=re.compile("^(tenant|trace-|triton_|user-agent)")) as it:
            metadata = (("tenant", "a"), ("trace-id", "7"), ("other", "x"))
            await it.stub.ModelInfer(infer_request("echo"), metadata=metadata)
            found = it.models.requests[-1].parameters
            assert (found["tenant"], found["trace-id"], "other" in found) == ("a", "7", False)
            assert str(found["user-agent"]).startswith("grpc-python-asyncio")
            call = it.stub.ModelStreamInfer(iter([infer_request("echo")]), metadata=metadata)
            assert not (await call.read()).error_message
            assert it.models.requests[-1].parameters["tenant"] == "a"
            with pytest.raises(grpc.aio.AioRpcError, match="Header 'triton_x' is reserved"):
                await it.stub.ModelInfer(infer_request("echo"), metadata=(("triton_x", "1"),))

    run(main())


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_responses_are_compressed_only_for_clients_accepting_it(tmp_path: Path, coding: str) -> None:
    async def main() -> None:
        async with rig(tmp_path, compression=coding) as it:
            for size in (4, calls.PACKED_AT_ONCE_BYTES_MAX):
                client = await it.raw()
                data = infer_request("echo", bytes(4 * size), [size]).SerializeToString()
                client.send(h2.settings({h2.WINDOW: 2**30}), window(0, 2**30))
                for id, accepted, flag in ((1, f"identity,{coding}", 1), (3, "identity", 0)):
                    client.ask(id, struct.pack(">BI", 0, len(data)) + data, grpc_accept_encoding=accepted)
                    assert (await client.until(h2.DATA))[0] == flag
                answers = [answer async for answer in it.stub.ModelStreamInfer(iter([infer_request("echo")] * 2))]
                assert [list(each.infer_response.raw_output_contents) for each in answers] == [[FOUR]] * 2

    run(main())


@pytest.mark.parametrize("elements", [4, 100_000])
def test_compressed_requests_are_accepted_and_corrupt_ones_rejected(tmp_path: Path, elements: int) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            floats = random.Random(1).randbytes(4 * elements)
            client = await it.raw()
            client.send(h2.settings({h2.WINDOW: 2**30}), window(0, 2**30))
            sent = packed(infer_request("echo", floats, [elements]).SerializeToString(), b"gzip")
            for id, path, count in ((1, INFER, 1), (5, STREAM, 2)):
                client.ask(id, sent * count, path=path, grpc_encoding="gzip")
                got = 0
                while got < 4 * elements * count:
                    got += len(await client.until(h2.DATA))
                assert b"grpc-status\x010" in await client.until(h2.HEADERS)
                client.ask(id + 2, packed(floats, b"deflate"), path=path, grpc_encoding="gzip")
                assert b"a message is not gzip" in await client.until(h2.HEADERS)

    run(main())


def test_cancel_during_response_compression(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, compression="gzip") as it:
            large = infer_request("echo", bytes(2_000_000), [500_000])
            call = it.stub.ModelInfer(large, compression=grpc.Compression.Gzip)
            await until(lambda: it.models.requests)
            call.cancel()
            assert list((await it.stub.ModelInfer(infer_request("echo"))).raw_output_contents) == [FOUR]

    run(main())


def test_bytes_of_incomplete_messages_are_limited_over_all_calls(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, messages_bytes_max=20_000) as it:
            room = it.front.context.room
            first, second = await it.raw(), await it.raw()
            whole = framed(infer_request("echo", bytes(40_000), [10_000]).SerializeToString())
            first.begin(1, whole[:15_000])
            await until(lambda: room.taken == 15_000)
            second.begin(1, whole[:15_000])
            assert b"messages that are being received have over 20000 bytes" in await second.until(h2.HEADERS)
            second.begin(3, framed(infer_request("echo").SerializeToString()))  # it waits for the end of the call
            await until(lambda: room.taken > 15_000)
            second.close()
            await until(lambda: room.taken == 15_000)
            for at, flag in ((15_000, 0), (30_000, h2.END_STREAM)):  # alone it may have more
                first.send(h2.frame(h2.DATA, flag, 1, whole[at : at + 15_000]))
            await first.until(h2.DATA)
            assert room.taken == 0

    run(main())


@pytest.mark.interpreted
@pytest.mark.parametrize("path", [INFER, STREAM])
def test_incomplete_message_times_out(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MESSAGE_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with rig(tmp_path) as it:
            raw = await it.raw()
            raw.begin(1, framed(bytes(10))[:-1], path)
            assert b"a message was incomplete after 0.05 s" in await raw.until(h2.HEADERS)
            assert it.front.context.room.taken == 0

    run(main())


def test_message_timeout_of_a_completed_message_is_ignored(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            raw = await it.raw()
            message = framed(infer_request("echo").SerializeToString())
            raw.begin(1, message + message[:3], STREAM)
            assert FOUR in await raw.until(h2.DATA)
            (call,) = it.front._server.handlers()
            call._on_slow(call._messages, 0)  # as if the first message had been the one that began then
            raw.send(h2.frame(h2.DATA, 0, 1, message[3:]))
            assert FOUR in await raw.until(h2.DATA)

    run(main())


# --- connections


def tls(folder: Path, clients: bool) -> tuple[RpcTls, Any]:
    """What a server listens with, newly issued, and what a client that has its certificate calls with."""
    authority = trustme.CA()
    server, client = authority.issue_cert("localhost"), authority.issue_cert("client@example.org")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    server.private_key_pem.write_to_path(str(folder / "key.pem"))
    server.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
    spec = TlsSpec(str(folder / "server.pem"), str(folder / "key.pem"))
    own = (client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()) if clients else (None, None)
    authorities = str(folder / "ca.pem") if clients else None
    return RpcTls(spec, authorities), grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *own)


@pytest.mark.parametrize("clients", [False, True])
def test_tls_with_and_without_client_certificates(tmp_path: Path, clients: bool) -> None:
    async def main() -> None:
        files, credentials = tls(tmp_path, clients)
        async with rig(tmp_path, tls=files) as it:
            async with grpc.aio.secure_channel(f"localhost:{it.front.port}", credentials) as channel:
                infer = channel.unary_unary(INFER)
                assert FOUR in await infer(infer_request("echo").SerializeToString())
                assert bytes(4_000_000) in await infer(
                    infer_request("echo", bytes(4_000_000), [1_000_000]).SerializeToString(), wait_for_ready=True
                )
            with pytest.raises(grpc.aio.AioRpcError):
                await it.stub.ModelInfer(infer_request("echo"))
            if clients:
                stranger = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
                async with grpc.aio.secure_channel(f"localhost:{it.front.port}", stranger) as channel:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await channel.unary_unary(INFER)(infer_request("echo").SerializeToString())

    run(main())


@pytest.mark.parametrize("clients", [False, True])
def test_renewed_certificate_serves_new_connections_and_keeps_open_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: bool
) -> None:
    monkeypatch.setattr(net_tls, "LOOK_S", 0.01)

    async def main() -> None:
        files, old = tls(tmp_path, clients)
        message = infer_request("echo").SerializeToString()
        async with rig(tmp_path, tls=files) as it:
            address = f"localhost:{it.front.port}"
            async with grpc.aio.secure_channel(address, old) as before:
                assert FOUR in await before.unary_unary(INFER)(message)
                ended_s = it.front.certificate_ends_s
                _, new = tls(tmp_path, clients)  # of another authority
                renewal = it.front._renewal
                first = renewal._taken
                await until(lambda: renewal._taken != first)
                async with grpc.aio.secure_channel(address, new) as after:
                    assert FOUR in await after.unary_unary(INFER)(message)
                async with grpc.aio.secure_channel(address, old) as late:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await late.unary_unary(INFER)(message)
                assert FOUR in await before.unary_unary(INFER)(message)
                assert ended_s is not None
                assert it.front.certificate_ends_s is not None

    run(main())


def test_invalid_client_ca_file_is_reported(tmp_path: Path) -> None:
    tls(tmp_path, True)
    (tmp_path / "empty.pem").write_text("")
    for name in ("none.pem", "empty.pem"):
        with pytest.raises(BadPair, match="PEM file: certificates of authorities") as error:
            load(TlsSpec(str(tmp_path / "server.pem"), str(tmp_path / "key.pem")), str(tmp_path / name))
        assert [each.path for each in error.value.problems] == ["clients"]


async def aged(server: Http2Server[Any], seconds: float) -> None:
    """Let that much time pass for the connections of a server."""
    await asyncio.sleep(0)
    for link in list(server._links):
        link.sweep(server.now + seconds)


async def connected(it: Any, count: int = 1) -> Http2Server[Any]:
    server: Http2Server[Any] = it.front._server
    await until(lambda: server.connections == count)
    return server


def test_client_without_preface_is_disconnected(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw(b"")
            await aged(await connected(it), http2.START_TIMEOUT_S + 1)
            assert await client.ends()

    run(main())


def test_silent_client_with_calls_is_pinged_and_disconnected_without_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, keepalive=Keepalive(ping_s=60, ping_timeout_s=20)) as it:
            client = await it.raw()
            server = await connected(it)
            await aged(server, 61)
            client.ask(1, message("slow"))
            await until(lambda: it.models.tickets)
            await aged(server, 61)
            assert await client.until(h2.PING) == bytes(8)
            client.send(h2.frame(h2.PING, h2.ACK, 0, bytes(8)))
            client.ask(3, message())
            assert FOUR in await client.until(h2.DATA)
            await aged(server, 81)
            await aged(server, 102)
            assert await client.ends()
            assert it.models.tickets[0].cancelled

    run(main())


def test_client_that_reads_slowly_is_not_taken_for_silent(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, keepalive=Keepalive(ping_s=60, ping_timeout_s=20)) as it:
            client = await it.raw()
            client.send(h2.settings({h2.WINDOW: 2**30}), window(0, 2**30))
            large = framed(infer_request("echo", bytes(8_000_000), [2_000_000]).SerializeToString())
            for id in (1, 3, 5, 7):
                client.ask(id, large)
            server = await connected(it)
            await until(lambda: any(link._session.paused for link in server._links))
            got = 0
            for seconds in (61, 82, 103, 124):
                await aged(server, seconds)
                for _ in range(64):  # during which nothing of what the client sends is read
                    got += len(await client.until(h2.DATA))
            while got < 4 * 8_000_000:
                got += len(await client.until(h2.DATA))

    run(main())


@pytest.mark.parametrize(("strikes", "pings"), [(2, 4), (0, 50)])
def test_too_many_pings_end_the_connection(tmp_path: Path, strikes: int, pings: int) -> None:
    async def main() -> None:
        async with rig(tmp_path, keepalive=Keepalive(strikes_max=strikes)) as it:
            client = await it.raw()
            client.send(*[h2.frame(h2.PING, 0, 0, bytes(8))] * pings)
            if strikes:
                assert (await client.until(h2.GOAWAY))[4:] == h2.U32.pack(h2.CALM_DOWN) + b"too_many_pings"
            else:
                client.ask(1, message())
                assert FOUR in await client.until(h2.DATA)

    run(main())


def test_connection_over_its_age_closes_after_its_calls(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, keepalive=Keepalive(age_s=60, age_grace_s=60)) as it:
            client, idle = await it.raw(), await it.raw()
            client.ask(1, message("slow"))
            await until(lambda: it.models.waiting)
            server = await connected(it, 2)
            await aged(server, 61)
            await until(lambda: all(link._leaving_at is not None for link in server._links))
            await aged(server, 63)
            assert await idle.ends()
            waiting = it.models.waiting
            assert waiting is not None
            waiting(InferResponse("slow", "1", "9"), True)
            assert b"slow" in await client.until(h2.DATA)
            assert await client.ends()
            late = await it.raw()
            late.ask(1, message("slow"))
            await until(lambda: len(it.models.tickets) == 2)
            await aged(server, 121)
            assert await late.ends()

    run(main())


def test_last_response_of_a_closing_connection_reaches_a_client_that_reads_it_slowly(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, keepalive=Keepalive(age_s=60)) as it:
            client = await it.raw()
            client.send(h2.settings({h2.WINDOW: 2**30}), window(0, 2**30))
            client.ask(1, framed(infer_request("echo", bytes(20_000_000), [5_000_000]).SerializeToString()))
            got = len(await client.until(h2.DATA))
            server = await connected(it)
            await aged(server, 61)
            await aged(server, 63)
            await until(lambda: all(link._session.over for link in server._links))
            kind, ends = h2.DATA, 0
            while kind != -1:
                kind, id, body = await client.frame()
                if kind == h2.DATA:
                    got += len(body)
                    client.send(window(0, len(body)))
                ends += kind == h2.HEADERS and id == 1
            assert got > 20_000_000
            assert ends == 1

    run(main())


def test_closing_connection_is_closed_for_clients_that_leave_it_open(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, keepalive=Keepalive(age_s=60)) as it:
            client = await it.raw()
            client.ask(1, message())
            await client.until(h2.DATA)
            server = await connected(it)
            await aged(server, 61)
            await aged(server, 63)
            assert await client.ends()  # half-closed: the client may still send
            assert server.connections == 1
            client.send(h2.frame(h2.PING, 0, 0, bytes(8)))
            for times in range(1, 4):  # at the first look, some bytes may not have been acknowledged
                await aged(server, 63 + 3 * times)
            await until(lambda: server.connections == 0)

    run(main())


def test_client_granting_no_window_is_disconnected(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw()
            client.send(h2.settings({h2.WINDOW: 3}))
            client.ask(1, message())
            assert len(await client.until(h2.DATA)) == 3
            server = await connected(it)
            await aged(server, 1)
            await aged(server, http2.STALL_TIMEOUT_S)
            client.send(window(1, 5))
            assert len(await client.until(h2.DATA)) == 5
            await aged(server, http2.STALL_TIMEOUT_S + 1)
            await aged(server, 2 * http2.STALL_TIMEOUT_S + 2)
            assert await client.ends()

    run(main())


def test_backpressure_stops_reading_from_a_client_that_does_not_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw()
            client.send(h2.settings({h2.WINDOW: 2**30}), window(0, 2**30))
            data = infer_request("echo", bytes(4_000_000), [1_000_000]).SerializeToString()
            large = struct.pack(">BI", 0, len(data)) + data
            for id in range(1, 17, 2):
                client.ask(id, large)
            server = await connected(it)
            await until(lambda: any(link._session.paused for link in server._links))
            seen = len(it.models.requests)
            assert seen < 8
            got = 0
            while got < 8 * 4_000_000:
                kind, _, body = await client.frame()
                got += len(body) if kind == h2.DATA else 0
            assert len(it.models.requests) == 8

    run(main())


def test_client_not_reading_goaway_is_disconnected(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw()
            client.send(h2.settings({h2.WINDOW: 2**30}), window(0, 2**30))
            data = infer_request("echo", bytes(4_000_000), [1_000_000]).SerializeToString()
            for id in range(1, 11, 2):
                client.ask(id, struct.pack(">BI", 0, len(data)) + data)
            server = await connected(it)
            await until(lambda: any(link._session.paused for link in server._links))
            for link in list(server._links):
                link._session.end(h2.PROTOCOL_ERROR, "enough")
            for times in range(1, 4):  # at the first look, some bytes may have gone
                await aged(server, times * (http2.STALL_TIMEOUT_S + 1))
            await until(lambda: server.connections == 0)

    run(main())


def test_number_of_connections_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "CONNECTIONS_MAX", 1)

    async def main() -> None:
        async with rig(tmp_path) as it:
            first, second = await it.raw(), await it.raw()
            assert await second.ends()
            first.ask(1, message())
            assert FOUR in await first.until(h2.DATA)

    run(main())
