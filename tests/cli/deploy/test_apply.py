"""Cluster files sent by `forebay apply`: applied in the caller's name, dry-run, or rejected with the reason."""

from pathlib import Path
from typing import Any

import pytest
from tests.cli.reload.test_reload import Bed, document, on_a_bed

from forebay.cli.reload import NOT_SENT
from forebay.cli.settings import FileText, parse_cluster
from forebay.control.changes import Change, Reloaded
from forebay.core.cluster import Cluster
from forebay.core.errors import Code, Refusal
from forebay.core.registry.approval import Role
from forebay.core.tenancy.roles import Caller
from forebay.store.database import StoreDown

BOB, ADA = Caller("bob", Role.OPERATOR), Caller("ada", Role.ADMIN)
MORE = Change("models.chat.replicas", "1", "2")


def parse(text: str) -> Cluster:
    return parse_cluster(FileText("what was sent", text.encode()), {}, otherwise="nothing was changed")


def sent(**more: Any) -> str:
    return document(**more).decode()


class History:
    """What was written down; `down`: why nothing can be."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, Reloaded]] = []
        self.down = ""

    def __call__(self, kind: str, by: str, done: Reloaded) -> None:
        if self.down:
            raise StoreDown(self.down)
        self.events.append((kind, by, done))


def prepared(bed: Bed) -> History:
    history = History()
    bed.again.parse, bed.again.record = parse, history
    return history


def test_apply_is_idempotent_and_recorded_once(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        history = prepared(bed)
        done = await bed.again.apply(sent(replicas=2), BOB, dry_run=False)

        assert done == Reloaded((), (MORE,), ("chat: 1 replica more",))
        assert await bed.again.apply(sent(replicas=2), BOB, dry_run=False) == Reloaded()
        assert history.events == [("cluster.applied", "bob", done)]
        assert "by bob" in bed.rig.events()[-1].why
        assert len(bed.rig.control.plan.slots) == 3

    on_a_bed(tmp_path, test)


def test_dry_run_reports_the_same_and_changes_nothing(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        history = prepared(bed)
        plan = bed.rig.control.plan
        done = await bed.again.apply(sent(replicas=2), BOB, dry_run=True)

        assert (done.changes, done.effects) == ((MORE,), ("chat: 1 replica more",))
        assert bed.rig.control.plan == plan
        assert bed.again.cluster.models[0].replicas == 1
        assert history.events == []
        assert "applied" not in {event.kind for event in bed.rig.events()}

    on_a_bed(tmp_path, test)


@pytest.mark.parametrize("text", ["", "models: 3", "models: [", sent(replicas=0)])
def test_invalid_file_is_rejected_with_all_its_problems(tmp_path: Path, text: str) -> None:
    async def test(bed: Bed) -> None:
        prepared(bed)
        done = await bed.again.apply(text, ADA, dry_run=False)

        assert "nothing was changed" in done.problems[0]
        assert bed.again.cluster.models[0].replicas == 1

    on_a_bed(tmp_path, test)


@pytest.mark.parametrize(
    "text",
    [
        sent().replace('{"gateway"', '{"registry": {"approvals_min": 0, "self_approval": true}, "gateway"'),
        sent(source="y"),
    ],
)
def test_operator_cannot_weaken_approval_rules(tmp_path: Path, text: str) -> None:
    async def test(bed: Bed) -> None:
        prepared(bed)
        bed.again.cluster = parse(sent().replace('{"gateway"', '{"registry": {"approvals_min": 1}, "gateway"'))
        for dry_run in (True, False):
            with pytest.raises(Refusal) as raised:
                await bed.again.apply(text, BOB, dry_run=dry_run)
            assert raised.value.code is Code.ROLE_NOT_ALLOWED
        assert not (await bed.again.apply(text, ADA, dry_run=False)).problems

    on_a_bed(tmp_path, test)


def test_apply_requires_the_history_store_but_reload_does_not(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        history = prepared(bed)
        history.down = "the store is gone"
        with pytest.raises(StoreDown):
            await bed.again.apply(sent(replicas=2), ADA, dry_run=False)
        assert bed.again.cluster.models[0].replicas == 1

        bed.text = document(replicas=2)
        assert (await bed.again("bob")).changes == (MORE,)
        assert ("not_in_history", "the store is gone") in [(e.kind, e.why) for e in bed.rig.events()]
        history.down = ""
        bed.text = document()
        await bed.again("bob")
        assert [event[:2] for event in history.events] == [("cluster.reloaded", "bob")]

    on_a_bed(tmp_path, test)


@pytest.mark.parametrize("setting", ["auth", "keys_file"])
def test_admin_authentication_cannot_change_while_the_cluster_runs(tmp_path: Path, setting: str) -> None:
    async def test(bed: Bed) -> None:
        prepared(bed)
        admin = {"auth": '"keys"', "keys_file": '"k.json"'}[setting]
        text = sent().replace('{"gateway"', f'{{"admin": {{"{setting}": {admin}}}, "gateway"')
        done = await bed.again.apply(text, ADA, dry_run=False)
        assert f"admin.{setting}" in done.problems[0]
        assert "restart" in done.problems[0]

    on_a_bed(tmp_path, test)


def test_cluster_without_apply_rejects_a_file(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        assert (await bed.again.apply(sent(), ADA, dry_run=False)).problems == (NOT_SENT,)

    on_a_bed(tmp_path, test)
