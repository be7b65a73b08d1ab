"""The audit log names whose key it was that was turned away."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from tests.gateway.rig import CHAT, Worker, chat, cluster, post
from tests.net.rig import run

from forebay.core.model import RecordsSpec, TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.registry.keys import change_keys

KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)


def test_requests_over_a_limit_or_for_a_forbidden_model_are_in_the_audit_log(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    change_keys(keys, lambda _: ((RECORD,), None))
    team = Tenant("team", ("chat",), limits=Quota(requests_per_min=1))
    door = TenancySpec((team,), str(keys), str(tmp_path / "counts.json"), str(tmp_path / "leases.json"))

    async def main() -> None:
        records = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, Worker(), tenancy=door, records=records) as front:
            for model, status in (("chat", 200), ("chat", 429), ("other", 403)):
                answer = await front.ask(post(chat(model), CHAT, f"authorization: Bearer {KEY}".encode()))
                assert answer.status == status
            assert (await front.ask(post(chat()))).status == 401
            front.signals.put_nowait(15)
            async with asyncio.timeout(10):
                await front.done

    run(main())
    [log] = (tmp_path / "records").rglob("audit-*.jsonl")
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    told = [
        (line["status"], line.get("tenant", ""), line.get("key", ""), line.get("asked", ""))
        for line in lines
        if line["event"] == "request"
    ]
    who = "team", RECORD.id
    assert told == [(200, *who, ""), (429, *who, "chat"), (403, *who, "other"), (401, "", "", "")]


def test_rejected_requests_are_recorded_with_their_target_but_without_misplaced_keys(
    tmp_path: Path,
) -> None:
    shown = f"fb-{RECORD.id}-…"
    long = "x" * 500
    names = {"other": "other", long: long[:128], "a\n\x1b[31m\u202e": "a\n\x1b[31m\u202e", KEY: shown, "": ""}
    paths = {
        f"/v1/{KEY}": f"/v1/{shown}",
        f"/{KEY.upper()}/{KEY}x": f"/{shown.replace(RECORD.id, RECORD.id.upper())}/{shown}",
        f"/{'y' * 220}{KEY}": f"/{'y' * 220}{shown}",
        f"/v2/models/{KEY}/infer": f"/v2/models/{shown}/infer",
        f"/{KEY.replace('-', '%2D')}": f"/{shown}",
    }
    access: list[dict[str, Any]] = []

    async def main() -> None:
        records = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, Worker(), records=records) as front:
            for name in names:
                assert (await front.ask(post(chat(name), CHAT))).status == 404
            for id in (KEY, f"trace/{KEY[:40]}", KEY.upper()):  # in every log, if it were used
                answer = await front.ask(post(chat(), CHAT, f"x-request-id: {id}".encode()))
                assert (answer.status, answer.headers[b"x-request-id"][:4]) == (200, b"req-")
            for path in paths:
                assert (await front.ask(post(b"{}", path.encode()))).status in (400, 404)
            front.signals.put_nowait(15)
            async with asyncio.timeout(10):
                await front.done
            access.extend(front.lines())

    run(main())
    files = [path.read_bytes() for path in (tmp_path / "records").rglob("*") if path.is_file()]
    everything = b"".join([*files, repr(access).encode()])
    assert KEY[12:] not in everything.decode("latin-1").lower()
    [log] = (tmp_path / "records").rglob("audit-*.jsonl")
    for lines in (access, [msgspec.json.decode(raw) for raw in log.read_bytes().splitlines()]):
        told = [line for line in lines if line["event"] == "request"]
        assert [line.get("asked", "") for line in told[: len(names)]] == list(names.values())
        assert [line["path"] for line in told[-len(paths) :]] == list(paths.values())
