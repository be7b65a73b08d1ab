"""API keys through the admin API: created, shown once, revoked, rotated; every change is in the history."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.control.api.rig import IdleControl, services

from forebay.control.api.app import make_app
from forebay.control.api.services import Services
from forebay.control.keyring import KeyRing
from forebay.core.registry.approval import Role
from forebay.core.tenancy import Denied, Directory, Granted, KeyRecord, Tenant, authorise
from forebay.core.tenancy.roles import Admins, Caller
from forebay.obs.clock import wall_s
from forebay.registry.keys import KEYS_MAX, KeyFileError, change_keys, read_keys
from forebay.store.database import StoreDown

Test = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., None]:
    """Runs a test against the API over a folder, as an admin."""

    def run(test: Test, **change: object) -> None:
        rig = IdleControl(tmp_path)
        parts: Services = replace(services(rig, tmp_path), **change)  # type: ignore[arg-type] # by name

        async def bounded() -> None:
            transport = httpx.ASGITransport(make_app(parts))
            async with asyncio.timeout(30), httpx.AsyncClient(transport=transport, base_url="http://admin/v1") as it:
                await test(it)

        asyncio.run(bounded())
        rig.journal.close()

    return run


def opens(folder: Path, key: str) -> bool:
    directory = Directory([Tenant("team-a")], read_keys(folder / "keys.json"))
    return isinstance(authorise(directory, key.encode(), wall_s()), Granted)


def caller(folder: Path, key: str) -> Caller | Denied:
    return Admins(read_keys(folder / "admin-keys.json")).admit(key.encode(), wall_s())


def test_key_that_ended_first_makes_room_for_a_new_one(tmp_path: Path) -> None:
    """As for jobs that get a key for an hour each: after years there are as many as a file may have."""
    valid = [KeyRecord(f"{n:08}", "team-a", "0" * 64, 100.0) for n in range(KEYS_MAX - 3)]
    late, first = (
        KeyRecord(id, "team-a", "1" * 64, 100.0, expires=at) for id, at in (("late", 900.0), ("first", 800.0))
    )
    revoked = KeyRecord("revoked", "team-a", "2" * 64, 100.0, revoked=850.0)
    ring = KeyRing(("team-a",), tmp_path / "keys.json", tmp_path / "admin-keys.json")
    change_keys(ring.of_tenants, lambda _: ((late, *valid, first, revoked), None))

    def ids() -> list[str]:
        return [record.id for record in ring.all()]

    made = ring.create("team-a", "", 1000.0, None).record
    assert ids() == ["late", *(record.id for record in valid), "revoked", made.id]
    ring.rotate(made.id, 1000.0, 60.0)
    assert ids()[:2] == ["late", valid[0].id]
    assert ids()[-3:-1] == [valid[-1].id, made.id]
    ring.create("team-a", "", 1000.0, None)
    with pytest.raises(KeyFileError, match="revoke some"):
        ring.create("team-a", "", 1000.0, None)
    last = ring.rotate(valid[0].id, 1000.0, 0.0).record
    assert ids()[:1] + ids()[-1:] == [valid[1].id, last.id]


def test_tenant_key_is_created_rotated_and_revoked(ask: Callable[..., None], tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = (
            await client.post("/keys", json={"tenant": "team-a", "expires_s": 3600, "why": "asked for it"})
        ).json()
        first, id = made["key"], made["made"]["id"]
        assert opens(tmp_path, first)
        assert (made["made"]["tenant"], made["made"]["name"], made["made"]["state"]) == ("team-a", None, "good")
        assert made["made"]["expires_at"] == made["made"]["created_at"] + 3600

        second = (await client.post(f"/keys/{id}/rotate", json={"overlap_s": 60})).json()["key"]
        assert (opens(tmp_path, first), opens(tmp_path, second)) == (True, True)
        third = (await client.post(f"/keys/{second[3:11]}/rotate")).json()["key"]
        assert (opens(tmp_path, second), opens(tmp_path, third)) == (False, True)
        gone = await client.post(f"/keys/{second[3:11]}/rotate")
        assert (gone.status_code, gone.json()["error"]["code"]) == (409, "conflict")
        for _ in range(2):
            ended = (await client.post(f"/keys/{third[3:11]}/revoke")).json()
            assert (ended["state"], ended["revoked_at"] >= ended["created_at"]) == ("revoked", True)
        assert not opens(tmp_path, third)

        listed = (await client.get("/keys")).text
        assert [secret for key in (first, second, third) if (secret := key[12:]) in listed] == []
        events = (await client.get("/history?subject=key")).json()["events"]
        assert [(each["actor"], each["kind"], each["subject"]) for each in events] == [
            ("ada", "key.created", f"key/{id}"),
            ("ada", "key.rotated", f"key/{second[3:11]}"),
            ("ada", "key.rotated", f"key/{third[3:11]}"),
            ("ada", "key.revoked", f"key/{third[3:11]}"),
        ]
        assert (events[0]["why"], events[1]["why"]) == ("asked for it", "of team-a")
        assert first[12:] not in str(events)

    ask(test)


def test_admin_key_belongs_to_a_named_caller_with_a_role(ask: Callable[..., None], tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = (await client.post("/keys", json={"name": "bob", "role": "operator"})).json()
        assert caller(tmp_path, made["key"]) == Caller("bob", Role.OPERATOR)
        assert not (tmp_path / "keys.json").exists()
        (row,) = (await client.get("/keys")).json()["keys"]
        assert (row["name"], row["role"], row["tenant"], row["expires_at"]) == ("bob", "operator", None, None)

    ask(test)


@pytest.mark.parametrize(
    ("where", "body", "says"),
    [
        ("", {}, (400, "tenant")),
        ("", {"tenant": "team-a", "name": "bob", "role": "viewer"}, (400, "tenant")),
        ("", {"name": "bob"}, (400, "role")),
        ("", {"role": "viewer"}, (400, "role")),
        ("", {"name": "a b", "role": "viewer"}, (400, "name")),
        ("", {"name": "bob", "role": "emperor"}, (400, "role")),
        ("", {"tenant": "team-a", "expires_s": 0}, (400, "expires_s")),
        ("", {"tenant": "nobody"}, (404, "tenant")),
        ("/aaaaaaaa/revoke", {}, (404, "key")),
        ("/aaaaaaaa/rotate", {"overlap_s": -1}, (400, "overlap_s")),
        ("/aaaaaaaa/rotate", {}, (404, "key")),
    ],
)
def test_invalid_key_request_names_the_field_and_creates_no_key(
    ask: Callable[..., None], tmp_path: Path, where: str, body: dict[str, object], says: tuple[int, str]
) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post(f"/keys{where}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == says, answer.text
        assert (await client.get("/keys")).json() == {"keys": []}
        assert (await client.get("/history")).json() == {"events": []}

    ask(test)


def test_no_key_changes_while_the_store_is_down(ask: Callable[..., None], tmp_path: Path) -> None:
    def down() -> object:
        raise StoreDown("the store cannot be reached")

    rig = IdleControl(tmp_path)
    broken = replace(services(rig, tmp_path).catalogue, store=down)  # type: ignore[arg-type] # all that is asked of it fails
    rig.journal.close()

    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.post("/keys", json={"tenant": "team-a"})).status_code == 503
        assert (await client.get("/keys")).json() == {"keys": []}

    ask(test, catalogue=broken)


def test_corrupt_key_file_is_named_and_kept(ask: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")

    async def test(client: httpx.AsyncClient) -> None:
        for answer in (await client.get("/keys"), await client.post("/keys", json={"tenant": "team-a"})):
            assert answer.status_code == 500
            assert "keys.json: not a file of API keys" in answer.text
        assert (await client.get("/history")).json() == {"events": []}

    ask(test)
    assert (tmp_path / "keys.json").read_text() == "{"


def test_keys_without_tenancy_are_a_conflict(ask: Callable[..., None]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/keys")).status_code == 409

    ask(test, keys=None)


def test_change_that_cannot_be_recorded_leaves_keys_unchanged(tmp_path: Path) -> None:
    """Rotated, the old key would be gone, and nobody would have got the new one."""
    ring = KeyRing(("team-a",), tmp_path / "keys.json", tmp_path / "admin-keys.json")
    made = ring.create("ada", "admin", 1.0, None)

    def lost(record: KeyRecord) -> None:
        raise StoreDown("the answer to the commit was lost")

    for change in (
        lambda: ring.create("bob", "viewer", 2.0, None, lost),
        lambda: ring.rotate(made.record.id, 2.0, 0.0, lost),
        lambda: ring.revoke(made.record.id, 2.0, lost),
    ):
        with pytest.raises(StoreDown):
            change()

    assert ring.all() == (made.record,)
