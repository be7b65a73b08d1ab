"""One request that waits for its own replica holds up nobody else."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

from tests.gateway.rig import CHAT, ROUTES, Worker, chat, fronting, post, routes, silent, working
from tests.net.rig import peer, run, until


def test_requests_waiting_for_one_revision_do_not_block_requests_for_others(tmp_path: Path) -> None:
    async def main() -> None:
        full, idle = Worker(silent, "chat-0"), Worker(replica="chat-1")
        full.report = replace(full.report, capacity=1)
        async with working(full, idle):
            both = routes(full, idle, base=ROUTES)
            rows = (both.replicas[0], replace(both.replicas[1], revision="r2"))
            async with fronting(tmp_path, replace(both, replicas=rows), load_poll_s=3600.0) as front:
                await front.ready()
                await until(lambda: bool(full.polls and idle.polls))
                async with contextlib.AsyncExitStack() as clients, asyncio.timeout(10):
                    while await front.metric('forebay_queue_depth{model="chat"}') == 0:
                        (await clients.enter_async_context(peer(front.port))).send(post(chat("chat@r1")))
                    at_once = await front.ask(post(chat(), CHAT, b"x-forebay-deadline-ms: 0"))
                    assert at_once.status == 200, at_once.body

    run(main())
