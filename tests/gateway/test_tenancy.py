"""The door of a gateway: files that change under it, credentials it remembers, counts that outlive it."""

import asyncio
import io
import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.errors import Code
from forebay.core.model import TenancySpec
from forebay.core.tenancy import (
    ENTROPY_BYTES,
    Amounts,
    Counts,
    Denied,
    Granted,
    KeyRecord,
    Lease,
    Quota,
    Tenant,
    mint,
)
from forebay.gateway import tenancy
from forebay.gateway.tenancy import AccessControl, Admitted, credential
from forebay.obs import log
from forebay.providers.processes import identify
from forebay.registry.keys import change_keys

TEAM = Tenant("team", ("chat*",), limits=Quota(requests_per_min=4, tokens_per_day=1000, streams_max=4))
KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)
OTHER, OTHER_RECORD = mint("team", bytes([7]) * ENTROPY_BYTES, now=0.0, expires=1_000_100.0)
BEARER = f"Bearer {KEY}".encode()


@dataclass
class Door:
    """A access with clocks that the test sets."""

    folder: Path
    gateways: int = 1
    now: float = 500.0
    wall: float = 1_000_000.0
    said: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        self.keys = self.folder / "keys.json"
        self.leases = self.folder / "leases.json"
        self.counts = self.folder / "counts" / "gateway-0.json"
        self.open()

    def open(self) -> None:
        paths = (str(self.keys), str(self.counts), str(self.leases))
        spec = TenancySpec((TEAM, Tenant("free")), *paths, gateways=self.gateways)
        logger = log.configure(self.said)
        self.access = AccessControl("gateway-0", spec, logger, now=lambda: self.now, wall=lambda: self.wall)
        self.access.start()

    def write(self, *records: KeyRecord) -> None:
        change_keys(self.keys, lambda _: (records, None))
        self.access.look()

    def lease(self, requests: int) -> None:
        share = Amounts(requests, 1 << 60, 4, 1000)
        lease = Lease(self.now, 0.0, int(self.wall // 86_400), {"team": share}, {})
        self.leases.write_bytes(msgspec.json.encode({"gateway-0": lease}))
        self.access.look()

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds
        self.access.look()
        asyncio.run(self.access.save_aside())

    def ask(self, presented: bytes | None = BEARER, model: str = "chat", tokens: int = 10) -> Admitted | Denied:
        caller = self.access.identify(presented, self.now)
        return caller if isinstance(caller, Denied) else self.access.admit(caller, model, tokens, False, self.now)

    def code(self, *words: Any, **more: Any) -> Code | None:
        answer = self.ask(*words, **more)
        return answer.code if isinstance(answer, Denied) else None

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = [msgspec.json.decode(line) for line in self.said.getvalue().splitlines()]
        return [line for line in lines if line["event"].startswith(event)]


@pytest.fixture
def door(tmp_path: Path) -> Door:
    made = Door(tmp_path)
    made.write(RECORD, OTHER_RECORD)
    return made


def test_api_key_is_read_from_any_of_three_headers() -> None:
    def found(**fields: bytes) -> bytes | None:
        return credential(lambda name: fields.get(name.decode().replace("-", "_")))

    assert found() is None
    assert found(api_key=b"a") == b"a"
    assert found(api_key=b"a", x_api_key=b"b") == b"b"
    assert found(api_key=b"a", x_api_key=b"b", authorization=b"Bearer c") == b"Bearer c"
    assert found(x_api_key=b"b", authorization=b"bearer c") == b"bearer c"
    assert found(x_api_key=b"b", authorization=b"c") == b"c"
    assert found(x_api_key=b"b", authorization=b"") == b"b"


def test_authorization_of_another_scheme_does_not_hide_the_key_header() -> None:
    def found(**fields: bytes) -> bytes | None:
        return credential(lambda name: fields.get(name.decode().replace("-", "_")))

    assert found(x_api_key=b"b", authorization=b"Basic dXNlcjpw") == b"b"
    assert found(api_key=b"a", authorization=b'Digest username="u"') == b"a"
    assert found(authorization=b"Basic dXNlcjpw") == b"Basic dXNlcjpw"


def test_valid_key_admits_and_names_its_tenant(door: Door) -> None:
    for presented in (BEARER, KEY.encode(), BEARER):
        answer = door.ask(presented)
        assert isinstance(answer, Admitted)
        assert answer.tenant == TEAM
        assert answer.key_id == RECORD.id


@pytest.mark.parametrize("presented", [None, b"", b"Bearer none", BEARER[:-1] + b"b"])
def test_without_a_valid_key_no_request_is_admitted(door: Door, presented: bytes | None) -> None:
    assert door.code(presented) is Code.UNAUTHORIZED


def test_forbidden_model_is_rejected_without_using_quota(door: Door) -> None:
    answer = door.ask(model="embed" + "x" * 999)

    assert isinstance(answer, Denied)
    assert answer.code is Code.MODEL_NOT_ALLOWED
    assert "`team`" in answer.text
    assert len(answer.text) < 200
    assert [door.code(model="chat-large") for _ in range(4)] == [None] * 4


def test_limits_are_enforced_and_unused_reservations_are_refunded(door: Door) -> None:
    first = door.ask(tokens=900)
    assert isinstance(first, Admitted)
    assert door.code(tokens=900) is Code.BUDGET_EXCEEDED
    door.access.settle(first.reservation, 50, door.now)
    assert [door.code(tokens=300) for _ in range(3)] == [None, None, None]
    assert [door.code(tokens=n) for n in (51, 50)] == [Code.BUDGET_EXCEEDED, Code.RATE_LIMITED]


def test_revoked_key_is_rejected_after_the_next_reload(door: Door) -> None:
    assert door.code() is None
    door.write(replace(RECORD, revoked=1_000_000.0))
    assert door.code() is Code.UNAUTHORIZED


def test_a_key_expires_by_the_wall_clock_while_it_is_remembered(door: Door) -> None:
    assert door.code(OTHER.encode()) is None
    door.pass_s(99.0)
    assert door.code(OTHER.encode()) is None
    door.wall += 2.0
    door.access.look()
    assert door.code(OTHER.encode()) is Code.UNAUTHORIZED


def test_a_broken_or_missing_file_keeps_the_last_good_keys_and_is_logged_once(door: Door) -> None:
    good = door.keys.read_bytes()
    for spoil in (lambda: door.keys.write_bytes(b"{"), door.keys.unlink):
        spoil()
        for _ in range(3):
            door.pass_s(61.0)
        assert door.code() is None
    door.keys.write_bytes(good)
    door.pass_s(61.0)
    assert door.code() is None
    assert len(door.lines("file unreadable")) == 3, "before the first key there was none"
    assert KEY not in door.said.getvalue()


def test_unreadable_key_file_is_an_internal_error(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(b"{")
    door = Door(tmp_path)

    assert door.code() is Code.INTERNAL


def test_before_the_first_key_exists_no_request_is_admitted(tmp_path: Path) -> None:
    assert Door(tmp_path).code() is Code.UNAUTHORIZED


@pytest.mark.interpreted
def test_cache_of_valid_credentials_is_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "KNOWN_MAX", 2)
    for presented in (BEARER, KEY.encode(), OTHER.encode(), BEARER):
        assert isinstance(door.access.identify(presented, door.now), Granted)
        door.access.identify(presented + b"x", door.now)
    assert len(door.access._known) == 2


def test_usage_counts_survive_a_restart(door: Door) -> None:
    for _ in range(3):
        door.ask(tokens=200)
    door.access.save()
    door.now = 7.0  # another boot: the loop's time begins anew
    door.wall += 30.0
    door.open()
    assert [door.code() for _ in range(2)] == [None, Code.RATE_LIMITED]
    door.pass_s(32.0)
    assert [door.code(tokens=n) for n in (391, 390)] == [Code.BUDGET_EXCEEDED, None]
    door.wall += 86_400.0
    door.access.look()
    assert door.code(tokens=1000) is None


def streams(door: Door) -> int:
    """How many more are let in; they stay open."""
    caller = door.access.identify(BEARER, door.now)
    assert isinstance(caller, Granted)
    let_in = 0
    while isinstance(door.access.admit(caller, "chat", 1, True, door.now), Admitted):
        let_in += 1
    return let_in


def test_streams_of_a_process_that_drains_count_at_its_successor(door: Door) -> None:
    """What is counted of streams is what the process before says while it runs, and nothing afterwards."""

    def says(path: Path, open_now: int, pid: int) -> None:
        used = {"team": Amounts(0, 0, open_now, 0)}
        path.write_bytes(msgspec.json.encode(Counts(door.wall, int(door.wall // 86_400), used, pid)))

    door.counts.parent.mkdir()
    with subprocess.Popen(["sleep", "60"]) as before:
        leaving = door.counts.with_name(f"gateway-0.{before.pid}.leaving")
        try:
            says(door.counts, 3, before.pid)
            door.open()
            assert streams(door) == 1
            says(leaving, 2, before.pid)
            door.access.look()
            assert streams(door) == 1
            says(door.counts, 1, 0)  # by a process between them that is gone
            door.open()
            assert streams(door) == 2
        finally:
            before.kill()
    door.access.look()
    assert streams(door) == 2
    assert not leaving.exists()


def test_successor_counts_what_requests_of_the_draining_process_used(door: Door) -> None:
    """A day is too long for what was only reserved for them when it was replaced."""

    def says(path: Path, tokens: int, at: float, **others: Amounts) -> None:
        used = {"team": Amounts(0, 0, 0, tokens), **others}
        path.write_bytes(msgspec.json.encode(Counts(at, int(at // 86_400), used, before.pid)))

    def used() -> int:
        door.access.look()
        return door.access.demand().tenants["team"].used.day_tokens

    door.counts.parent.mkdir()
    with subprocess.Popen(["sleep", "60"]) as before:
        leaving = door.counts.with_name(f"gateway-0.{before.pid}.leaving")
        try:
            says(door.counts, 900, door.wall)
            says(leaving, 5, door.wall - 100.0)  # an older process with that id
            door.open()
            assert used() == 900
            assert isinstance(door.ask(tokens=50), Admitted)
            says(leaving, 920, door.wall + 1.0, gone=Amounts(1, 1, 0, 1))  # it was still asked meanwhile
            assert used() == 970
            says(leaving, 320, door.wall + 2.0)
            assert [used(), used()] == [370, 370]
            door.pass_s(86_400.0)
            says(leaving, 310, door.wall - 86_390.0)  # its day is still yesterday
            assert used() == 0
            says(leaving, 7, door.wall)
            assert used() == 0, "it may be that of the requests of both days"
        finally:
            before.kill()
    says(leaving, 12, door.wall + 1.0)
    assert [used(), used()] == [5, 5]
    assert not leaving.exists()


def test_requests_at_the_process_before_count_until_it_has_handed_over(door: Door) -> None:
    """Both take requests for a while: the successor asks the file of the other one, and leaves it to that one."""

    def says(path: Path, requests: int) -> None:
        used = {"team": Amounts(requests, 10 * requests, 0, 10 * requests)}
        counts = Counts(door.wall, int(door.wall // 86_400), used, who.pid, who.ticks, who.boot)
        path.write_bytes(msgspec.json.encode(counts))

    door.counts.parent.mkdir()
    with subprocess.Popen(["sleep", "60"]) as before:
        who = identify(before.pid)
        assert who is not None
        leaving = door.counts.with_name(f"gateway-0.{before.pid}.leaving")
        try:
            says(door.counts, 1)
            door.open()
            assert door.code() is None
            door.pass_s(1.0)
            assert msgspec.json.decode(door.counts.read_bytes(), type=Counts).pid == who.pid
            says(door.counts, 2)
            door.access.look()
            assert door.access.demand().tenants["team"].used == Amounts(3, 30, 0, 30)
            door.pass_s(1.0)
            says(leaving, 3)
            door.access.look()
            assert door.code() is Code.RATE_LIMITED
            door.pass_s(1.0)
            saved = msgspec.json.decode(door.counts.read_bytes(), type=Counts)
            assert (saved.pid, saved.used["team"]) == (os.getpid(), Amounts(4, 40, 0, 40))
        finally:
            before.kill()


def test_process_that_got_the_id_of_the_one_before_has_none_of_its_streams(door: Door) -> None:
    door.counts.parent.mkdir()
    with subprocess.Popen(["sleep", "60"]) as other:
        who = identify(other.pid)
        assert who is not None
        try:
            for ticks, boot in ((who.ticks - 1, who.boot), (who.ticks, "another")):
                counts = Counts(door.wall, 0, {"team": Amounts(0, 0, 4, 0)}, who.pid, ticks, boot)
                door.counts.write_bytes(msgspec.json.encode(counts))
                door.open()
                assert streams(door) == 4
        finally:
            other.kill()


def test_a_process_that_drains_tells_its_successor_what_is_still_open(door: Door) -> None:
    caller = door.access.identify(BEARER, door.now)
    assert isinstance(caller, Granted)
    two = [door.access.admit(caller, "chat", 1, True, door.now) for _ in range(2)]
    door.access.leave()
    counts, leaving = door.counts.read_bytes(), door.counts.with_name(f"gateway-0.{os.getpid()}.leaving")
    assert msgspec.json.decode(leaving.read_bytes(), type=Counts).used["team"].streams == 2
    assert isinstance(two[0], Admitted)
    door.access.settle(two[0].reservation, 1, door.now)
    door.pass_s(1.0)
    assert msgspec.json.decode(leaving.read_bytes(), type=Counts).used["team"].streams == 1
    assert door.counts.read_bytes() == counts, "they are its successor's now"
    assert isinstance(two[1], Admitted)
    door.access.settle(two[1].reservation, 5, door.now)
    door.access.leave_for_good()
    last = leaving.read_bytes()
    assert msgspec.json.decode(last, type=Counts).used["team"] == Amounts(2, 6, 0, 6)
    door.ask()
    door.access.save()
    assert leaving.read_bytes() == last


def test_counts_are_saved_once_a_second_and_only_when_they_change(door: Door) -> None:
    door.ask()
    door.pass_s(0.5)
    assert not door.counts.exists()
    door.pass_s(0.5)
    saved = door.counts.stat().st_ino
    door.pass_s(1.0)
    assert door.counts.stat().st_ino == saved
    door.ask()
    door.pass_s(1.0)
    assert door.counts.stat().st_ino != saved


def test_older_counts_never_replace_newer_ones(door: Door) -> None:
    door.ask()
    older = door.access._unsaved(door.now)
    assert older is not None
    door.ask()
    door.now += 1.0
    door.wall -= 3600.0  # somebody has set the clock
    door.access.save()
    saved = door.counts.read_bytes()
    door.access._write(older, door.now - 1.0)  # a thread that was late
    assert door.counts.read_bytes() == saved


def test_unreadable_or_unwritable_counts_do_not_fail_requests(door: Door) -> None:
    door.counts.parent.mkdir()
    door.counts.write_bytes(b"{")
    door.open()
    assert len(door.lines("tenant counts lost")) == 1
    door.counts.unlink()
    door.counts.mkdir()
    for _ in range(2):
        assert door.code() is None
        door.pass_s(1.0)
    assert len(door.lines("tenant counts cannot be written")) == 1


def test_other_tenants_and_limits_apply_to_a_running_gateway(door: Door) -> None:
    running = [door.ask() for _ in range(4)]
    assert door.code() is Code.RATE_LIMITED
    door.access.configure((replace(TEAM, models=("embed",), limits=Quota(requests_per_min=6)),))
    assert [door.code(model=model) for model in ("chat", "embed", "embed", "embed")] == [
        Code.MODEL_NOT_ALLOWED, None, None, Code.RATE_LIMITED,
    ]  # fmt: skip
    for admitted in running:
        assert isinstance(admitted, Admitted)
        door.access.settle(admitted.reservation, 10, door.now)
    door.access.configure((Tenant("new"),))
    denied = door.ask()
    assert isinstance(denied, Denied)
    assert "no longer configured" in denied.text
    for now in (door.now, door.now - 2.0):  # a request in flight may still end, and others saw a later time meanwhile
        assert b"x-ratelimit-limit-requests: 6\r\n" in door.access.limit_lines(TEAM, now)
    key, record = mint("new", b"9" * ENTROPY_BYTES, now=0.0)
    door.write(RECORD, record)
    assert door.code(key.encode()) is None
    door.access.configure((TEAM, Tenant("new")))
    assert door.code() is Code.RATE_LIMITED  # its minute was not forgotten
    changes = len(door.lines("tenants changed"))
    door.access.configure((TEAM, Tenant("new")))
    assert len(door.lines("tenants changed")) == changes == 3


def test_tenants_may_change_before_keys_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(b"{")
    door = Door(tmp_path)
    door.access.configure((replace(TEAM, limits=Quota()),))
    assert door.code() is Code.INTERNAL
    (tmp_path / "keys.json").unlink()
    door.write(RECORD)
    assert [door.code() for _ in range(9)] == [None] * 9


def test_a_lease_of_the_old_limits_is_not_applied_to_the_new_ones(tmp_path: Path) -> None:
    door = Door(tmp_path, gateways=2)
    door.write(RECORD)
    share = Amounts(4, 1 << 60, 4, 1000)
    lease = Lease(door.now, 0.0, int(door.wall // 86_400), {"team": share}, {})
    door.leases.write_bytes(msgspec.json.encode({"gateway-0": lease}))
    door.access.configure((replace(TEAM, limits=Quota(requests_per_min=2)),))
    door.access.look()
    assert [door.code() for _ in range(2)] == [None, Code.RATE_LIMITED]


def test_one_of_several_gateways_enforces_its_lease(tmp_path: Path) -> None:
    door = Door(tmp_path, gateways=4)
    door.write(RECORD)
    assert [door.code() for _ in range(2)] == [None, Code.RATE_LIMITED]
    door.lease(3)
    assert [door.code() for _ in range(3)] == [None, None, Code.RATE_LIMITED]
    demand = door.access.demand()
    assert demand.tenants["team"].used.requests == 3
    assert demand.tenants["team"].wanted.requests == 5
    assert msgspec.json.decode(msgspec.json.encode(demand), type=type(demand)) == demand
    door.leases.write_bytes(b"[]")
    door.access.look()
    assert door.access.demand().tenants["team"].share.requests == 3


def test_leases_of_other_gateways_are_not_read(tmp_path: Path) -> None:
    door = Door(tmp_path, gateways=4)
    door.write(RECORD)
    lease = Lease(door.now, 0.0, int(door.wall // 86_400), {"team": Amounts(3, 1 << 60, 4, 1000)}, {})
    for leases in ({"gateway-0": lease, "gateway-1": "strange"}, {"gateway-1": lease}):
        door.leases.write_bytes(msgspec.json.encode(leases))
        door.access.look()
        assert door.access.demand().tenants["team"].share.requests == 3
