"""A replica that counts tokens wrongly, once."""

from pathlib import Path

from tests.gateway.rig import CHAT, JSON, Worker, chat, cluster, post
from tests.net.rig import run

from forebay.core.model import TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.net.server import Exchange
from forebay.registry.keys import change_keys

SMALL, SMALL_RECORD = mint("small", bytes(ENTROPY_BYTES), now=0.0)
FREE, FREE_RECORD = mint("free", bytes([1]) * ENTROPY_BYTES, now=0.0)


def test_absurd_token_count_of_a_worker_does_not_exhaust_a_tenants_limit(tmp_path: Path) -> None:
    told = [b"999999999999,999999999999,", b"7,3,"]

    def answer(exchange: Exchange) -> None:
        exchange.respond(200, [JSON, (b"x-forebay-usage", told.pop(0))], b"{}")

    keys = tmp_path / "keys.json"
    change_keys(keys, lambda _: ((SMALL_RECORD, FREE_RECORD), None))
    tenants = (Tenant("small", limits=Quota(tokens_per_min=10_000)), Tenant("free"))
    door = TenancySpec(tenants, str(keys), str(tmp_path / "counts.json"), str(tmp_path / "leases.json"))

    async def main() -> None:
        async with cluster(tmp_path, Worker(answer), tenancy=door) as front:
            for key in (FREE, SMALL):
                answered = await front.ask(post(chat(), CHAT, f"authorization: Bearer {key}".encode()))
                assert answered.status == 200, answered.body

    run(main())
