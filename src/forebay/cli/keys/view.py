"""Formats API keys."""

from collections.abc import Sequence
from datetime import UTC, datetime

from forebay.cli import settings
from forebay.cli.deploy.work import print_json
from forebay.cli.view.table import table
from forebay.control.api.documents import KeyDocument


def listed(found: Sequence[KeyDocument], as_json: bool) -> None:
    """Print one line per key."""
    if as_json:
        print_json([_row(each) for each in found])
        return
    if not found:
        settings.screen().print("There are no keys yet. `forebay keys create --tenant NAME` creates one.")
        return
    shown = table("id", "of", "may", "state", "created", "expires", whole=("id",))
    for each in found:
        may = f"admin API: {each.role}" if each.role else "use models"
        ends = time(each.expires_at) or "never"
        shown.add_row(each.id, each.name or each.tenant, may, each.state, time(each.created_at), ends)
    settings.screen().print(shown)


def time(at: float | None) -> str:
    """A point in time in ISO 8601; empty: never."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _row(each: KeyDocument) -> dict[str, str | None]:
    return {
        "id": each.id,
        "tenant": each.tenant,
        "name": each.name,
        "role": each.role,
        "state": each.state,
        "created": time(each.created_at),
        "expires": time(each.expires_at) or None,
        "revoked": time(each.revoked_at) or None,
    }
