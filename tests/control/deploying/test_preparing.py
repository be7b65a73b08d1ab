"""Preparing revisions on the machine: failures are retried with backoff."""

import asyncio

from forebay.control.plan import Artifact
from forebay.control.rolling.preparing import RETRY_MAX_S, Preparer
from forebay.control.rolling.values import DeployRefused
from forebay.sim.loop import run


class UnpreparableRevisions:
    """Knows every revision, and can prepare none."""

    def find(self, model: str, name: str) -> str:
        return name

    async def prepare(self, model: str, revision: str) -> Artifact:
        raise DeployRefused("a chunk has another digest")


def test_failed_preparation_is_retried_with_backoff() -> None:
    pauses: list[float] = []
    notes: list[tuple[str, str]] = []

    async def main() -> None:
        loop, preparer = (
            asyncio.get_running_loop(),
            Preparer(UnpreparableRevisions(), lambda kind, text: notes.append((kind, text))),
        )
        for turn in range(8):
            if turn == 7:  # it is wanted anew
                preparer.forget("chat", "r-1")
            since = loop.time()
            await preparer.prepare("chat", "r-1")
            while not preparer.may_begin("chat", "r-1"):
                await asyncio.sleep(0.5)
            pauses.append(loop.time() - since)

    run(main(), seconds_max=600)
    assert pauses == [1, 2, 4, 8, 16, RETRY_MAX_S, RETRY_MAX_S, 1]
    assert notes[0] == ("not_prepared", "chat@r-1: a chunk has another digest")
