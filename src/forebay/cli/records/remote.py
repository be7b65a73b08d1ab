"""The records of a running cluster, through its admin API. Every method raises `UserError`."""

from forebay.cli.deploy.client import Admin
from forebay.control.api.recorded import AuditTail, AuditVerified, Decisions, Usage
from forebay.gateway.records.saved import day_text
from forebay.wire.admin_request import UsageRequest


class RemoteRecords:
    """The same as `RecordFiles`, for the gateways on the machine of the admin API."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    @property
    def place(self) -> str:
        """The URL, for messages."""
        return self._admin.url

    def decisions(self, request_id: str) -> Decisions:
        """The newest records of a request, oldest first."""
        return self._admin.get_slowly("/v1/decisions", Decisions, request_id=request_id)

    def usage(self, wanted: UsageRequest) -> Usage:
        """Usage by day, tenant, model and outcome."""
        query = {"tenant": wanted.tenant, "model": wanted.model}
        since = {"since": day_text(wanted.day_first)} if wanted.day_first else {}
        given = {key: value for key, value in query.items() if value is not None}
        return self._admin.get_slowly("/v1/usage", Usage, **given, **since)

    def tail(self, last: int) -> AuditTail:
        """The newest lines of all chains, by time."""
        return self._admin.send("POST", "/v1/audit/tail", AuditTail, {"last": last})

    def verify(self, archived: bool) -> AuditVerified:
        """The result of verifying all chains."""
        return self._admin.send("POST", "/v1/audit/verify", AuditVerified, {"archived": archived})
