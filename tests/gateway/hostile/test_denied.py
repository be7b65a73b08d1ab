"""The audit log names whose key it was that was turned away."""

import asyncio
from pathlib import Path

import msgspec
from tests.gateway.rig import CHAT, Worker, chat, cluster, post
from tests.net.rig import run

from forebay.core.model import RecordsSpec, TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.registry.keys import change_keys

KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)


def test_who_is_over_a_limit_or_asks_for_a_forbidden_model_is_in_the_audit_log(tmp_path: Path) -> None:
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
        (line["status"], line.get("tenant", ""), line.get("key", "")) for line in lines if line["event"] == "request"
    ]
    assert told == [(200, "team", RECORD.id), (429, "team", RECORD.id), (403, "team", RECORD.id), (401, "", "")]
