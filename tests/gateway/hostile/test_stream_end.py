"""A replica that has said the last word and does not end its answer."""

import asyncio
from pathlib import Path

import pytest
from tests.gateway.rig import EVENT_STREAM, Worker, chat, cluster, post, read_until
from tests.net.rig import peer, run, until

from forebay.gateway.requests import relay
from forebay.net.server import Exchange


def hang(exchange: Exchange) -> None:
    """Say all, and then no more."""
    exchange.start(200, [EVENT_STREAM])
    exchange.write(b'data: {"id":"a","created":1,"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
    exchange.write(b"data: [DONE]\n\n")


@pytest.mark.interpreted
def test_finished_stream_without_a_client_is_released_after_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "TAIL_S", 0.05)

    async def main() -> None:
        async with cluster(tmp_path, Worker(hang)) as front:
            async with peer(front.port) as client:
                client.send(post(chat(stream=True)))
                await read_until(client, b"[DONE]\n\n")
            async with asyncio.timeout(10):
                while await front.metric('forebay_in_flight{model="chat"}') != 0:
                    await asyncio.sleep(0.01)
            await until(lambda: bool(front.lines()))
            assert [(line["code"], line["status"]) for line in front.lines()] == [("ok", 200)]

    run(main())
