"""A control that does not lead: it names the leader and rejects operations that only the leader serves."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from tests.control.api.rig import IdleControl, services

from forebay.cli.view.status import view
from forebay.control.api.app import make_app
from forebay.control.leading.candidate import Candidate
from forebay.control.leading.term import LeaderStatus, Term
from forebay.control.status import Status
from forebay.core.tenancy.roles import ANYWHERE, LEAST, OPEN
from forebay.providers.fencing import Fence
from forebay.store.access import T
from forebay.store.database import Store, open_store
from forebay.store.leadership import Leadership


async def at_once(work: Callable[[], T]) -> T:
    return work()


class Followed:
    """Somebody else leads."""

    status = LeaderStatus(4, "a", "http://a", here=False)

    def why_not(self) -> str:
        return "the control at http://a leads"

    def guard(self, store: Store) -> Store:
        return store


def test_follower_names_the_leader_until_it_is_elected(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/a.db")
    said: list[str] = []
    a, b = (
        Candidate(
            Leadership(lambda: store, "c", name, f"http://{name}", 8.0),
            tmp_path / "epochs",
            f"http://{name}",
            lambda _, why: said.append(why),
        )
        for name in "ab"
    )

    async def main() -> None:
        assert b.status is None
        assert "not known" in b.why_not()
        first = await a.elected(at_once)
        assert (first.epoch, first.why_not()) == (1, "")
        now = asyncio.get_running_loop().time
        assert await b.attempt(at_once, now) is None
        assert await b.attempt(at_once, now) is None
        assert b.status == LeaderStatus(1, "a", "http://a", here=False)
        await first.renew(at_once)
        assert first.status == LeaderStatus(1, "a", "http://a", here=True, waiting=1)
        await a.resign(at_once)
        second = await b.elected(at_once)
        assert second.epoch == 2
        assert b.status is None, "it does not name the first one when it is deposed itself"
        await first.renew(at_once)
        assert "epoch 2" in first.why_not()
        assert first.status is None
        await first.keep(at_once)  # ends at once

    asyncio.run(main())
    assert said == ["the controller at http://a is the leader (a, epoch 1)"]
    store.close()


def test_term_pauses_while_its_lease_cannot_be_renewed(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/a.db")
    time, down = [0.0], [False]

    def opened() -> Store:
        if down[0]:
            raise OSError("gone")
        return store

    async def main() -> None:
        leadership = Leadership(opened, "c", "a", "", 10.0)
        fence = Fence(tmp_path / "epochs", leadership.apply().epoch)
        fence.raise_up()
        term = Term(leadership, fence, 0.0, "", now=lambda: time[0])
        down[0], time[0] = True, 7.9
        await term.renew(at_once)
        assert term.why_not() == ""
        time[0] = 8.0
        assert "gone" in term.why_not()
        down[0] = False
        await term.renew(at_once)
        assert term.why_not() == ""
        assert term.guard(store) is not store

    asyncio.run(main())
    store.close()


def test_follower_rejects_leader_operations_with_the_leader_url(tmp_path: Path) -> None:
    rig = IdleControl(tmp_path)
    rig.control.leading = Followed()

    async def main() -> None:
        transport = httpx.ASGITransport(make_app(services(rig, tmp_path)))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            status = msgspec.convert((await client.get("/v1/status")).json(), Status)
            assert (status.phase, status.ready, status.leader) == ("follow", False, Followed.status)
            assert (await client.get("/livez")).status_code == 200
            assert (await client.get("/v1/registry")).status_code == 200
            metrics = (await client.get("/metrics")).text
            assert "\nforebay_control_leader 0.0\n" in metrics
            assert "\nforebay_control_epoch 4.0\n" in metrics
            for method, path in (("POST", "/v1/reload"), ("GET", "/readyz"), ("GET", "/v1/rollouts")):
                refused = await client.request(method, path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_leader")
                assert "http://a" in refused.json()["error"]["message"]
            console = Console(width=200)
            with console.capture() as shown:
                console.print(view(status))
            assert "leader: the control at http://a, epoch 4" in shown.get()

    asyncio.run(main())
    rig.journal.close()


def test_metrics_report_the_leader_at_scrape_time(tmp_path: Path) -> None:
    store, time = open_store(f"sqlite:///{tmp_path}/a.db"), [0.0]
    leadership = Leadership(lambda: store, "c", "a", "", 10.0)
    fence = Fence(tmp_path / "epochs", leadership.apply().epoch)
    fence.raise_up()
    term, rig = Term(leadership, fence, 0.0, "", now=lambda: time[0]), IdleControl(tmp_path)

    async def main() -> None:
        transport = httpx.ASGITransport(make_app(services(rig, tmp_path)))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:

            async def leader_metrics() -> list[str]:
                lines = (await client.get("/metrics")).text.splitlines()
                return [line for line in lines if line.startswith("forebay_control_")]

            assert await leader_metrics() == ["forebay_control_leader 1.0", "forebay_control_epoch 0.0"], (
                "there is no other"
            )
            rig.control.leading = term
            assert await leader_metrics() == ["forebay_control_leader 1.0", "forebay_control_epoch 1.0"]
            time[0] = 9.0
            assert await leader_metrics() == ["forebay_control_leader 0.0", "forebay_control_epoch 1.0"], (
                "nobody may just now"
            )
            term.over = "epoch 2 leads"
            assert await leader_metrics() == ["forebay_control_leader 0.0", "forebay_control_epoch 0.0"]

    asyncio.run(main())
    rig.journal.close()
    store.close()


def test_operations_served_by_followers_exist() -> None:
    assert {*LEAST, *OPEN} >= ANYWHERE
