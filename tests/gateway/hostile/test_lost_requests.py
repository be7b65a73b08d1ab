"""Replicas that answer load polls, and of a request nothing, or nothing to its end."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.gateway.rig import JSON, RETRYABLE, ROUTES, Worker, chat, cluster, post, silent, whole
from tests.net.rig import run

from forebay.core.model import Policy
from forebay.net.client import pool, upstream
from forebay.net.server import Exchange, Handler


def half(exchange: Exchange) -> None:
    """Promise an answer that never comes to its end."""
    exchange.start(200, [JSON])
    exchange.write(b'{"object":')


def half_a_refusal(exchange: Exchange) -> None:
    """Never say why not."""
    exchange.start(503, [JSON, RETRYABLE])
    exchange.write(b'{"error":')


@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [silent, half, half_a_refusal])
def test_request_lost_by_its_replica_is_retried_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Handler
) -> None:
    for module, name in ((upstream, "SILENCE_S"), (upstream, "FAILURE_S"), (pool, "SWEEP_S")):
        monkeypatch.setattr(module, name, 0.05)

    async def main() -> None:
        workers = Worker(bad, "chat-0"), Worker(whole, "chat-1")
        async with cluster(tmp_path, *workers, base=replace(ROUTES, policy=Policy.ROUND_ROBIN)) as front:
            for _ in range(2):
                assert (await front.ask(post(chat()))).status == 200
            assert workers[0].requests
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())
