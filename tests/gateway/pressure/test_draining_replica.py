"""The last replica of a model goes, and a request comes before its gateway knows."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.gateway.pressure.test_reported_pressure import until_reported
from tests.gateway.rig import RETRYABLE, ROUTES, Worker, chat, cluster, failing, post, routes, working
from tests.net.rig import peer, run


@pytest.mark.parametrize(
    ("successor", "code"), [(Worker(generation=2), "draining"), (Worker(replica="chat-1"), "fenced")]
)
def test_a_request_rejected_by_the_last_draining_replica_waits_for_its_successor(
    tmp_path: Path, successor: Worker, code: str
) -> None:
    async def main() -> None:
        base = replace(ROUTES, on_demand=True)
        going = Worker(failing(503, code, RETRYABLE))
        async with cluster(tmp_path, going, base=base) as front, peer(front.port) as client:
            client.send(post(chat()))
            await until_reported(front, waiting=1)
            front.write(base)
            await until_reported(front, waiting=1, refused=0)
            async with working(successor):
                front.write(routes(successor, base=base))
                assert (await client.answer()).status == 200
            assert (len(going.requests), len(successor.requests)) == (1, 1)

    run(main())
