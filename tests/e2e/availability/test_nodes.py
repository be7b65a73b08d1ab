"""A GPU of the demo's chat model fails under load: its replica moves to another GPU, and no request fails."""

import asyncio
import json
from pathlib import Path

from tests.e2e.availability.fresh_cluster import fresh_cluster
from tests.e2e.availability.nodes import placed, said
from tests.e2e.cluster import CHAT
from tests.e2e.faults.grounds import STORIES, aside
from tests.e2e.faults.load import Patient, loading
from tests.e2e.rollouts.rolling import watching

REPLICAS = 2
MODEL = {**CHAT, "replicas": REPLICAS, "placement": {"gpus": 1}}
TEXTS: dict[int, str | None] = dict.fromkeys(range(STORIES))
"""What a real model says again may be another text."""
GPUS = ("gpu-0", "gpu-1", "gpu-2")
GPU_BYTES = 24 * 2**30
FELL_OFF = 79
"""An XID after which a GPU does nothing before it was reset."""
START_S = 120.0
"""For a replica to start, on a machine that is busy."""


def test_failed_gpu_is_evacuated_and_quarantined_until_undrained(tmp_path: Path) -> None:
    script = tmp_path / "gpus.jsonl"
    script.write_text("".join(json.dumps({"device": gpu, "memory_bytes": GPU_BYTES}) + "\n" for gpu in GPUS))
    health = {"source": "scripted", "file": str(script), "poll_s": 0.2}

    def states() -> dict[str, str]:
        (node,) = said(cluster, "nodes")["nodes"]
        return {each["device"]: each["state"] for each in node["devices"]}

    async def main() -> None:
        async with (
            loading(cluster.gateway_port, "chat", TEXTS, Patient) as load,
            watching(cluster, "chat", REPLICAS) as watch,
        ):
            before = await asyncio.to_thread(placed, cluster)
            broken = next(gpu for gpu in GPUS if before[gpu] == ["chat-0"])
            with script.open("a") as file:
                file.write(json.dumps({"device": broken, "xid": FELL_OFF}) + "\n")
            await aside("it has been left", lambda: placed(cluster)[broken] == [], START_S)
            await aside("both are there", lambda: len(cluster.ready_replicas("chat")) == REPLICAS, START_S)
            after = await asyncio.to_thread(placed, cluster)
            assert sorted(slot for gpu in GPUS for slot in after[gpu]) == ["chat-0", "chat-1"]
            await load.until("both serve", lambda: len(load.last()) == REPLICAS)
            assert watch.fewest >= REPLICAS - 1, "nothing is left of what ran there"
            assert await asyncio.to_thread(states) == {
                gpu: "quarantined" if gpu == broken else "healthy" for gpu in GPUS
            }
            await asyncio.to_thread(said, cluster, "undrain", "local", "--device", broken)
            assert (await asyncio.to_thread(states))[broken] != "quarantined"
        assert load.bad() == []

    with fresh_cluster(tmp_path, "e2e-xid", MODEL, health=health) as cluster:
        asyncio.run(main())
