"""A GPU that is taken out of service under load: no request fails."""

import asyncio
import json
from pathlib import Path

from tests.e2e.availability.having import having
from tests.e2e.availability.nodes import placed, said
from tests.e2e.faults.grounds import STORIES, SYNTHETIC, aside
from tests.e2e.faults.load import loading, undisturbed
from tests.e2e.rollouts.rolling import watching

REPLICAS = 2
MODEL = {"name": "chat", "replicas": REPLICAS, **SYNTHETIC}
GPUS = ("gpu-0", "gpu-1", "gpu-2")
GPU_BYTES = 24 * 2**30
FELL_OFF = 79
"""An XID after which a GPU does nothing before it was reset."""


def test_a_gpu_with_an_error_is_left_and_stays_out_until_somebody_says_so(tmp_path: Path) -> None:
    script = tmp_path / "gpus.jsonl"
    script.write_text("".join(json.dumps({"device": gpu, "memory_bytes": GPU_BYTES}) + "\n" for gpu in GPUS))
    health = {"source": "scripted", "file": str(script), "poll_s": 0.2}
    model = {**MODEL, "placement": {"gpus": 1}}

    def states() -> dict[str, str]:
        (node,) = said(cluster, "nodes")["nodes"]
        return {each["device"]: each["state"] for each in node["devices"]}

    async def main() -> None:
        port = cluster.gateway_port
        texts = await undisturbed(port, "chat", STORIES)
        async with loading(port, "chat", texts) as load, watching(cluster, "chat", REPLICAS) as watch:
            before = await asyncio.to_thread(placed, cluster)
            broken = next(gpu for gpu in GPUS if before[gpu] == ["chat-0"])
            with script.open("a") as file:
                file.write(json.dumps({"device": broken, "xid": FELL_OFF}) + "\n")
            await aside("it has been left", lambda: placed(cluster)[broken] == [])
            await aside("both are there", lambda: len(cluster.ready_replicas("chat")) == REPLICAS)
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

    with having(tmp_path, "e2e-xid", model, health=health) as cluster:
        asyncio.run(main())
