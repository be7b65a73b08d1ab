"""A whole gateway on virtual time: the code of its process over simulated connections, its snapshot on the disk."""

import asyncio
from pathlib import Path
from random import Random

import pytest
from tests.gateway.rig import ROUTES, Worker, chat, events, fronting, post, routes, whole, working
from tests.net.rig import Answer, Peer, until
from tests.sim.network.recording_protocol import HOST, on
from tests.sim.virtual import elapse

from forebay.sim.network.links import ANY, Shape
from forebay.sim.network.network import Network


async def asked(network: Network, port: int, request: bytes) -> Answer:
    with network.node("client"):
        reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request)
    answer = await Peer(reader, writer).answer()
    writer.close()
    return answer


@pytest.mark.parametrize("chop", [False, True])
def test_gateway_retries_a_request_broken_off_by_a_simulated_worker(tmp_path: Path, chop: bool) -> None:
    network = Network(Random(1), chop=chop)
    workers = [Worker(answer=answer, replica=f"chat-{n}") for n, answer in enumerate((whole, events, whole))]

    async def main() -> None:
        network.shape(ANY, ANY, Shape(delay_s=0.001, jitter_s=0.001))
        async with working(*workers), fronting(tmp_path, routes(*workers, base=ROUTES)) as front:
            await until(lambda: all(worker.polls for worker in workers))
            for _ in range(6):
                assert (await asked(network, front.port, post(chat()))).status == 200
            assert [len(worker.requests) for worker in workers] == [2, 2, 2]
            workers[0].answer = lambda _: network.reset("", "")  # all are of one node here
            began = asyncio.get_running_loop().time()
            answers = [await asked(network, front.port, post(chat())) for _ in range(3)]
            assert [answer.status for answer in answers] == [200, 200, 200]
            assert len(workers[0].requests) > 2
            assert asyncio.get_running_loop().time() < began + 1
            await elapse(60)
            assert (await asked(network, front.port, post(chat()))).status == 200

    on(network, main)
