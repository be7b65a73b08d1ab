"""The demo model behind two gateways: faults during real generations."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.cluster import CHAT, running
from tests.e2e.faults.grounds import GATEWAYS, STORIES, aside, born_later, run_folder, stopped, wait_quiet
from tests.e2e.faults.load import STREAMS, Client, loading

LOAD_S = 180.0
"""To load a real model beside another one that generates, on a machine that is busy."""


class Patient(Client):
    """A client that waits as long for its answer."""

    patience_s = LOAD_S


@pytest.mark.timeout(900)
def test_real_answers_are_complete_despite_a_stopped_and_a_killed_worker(tmp_path: Path) -> None:
    """What a real model says again may be another text, so only that it is whole is asked for."""
    model = {**CHAT, "replicas": 2}

    async def main() -> None:
        first, second = cluster.ready_replicas("chat")
        texts: dict[int, str | None] = dict.fromkeys(range(STORIES))
        async with loading(cluster.gateway_port, "chat", texts, Patient) as load:
            with stopped(first["pid"]):
                await load.until("nothing begins there", lambda: first["id"] not in load.shares(STREAMS))
            os.kill(second["pid"], signal.SIGKILL)
            await aside("it is back", lambda: born_later(cluster, "chat", second), LOAD_S)
        assert load.bad() == []

    with running(tmp_path, "e2e-faults-real", [model], processes=GATEWAYS) as cluster:
        asyncio.run(main())
        cluster.wait_ready(60)
        wait_quiet(run_folder(cluster) / "peers", [each["url"] for each in cluster.ready_replicas("chat")])
