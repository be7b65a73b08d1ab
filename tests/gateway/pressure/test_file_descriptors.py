"""A gateway that has no file descriptors left."""

from pathlib import Path

import pytest
from tests.gateway.rig import Worker, cluster
from tests.net.rig import no_descriptors, peer, run, until

from forebay.gateway import serve

POLLS = 25
LIVEZ = b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"


def test_gateway_without_file_descriptors_serves_its_open_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PEERS_EVERY_S", 0.01)
    worker = Worker()

    async def main() -> None:
        async with cluster(tmp_path, worker) as front, peer(front.port) as client:
            client.send(LIVEZ)
            assert (await client.answer()).status == 200
            with no_descriptors():
                enough = worker.polls + POLLS
                await until(lambda: worker.polls >= enough or front.done.done())
                client.send(LIVEZ)
                assert (await client.answer()).status == 200
                client.send(METRICS)
                assert (await client.answer()).status == 500
            assert (await front.get(b"/metrics")).status == 200

    run(main())
