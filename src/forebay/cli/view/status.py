"""`forebay status`: the status of the cluster, as a table or as JSON."""

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forebay.cli.deploy.client import Admin
from forebay.cli.settings import UserError
from forebay.cli.view.table import Fitting, table
from forebay.control.leading.term import LeaderStatus
from forebay.control.status import FOLLOW, ReplicaStatus, Status, UnitStatus

REFRESH_S = 1.0
WORDS_CHARS_MAX = 200
COLOURS = {
    "ready": "green",
    "starting": "cyan",
    "warming": "cyan",
    "draining": "yellow",
    "degraded": "yellow",
    "quarantined": "bold red",
    "stopped": "bold red",
}
COLUMNS = ("", "state", "load", "kv", "pid", "address", "restarts", "revision")
RIGHT = ("load", "kv", "pid", "restarts")
WHOLE = (*RIGHT, "address")
"""Columns that are never wrapped, unlike the others."""
SPARE = ("kv", "pid", "restarts", "address", "load")
"""Columns that a narrow terminal does not get, the first ones first."""


PATH = "/v1/status"


def status(admin: Admin, watch: bool, as_json: bool, screen: Console) -> int:
    """Print the status once, or keep it up to date until Ctrl-C. Raises `UserError` if the API is unreachable."""
    if not watch:
        if as_json:
            print(msgspec.json.format(admin.raw("GET", PATH), indent=2).decode())
        else:
            screen.print(view(admin.get(PATH, Status)))
        return 0
    try:
        if as_json:
            _documents(admin)
        first = view(admin.get(PATH, Status))
        if screen.is_terminal:
            _watched(first, admin, screen)
        _logged(first, admin, screen)
    except KeyboardInterrupt:
        return 0


def _documents(admin: Admin) -> NoReturn:
    """Print a line of JSON every second; why there is none goes to standard error."""
    document = admin.raw("GET", PATH)
    while True:
        if document:
            print(msgspec.json.format(document, indent=0).decode(), flush=True)
        time.sleep(REFRESH_S)
        try:
            document = admin.raw("GET", PATH)
        except UserError as error:  # control may be restarting
            document = b""
            print(error, file=sys.stderr)


def _watched(first: RenderableType, admin: Admin, screen: Console) -> NoReturn:
    with Live(first, console=screen, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(_view_or_reason(admin), refresh=True)


def _logged(first: RenderableType, admin: Admin, screen: Console) -> NoReturn:
    """Print the status again after every change."""
    shown, last = first, ""
    while True:
        with screen.capture() as captured:
            screen.print(shown)
        if captured.get() != last:
            last = captured.get()
            screen.file.write(last)
            screen.file.flush()
        time.sleep(REFRESH_S)
        shown = _view_or_reason(admin)


def _view_or_reason(admin: Admin) -> RenderableType:
    try:
        return view(admin.get(PATH, Status))
    except UserError as error:
        return Text(f"{error}\nRetrying every second; Ctrl-C quits.", style="yellow")


def view(cluster: Status) -> RenderableType:
    """Format the cluster status."""
    rows = list(_rows(cluster))
    units = [*(replica for model in cluster.models for replica in model.replicas), *cluster.gateways]
    verdict = ("ready", "green") if cluster.ready else (f"not ready ({cluster.phase})", "bold yellow")
    if cluster.phase == FOLLOW:
        return Text(f"{cluster.cluster}  this controller is a follower; {_leader(cluster.leader)}")
    head = Text.assemble((cluster.cluster, "bold"), "  ", verdict, f"  {cluster.gateway_url}")
    trouble = [Text(cluster.trouble, style="bold red")] if cluster.trouble else []
    notes = [Text(f"{model.name}: {model.trouble}", style="red") for model in cluster.models if model.trouble]
    notes += [note for unit in units if (note := _note(unit))]
    if cluster.leader is not None:
        trouble.append(Text(_leader(cluster.leader), style="dim"))
    return Group(head, *trouble, Text(), Fitting(partial(_table, rows), SPARE), *([Text(), *notes] if notes else []))


def _table(rows: Iterable[Sequence[str | Text]], without: Collection[str]) -> Table:
    kept = [at for at, name in enumerate(COLUMNS) if name not in without]
    shown = table(*(COLUMNS[at] for at in kept), right=RIGHT, whole=WHOLE)
    for row in rows:
        cells = (*row, *[""] * (len(COLUMNS) - len(row)))
        shown.add_row(*(cells[at] for at in kept))
    return shown


def _rows(cluster: Status) -> Iterator[Sequence[str | Text]]:
    for model in cluster.models:
        ready = Text(
            f"{model.ready}/{model.wanted} ready", style="green" if model.ready == model.wanted else "yellow"
        )
        if model.least is not None:
            ready.append(f" ({model.least} to {model.most})", "dim")
        if model.standby:
            ready.append(f", {model.standby} standby")
        name = Text(model.name, style="bold")
        yield name, ready, "", "", "", model.engine, "", model.revision or "-"
        yield from map(_replica, model.replicas)
    yield (Text("gateway", style="bold"),)
    for gateway in cluster.gateways:
        yield _unit(gateway, "", "")


def _leader(leader: LeaderStatus | None) -> str:
    if leader is None:
        return "the leader is unknown"
    others = {0: "no follower", 1: "1 follower"}
    waiting = others.get(leader.waiting, f"{leader.waiting} followers")
    return f"leader: the control at {leader.url}, epoch {leader.epoch}{f'; {waiting}' if leader.here else ''}"


def _unit(unit: UnitStatus, load: str, kv: str) -> tuple[str | Text, ...]:
    state = Text(unit.state, style=COLOURS.get(unit.state, ""))
    address = unit.url.rpartition("/")[2] or "-"
    return f"  {unit.id}", state, load, kv, str(unit.pid or "-"), address, str(unit.restarts)


def _replica(replica: ReplicaStatus) -> tuple[str | Text, ...]:
    load = f"{replica.in_flight}/{replica.capacity}" if replica.capacity else "-"
    kv = f"{replica.kv_used_tokens / replica.kv_total_tokens:.0%}" if replica.kv_total_tokens else "-"
    name, state, *unit, address, restarts = _unit(replica, load, kv)
    if replica.standby:
        state = Text("standby", style="blue")
    if replica.grpc_port:
        address = f"{address} (gRPC {replica.grpc_port})"
    return name, state, *unit, address, restarts, replica.revision or "-"


def _note(unit: UnitStatus) -> Text | None:
    """Why a unit is not ready, when it restarts, and its last output; or why it is misplaced."""
    if isinstance(unit, ReplicaStatus) and unit.misplaced and unit.state == "ready":
        return Text.assemble((unit.id, "bold"), f"  {unit.misplaced}")
    if unit.state == "ready" or not (unit.why or unit.last_words):
        return None
    again = f"; restarts in {unit.starts_again_in_s:g} s" if unit.starts_again_in_s else ""
    text = Text.assemble((unit.id, "bold"), f"  {unit.why}{again}")
    words = " ".join(unit.last_words.split())
    if words:
        cut = f"… {words[-WORDS_CHARS_MAX:]}" if len(words) > WORDS_CHARS_MAX else words
        text.append(f"\n  last log lines: {cut}", style="dim")
    return text
