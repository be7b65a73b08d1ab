"""What a tenant may not use sounds to it like what there is not."""

from dataclasses import replace
from pathlib import Path

import msgspec
from tests.gateway.rig import CHAT, ROUTES, Worker, chat, fronting, post, routes, working
from tests.net.rig import Answer, run

from forebay.core.model import Dispatch, Rule, Snapshot, StandIn, TenancySpec, When
from forebay.core.tenancy import ENTROPY_BYTES, Tenant, mint
from forebay.registry.keys import change_keys

KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)
GOOD = b"authorization: Bearer " + KEY.encode()
NAMES = ("secret", "nosuch", "secret@r1", "nosuch@r1", "alias", "alias@r1", "alias@r9", "ruled", "ruled@r1")


def test_forbidden_model_is_indistinguishable_from_an_unknown_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    change_keys(keys, lambda _: ((RECORD,), None))
    team = Tenant("team", ("chat",))
    door = TenancySpec((team,), str(keys), str(tmp_path / "counts.json"), str(tmp_path / "leases.json"))
    dispatch = Dispatch({"alias": "secret"}, (Rule("ruled", "secret", when=When(budget_ms_below=1.0)),))

    async def main() -> None:
        one, two = Worker(), Worker(replica="secret-0", model="secret")
        async with working(one, two):
            models = routes(one), routes(two, base=replace(ROUTES, name="secret"))
            async with fronting(tmp_path, *models, tenancy=door) as front:
                await front.ready()
                Path(front.spec.snapshot_path).write_bytes(msgspec.json.encode(Snapshot(2, models, dispatch)))
                while (await front.ask(post(chat("chat@r9"), CHAT, GOOD))).status != 404:
                    pass
                for fields in ((), (b"x-forebay-budget-ms: nonsense",)):
                    told = {
                        name: said(await front.ask(post(chat(name), CHAT, GOOD, *fields)), name) for name in NAMES
                    }
                    assert set(told.values()) == {told["nosuch"]}
                    assert told["nosuch"][0] == 403

    def said(answer: Answer, name: str) -> tuple[int, bytes]:
        return answer.status, answer.body.replace(name.encode(), b"NAME")

    run(main())


def test_no_fallback_over_the_callers_maximum_price(tmp_path: Path) -> None:
    async def main() -> None:
        cheap = Worker(replica="cheap-0", model="cheap")
        async with working(cheap):
            stands_in = replace(ROUTES, name="cheap", price_per_mtok=2.0)
            own = replace(ROUTES, fallback=(StandIn("cheap"),), queue_timeout_s=0.2)
            async with fronting(tmp_path, own, routes(cheap, base=stands_in)) as front:
                for cost, status in ((b"", 200), (b"2.5", 200), (b"1.5", 503), (b"nonsense", 503)):
                    fields = [b"x-forebay-max-cost: " + cost] if cost else []
                    while (answer := await front.ask(post(chat(), CHAT, *fields))).status != status:
                        assert answer.status == 503, "its replica has not been heard of yet"

    run(main())
