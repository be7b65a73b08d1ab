"""Divides the tenants' limits among the gateway processes, by their demand."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from forebay.control.plan import Plan
from forebay.core.model import GatewaySpec
from forebay.core.tenancy import Amounts, Demand, Lease, allot, amounts
from forebay.wire.documents import UNREADABLE

DAY_S = 86_400


class Leases:
    """The limit leases of a cluster's gateways, and the file from which they read them."""

    def __init__(self, path: Path, limits: Mapping[str, Amounts], gateways: Sequence[str]) -> None:
        self._path = path
        self._limits = limits
        self._gateways = gateways
        self._leases: dict[str, Lease] = {}

    def read(self) -> None:
        """Load the previous leases; a missing or invalid file counts as empty."""
        try:
            self._leases = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Lease])
        except (OSError, *UNREADABLE):
            self._leases = {}

    def renew(self, demands: Mapping[str, Demand], now: float, wall: float) -> None:
        """Allot the limits anew. Raises OSError; then the old leases stay valid.

        A gateway that does not respond may still be running, so none is ever left out.
        """
        leases = allot(self._limits, demands, self._leases, gateways=self._gateways, day=int(wall // DAY_S), now=now)
        draft = self._path.with_name(f".{self._path.name}.new")
        draft.write_bytes(msgspec.json.encode(leases))
        draft.replace(self._path)
        self._leases = leases


def make_leases(plan: Plan) -> Leases | None:
    """None if there is nothing to divide: keys are not required, or a single gateway has all of every limit."""
    specs = [slot.spec for slot in plan.gateways if isinstance(slot.spec, GatewaySpec)]
    tenancy = specs[0].tenancy
    if tenancy is None or len(specs) < 2:
        return None
    limits = {tenant.name: amounts(tenant.limits) for tenant in tenancy.tenants}
    return Leases(Path(tenancy.leases_path), limits, [spec.id for spec in specs])
