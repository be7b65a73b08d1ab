"""Rollout observations that control polls from each gateway's own port."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.control.quality.fake import Body, Replying, replica

from forebay.control.probe import BODY_BYTES_MAX, Prober
from forebay.core.deploy.samples import Observed, Pair, Sample
from forebay.core.errors import OK
from forebay.core.model import Endpoint
from forebay.core.reconcile import Kind, ObservedUnit
from forebay.core.rollout import Arm

SEEN = Observed("i-1", 7, (Sample("1", Arm.CANARY, 100.0, OK, "256"),), (Pair("1", "256", "?", "a", "b"),), 2)
PID = 4711


def gateway(slot: str, pid: int = PID) -> ObservedUnit:
    return ObservedUnit(slot, 1, Kind.GATEWAY, "d", 5.0, True, pid, Endpoint(pid, "127.0.0.1", 1))


def poll_observations(
    folder: Path, replies: dict[str, Replying], cursors: dict[str, tuple[str, int]]
) -> dict[str, Observed]:
    """The observations that the gateways of these slots report."""

    async def ask() -> dict[str, Observed]:
        prober = Prober(folder)
        async with asyncio.TaskGroup() as tasks:
            done = asyncio.Event()
            listening = asyncio.Semaphore(0)

            async def listen(slot: str, replying: Replying) -> None:
                async with replica(replying) as url:
                    own = Endpoint(PID, "127.0.0.1", urlsplit(url).port or 0)
                    (folder / f"{slot}.json").write_bytes(msgspec.json.encode(own))
                    listening.release()
                    await done.wait()

            for slot, replying in replies.items():
                tasks.create_task(listen(slot, replying))
            for _ in replies:
                await listening.acquire()
            found = await prober.observations([gateway(slot) for slot in replies], cursors)
            done.set()
        return found

    return asyncio.run(ask())


def test_each_gateway_is_polled_from_its_cursor(tmp_path: Path) -> None:
    asked = []

    def telling(path: str, body: Body) -> tuple[int, bytes]:
        asked.append(path)
        return 200, msgspec.json.encode(SEEN)

    replies: dict[str, Replying] = {"gateway-0": telling, "gateway-1": telling}
    assert poll_observations(tmp_path, replies, {"gateway-1": ("i-1", 5)}) == {"gateway-0": SEEN, "gateway-1": SEEN}
    assert sorted(asked) == ["/observations?after=0&instance=", "/observations?after=5&instance=i-1"]


@pytest.mark.parametrize(
    "answer",
    [(404, b"{}"), (200, b"{}"), (200, b"nonsense"), (200, b" " * (BODY_BYTES_MAX + 1)), None],
    ids=["knows nothing", "says nothing", "babbles", "has no end", "hangs up"],
)
def test_gateways_with_unreadable_responses_are_left_out(tmp_path: Path, answer: tuple[int, bytes] | None) -> None:
    replies: dict[str, Replying] = {
        "gateway-0": lambda path, body: answer,
        "gateway-1": lambda path, body: (200, msgspec.json.encode(SEEN)),
    }
    assert poll_observations(tmp_path, replies, {}) == {"gateway-1": SEEN}


def test_shared_gateway_port_is_not_polled(tmp_path: Path) -> None:
    """There another process might answer, and would count the question as a client's."""

    async def ask(units: list[ObservedUnit]) -> dict[str, Observed]:
        return await Prober(tmp_path).observations(units, {})

    old = Endpoint(PID - 1, "127.0.0.1", 1)
    (tmp_path / "gateway-0.json").write_bytes(msgspec.json.encode(old))
    assert asyncio.run(ask([gateway("gateway-0"), gateway("gateway-1")])) == {}
