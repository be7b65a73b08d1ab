"""Keys and limits hold for tensors as for words; their tokens are counted by bytes."""

from pathlib import Path

import msgspec
from tests.gateway.rig import Worker, cluster, post
from tests.gateway.tensor.test_tensor import BASE, INFER, echo
from tests.net.rig import run

from forebay.core.model import RecordsSpec, TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.registry.keys import change_keys

TENANT = Tenant("team", ("net",), limits=Quota(tokens_per_day=1500))
KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)
BEARER = b"authorization: Bearer " + KEY.encode()


def test_who_asks_for_tensors_needs_a_key_and_stays_within_its_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    change_keys(keys, lambda _: ((RECORD,), None))
    spec = TenancySpec((TENANT,), str(keys), str(tmp_path / "counts.json"), str(tmp_path / "leases.json"))
    folder = tmp_path / "records"

    async def main() -> None:
        records = RecordsSpec(str(folder), prompts=True)
        async with cluster(tmp_path, Worker(echo, "net-0", "net"), base=BASE, tenancy=spec, records=records) as front:
            for request in (
                post(b"{}", INFER),
                b"GET /v2/models/net HTTP/1.1\r\nhost: a\r\n\r\n",
                post(b"", b"/v2/repository/index"),
            ):
                refused = await front.ask(request)
                assert refused.status == 401
                assert msgspec.json.decode(refused.body)["error"]
            assert (await front.get(b"/v2/health/live")).status == 200
            assert (await front.ask(post(b"{}", b"/v2/models/other/infer", BEARER))).status in (403, 404)
            index = await front.ask(post(b"", b"/v2/repository/index", BEARER))
            assert msgspec.json.decode(index.body) == [{"name": "net", "state": "READY"}]

            assert (await front.ask(post(b"\xff" * 4000, INFER, BEARER))).status == 200
            over = await front.ask(post(b"\xff" * 4000, INFER, BEARER))
            assert (over.status, "tokens" in msgspec.json.decode(over.body)["error"]) == (429, True)

    run(main())
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"/v2/models/net/infer" in written
