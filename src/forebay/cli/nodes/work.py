"""Implementation of the commands on nodes."""

import time
from contextlib import nullcontext
from math import inf
from typing import Final

from rich.text import Text

from forebay.cli import settings
from forebay.cli.deploy.client import AWAY_S_MAX, Admin
from forebay.cli.deploy.view import span
from forebay.cli.deploy.work import print_json
from forebay.cli.nodes import view
from forebay.cli.settings import INTERRUPTED, WRONG_USAGE, UserError
from forebay.control.api.documents import NodeDocuments
from forebay.control.health.documents import NodeStanding

REFRESH_S: Final = 0.5
SAY_EVERY_S: Final = 30.0
"""Without a terminal, an unchanged list of remaining replicas is repeated this often."""
NOT_EMPTY: Final = 4
"""Exit code when `--timeout` has passed and something still runs there."""


def nodes(admin: Admin, *, as_json: bool) -> int:
    """Show all nodes."""
    found = admin.get("/v1/nodes", NodeDocuments)
    if as_json:
        print_json(found)
    else:
        settings.screen().print(view.blocks(found))
    return 0


def drain(
    admin: Admin, node: str, body: dict[str, object], *, wait: bool, timeout_s: float | None, as_json: bool
) -> int:
    """Take a node out of service; with `wait`, wait until nothing runs there, or until the timeout."""
    if timeout_s is not None and not wait:
        raise UserError("--timeout needs --wait.", WRONG_USAGE)
    standing = admin.send("POST", f"/v1/nodes/{node}/drain", NodeStanding, body)
    notes = settings.screen(stderr=True)
    if wait:
        try:
            standing = _emptied(admin, standing, inf if timeout_s is None else timeout_s, quiet=as_json)
        except KeyboardInterrupt:
            notes.print(Text(f"\n{node} is still draining: `forebay nodes`."), soft_wrap=True)
            return INTERRUPTED
    left = wait and standing.state == "draining"
    if left and not as_json:
        text = f"{node} is not empty after {span(timeout_s)}: {', '.join(standing.replicas)} still running"
        notes.print(Text(f"{text}; it continues to drain", "yellow"), soft_wrap=True)
    return _show(standing, as_json) or (NOT_EMPTY if left else 0)


def undrain(admin: Admin, node: str, body: dict[str, str], *, as_json: bool) -> int:
    """Return a node, or one of its devices, to service."""
    return _show(admin.send("POST", f"/v1/nodes/{node}/undrain", NodeStanding, body), as_json)


def _emptied(admin: Admin, standing: NodeStanding, timeout_s: float, *, quiet: bool) -> NodeStanding:
    """The node once nothing runs there, it has been undrained, or the timeout has passed."""
    notes, began, last, last_s = settings.screen(stderr=True), time.monotonic(), "", 0.0
    spins = notes.is_terminal and not quiet
    with notes.status(f"{standing.name} drains") if spins else nullcontext() as status:
        while standing.state == "draining":
            left_s = began + timeout_s - time.monotonic()
            found = admin.get_patiently("/v1/nodes", NodeDocuments, min(left_s, AWAY_S_MAX))
            standing = next((each for each in found.nodes if each.name == standing.name), standing)
            waited_s, left = time.monotonic() - began, view.remains(standing, found)
            if left and not quiet and (left != last or (not spins and waited_s >= last_s + SAY_EVERY_S)):
                since = f" after {span(waited_s)}" if left == last else ""
                notes.print(Text(f"{standing.name}{since}: {left}"), soft_wrap=True)
                last, last_s = left, waited_s
            if status is not None:
                status.update(f"{standing.name} drains, {len(standing.replicas)} still running, {span(waited_s)}")
            if waited_s >= timeout_s:
                break
            time.sleep(min(REFRESH_S, timeout_s - waited_s))
    return standing


def _show(standing: NodeStanding, as_json: bool) -> int:
    if as_json:
        print_json(standing)
    else:
        settings.screen().print(view.block(standing))
    return 0
