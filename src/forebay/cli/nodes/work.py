"""What the commands on nodes do."""

import time
from typing import Final

import msgspec
from rich.text import Text

from forebay.cli import settings
from forebay.cli.deploy.client import Admin
from forebay.cli.nodes import view
from forebay.cli.settings import INTERRUPTED
from forebay.control.api.documents import NodeDocuments
from forebay.control.health.telling import Standing

REFRESH_S: Final = 0.5


def nodes(admin: Admin, *, as_json: bool) -> int:
    """Show all nodes."""
    found = admin.get("/v1/nodes", NodeDocuments)
    if as_json:
        _print_json(found)
    else:
        settings.screen().print(view.blocks(found))
    return 0


def drain(admin: Admin, node: str, body: dict[str, object], *, wait: bool, as_json: bool) -> int:
    """Take a node out of service; with `wait`, stay until nothing runs there."""
    standing = admin.send("POST", f"/v1/nodes/{node}/drain", Standing, body)
    if wait:
        try:
            standing = _emptied(admin, standing, quiet=as_json)
        except KeyboardInterrupt:
            settings.screen(stderr=True).print(Text(f"\n{node} goes on draining: `forebay nodes`."), soft_wrap=True)
            return INTERRUPTED
    return _told(standing, as_json)


def undrain(admin: Admin, node: str, body: dict[str, str], *, as_json: bool) -> int:
    """Let a node, or a device of it, serve again."""
    return _told(admin.send("POST", f"/v1/nodes/{node}/undrain", Standing, body), as_json)


def _emptied(admin: Admin, standing: Standing, *, quiet: bool) -> Standing:
    """The node when nothing runs there any more, or somebody has undrained it."""
    notes, left = settings.screen(stderr=True), None
    while standing.state == "draining":
        if standing.replicas != left and not quiet:
            left = standing.replicas
            notes.print(Text(f"{standing.name}: {', '.join(left)} still there"), soft_wrap=True)
        time.sleep(REFRESH_S)
        found = admin.get("/v1/nodes", NodeDocuments).nodes
        standing = next((each for each in found if each.name == standing.name), standing)
    return standing


def _told(standing: Standing, as_json: bool) -> int:
    if as_json:
        _print_json(standing)
    else:
        settings.screen().print(view.block(standing))
    return 0


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
