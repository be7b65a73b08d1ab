"""What a long line does when nobody in it can be served any more."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.gateway.rig import ROUTES, Worker, chat, fronting, post, routes, silent, working
from tests.net.rig import run, until

LONG = 400
"""As many as would be too deep, were each turned away from within the one before it."""


def test_rejecting_a_long_queue_of_a_removed_revision_does_not_stall_the_gateway(tmp_path: Path) -> None:
    async def main() -> None:
        old, new = Worker(silent, "chat-0"), Worker(replica="chat-1")
        old.report = replace(old.report, capacity=1)
        async with working(old, new):
            both = routes(old, new, base=replace(ROUTES, queue_max=LONG))
            rows = (both.replicas[0], replace(both.replicas[1], revision="r2"))
            async with fronting(tmp_path, replace(both, replicas=rows)) as front:
                await front.ready()
                await until(lambda: old.polls > 1)
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(front.ask(post(chat("chat@r1")))) for _ in range(LONG)]
                    async with asyncio.timeout(10):
                        while await front.metric('forebay_queue_depth{model="chat"}') < LONG - len(old.requests):
                            await asyncio.sleep(0.01)
                    front.write(replace(both, replicas=rows[1:], revision="r2"))
                    await until(lambda: sum(task.done() for task in asked) >= LONG - len(old.requests))
                    assert {task.result().status for task in asked if task.done()} == {404}
                    for exchange in old.requests:
                        exchange.abort()
                assert (await front.ask(post(chat()))).status == 200
                assert not front.done.done()

    run(main())
