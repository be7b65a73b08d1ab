"""Shares the tenants' limits out among the gateway processes, by what each of them has use for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from forebay.control.plan import Plan
from forebay.core.model import GatewaySpec
from forebay.core.tenancy import Amounts, Demand, Lease, allot, amounts
from forebay.wire.documents import UNREADABLE

DAY_S = 86_400


class Leases:
    """The leases of a cluster's gateways, and the file in which they find them."""

    def __init__(self, path: Path, limits: Mapping[str, Amounts], gateways: Sequence[str]) -> None:
        self._path = path
        self._limits = limits
        self._gateways = gateways
        self._leases: dict[str, Lease] = {}

    def read(self) -> None:
        """Go on from what the last control has lent; a file that is missing or broken counts as none."""
        try:
            self._leases = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Lease])
        except (OSError, *UNREADABLE):
            self._leases = {}

    def renew(self, demands: Mapping[str, Demand], now: float, wall: float) -> None:
        """Lend anew. Raises OSError; then the old leases stand.

        A gateway that is silent may run all the same, so that none is ever left out.
        """
        leases = allot(self._limits, demands, self._leases, gateways=self._gateways, day=int(wall // DAY_S), now=now)
        draft = self._path.with_name(f".{self._path.name}.new")
        draft.write_bytes(msgspec.json.encode(leases))
        draft.replace(self._path)
        self._leases = leases


def make_leases(plan: Plan) -> Leases | None:
    """None where there is nothing to share: no keys are asked for, or one gateway has all of every limit."""
    specs = [slot.spec for slot in plan.gateways if isinstance(slot.spec, GatewaySpec)]
    tenancy = specs[0].tenancy
    if tenancy is None or len(specs) < 2:
        return None
    limits = {tenant.name: amounts(tenant.limits) for tenant in tenancy.tenants}
    return Leases(Path(tenancy.leases_path), limits, [spec.id for spec in specs])
