"""Implementation of the commands on rollouts."""

import sys
import time as clock
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from forebay.cli import settings
from forebay.cli.deploy import view
from forebay.cli.deploy.client import AWAY_S_MAX, Admin
from forebay.cli.settings import INTERRUPTED, WRONG_USAGE, UserError
from forebay.control.api.documents import RolloutDocument, Rollouts
from forebay.control.changes import NOTHING, Change, Reloaded
from forebay.core.deploy.course import Kind
from forebay.core.deploy.rollout import Phase
from forebay.wire.clusterfile import ClusterFileError, load_course

REFRESH_S: Final = 1.0
WELL: Final = (Phase.PROMOTED, Phase.JUDGED)
"""Final phases that are no failure."""


def plan_of(plan: str | None) -> str | None:
    """A kind of plan unchanged, or the text of a plan file after checking it. Raises `UserError`."""
    if plan is None or plan in tuple(Kind):
        return plan
    path = Path(plan)
    if not path.is_file():
        kinds = ", ".join(Kind)
        raise UserError(f"--plan {plan!r}: no such file; the kinds of plan are {kinds}.", WRONG_USAGE)
    file = settings.read_file(path)
    try:
        load_course(file.text, file.name)
    except ClusterFileError as error:
        raise UserError(error.listing("no rollout was started")) from None
    return file.text.decode("utf-8-sig")


def deploy(admin: Admin, model: str, body: dict[str, object], *, wait: bool, as_json: bool) -> int:
    """Start a rollout; with `wait`, follow it until it has ended."""
    begun = admin.send("POST", f"/v1/models/{model}/deploy", RolloutDocument, body)
    if wait:
        return follow(admin, begun, as_json)
    if as_json:
        print_json(begun)
        return 0
    settings.screen().print(view.block(begun))
    settings.screen().print(Text(f"Watch it with `forebay rollout status {model} --watch`.", "dim"), soft_wrap=True)
    return 0


def follow(admin: Admin, begun: RolloutDocument, as_json: bool) -> int:
    """Show a rollout until it has ended; returns 1 if the old revision then still serves although it should not."""
    path, screen = f"/v1/rollouts/{begun.id}", settings.screen()

    def look() -> RolloutDocument:
        return admin.get_patiently(path, RolloutDocument, AWAY_S_MAX)

    try:
        if as_json or not screen.is_terminal:
            ended = _logged_rollout(begun, look, screen, as_json)
        else:
            ended = _live_rollout(begun, look, screen)
    except KeyboardInterrupt:
        screen.print(Text(f"\nThe rollout continues: `forebay rollout status {begun.model}`."), soft_wrap=True)
        return INTERRUPTED
    except UserError as error:
        continues = f"The rollout may continue: `forebay rollout status {begun.model}`."
        raise UserError(f"{error}\n{continues}", error.exit_code) from error
    return 0 if ended.phase in WELL else 1


def _logged_rollout(
    it: RolloutDocument, look: Callable[[], RolloutDocument], screen: Console, as_json: bool
) -> RolloutDocument:
    """Print a line after every change; or, as JSON, only the result."""
    last = ""
    while True:
        line = view.line(it)
        if line != last and not as_json:
            screen.print(Text(line), soft_wrap=True)
            last = line
        if it.ended:
            if as_json:
                print_json(it)
            return it
        clock.sleep(REFRESH_S)
        it = look()


def _live_rollout(it: RolloutDocument, look: Callable[[], RolloutDocument], screen: Console) -> RolloutDocument:
    with Live(view.block(it), console=screen, auto_refresh=False) as live:
        while not it.ended:
            clock.sleep(REFRESH_S)
            it = look()
            live.update(view.block(it), refresh=True)
    return it


def status(admin: Admin, model: str | None, *, watch: bool, as_json: bool) -> int:
    """Rollouts in progress, and the last one of each model; once, or until Ctrl-C."""
    query = {"model": model} if model else {}

    def look() -> Rollouts:
        return admin.get("/v1/rollouts", Rollouts, **query)

    screen, found = settings.screen(), look()
    if not watch:
        if as_json:
            print_json(found)
        else:
            screen.print(view.blocks(found.rollouts))
        return 0
    try:
        if as_json:
            _documents(found, look)
        elif screen.is_terminal:
            _watched(found, look, screen)
        else:
            _logged(found, look, screen)
    except KeyboardInterrupt:
        return 0


def _watched(found: Rollouts, look: Callable[[], Rollouts], screen: Console) -> NoReturn:
    with Live(view.blocks(found.rollouts), console=screen, auto_refresh=False, screen=True) as live:
        while True:
            clock.sleep(REFRESH_S)
            try:
                live.update(view.blocks(look().rollouts), refresh=True)
            except UserError as error:  # control may be restarting
                live.update(Text(f"{error}\nRetrying every second; Ctrl-C quits.", "yellow"), refresh=True)


def _documents(found: Rollouts, look: Callable[[], Rollouts]) -> NoReturn:
    """Print a line of JSON for every look; why there is none goes to standard error."""
    seen: Rollouts | None = found
    while True:
        if seen is not None:
            print(msgspec.json.encode(seen).decode(), flush=True)
        clock.sleep(REFRESH_S)
        try:
            seen = look()
        except UserError as error:  # control may be restarting
            seen = None
            print(error, file=sys.stderr)


def _logged(found: Rollouts, look: Callable[[], Rollouts], screen: Console) -> NoReturn:
    """Print a line after every change."""
    said: set[str] = set()
    lines = [view.line(each) for each in found.rollouts]
    while True:
        for line in lines:
            if line not in said:
                screen.print(Text(line), soft_wrap=True)
        said = set(lines)
        clock.sleep(REFRESH_S)
        try:
            lines = [view.line(each) for each in look().rollouts]
        except UserError as error:
            lines = [str(error)]


def say(admin: Admin, target: str, command: str, why: str, as_json: bool) -> int:
    """Send a command to a rollout, given by its id or by its model."""
    id = target if ":" in target else under_way(admin, target)
    it = admin.send("POST", f"/v1/rollouts/{id}/{command}", RolloutDocument, {"why": why})
    if as_json:
        print_json(it)
    else:
        settings.screen().print(view.block(it))
    return 0


def under_way(admin: Admin, model: str) -> str:
    """The id of a model's rollout in progress. Raises `UserError` if there is none."""
    found = admin.get("/v1/rollouts", Rollouts, model=model, ended="false").rollouts
    if not found:
        raise UserError(f"No rollout of {model!r} is in progress; `forebay rollout history {model}` shows past ones.")
    return found[-1].id


def past(admin: Admin, model: str | None, last: int, as_json: bool) -> int:
    """Rollouts that have ended."""
    query = {"model": model} if model else {}
    found = admin.get("/v1/rollouts", Rollouts, ended="true", last=last, **query)
    if as_json:
        print_json(found)
    else:
        settings.screen().print(view.past(found.rollouts))
    return 0


def apply(admin: Admin, file: Path, *, dry_run: bool, as_json: bool) -> int:
    """Send a cluster file, and show what it changes. Raises `UserError` with all problems of the file."""
    read = settings.read_file(file)
    try:
        text = read.text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{read.name}: not UTF-8 text.") from None
    done = admin.send("POST", "/v1/apply", Reloaded, {"document": text, "dry_run": dry_run})
    if as_json:
        print_json(done)
        return 1 if done.problems else 0
    if done.problems:
        raise UserError("\n".join(done.problems))
    screen = settings.screen()
    if not done.changes and not done.effects:
        screen.print("Nothing to change.")
        return 0
    for change in done.changes:
        screen.print(_difference(change), soft_wrap=True)
    for effect in done.effects:
        screen.print(Text(f"{'would follow' if dry_run else 'follows'}: {effect}"), soft_wrap=True)
    if dry_run:
        screen.print(Text("Nothing was changed: this was a dry run.", "dim"))
    return 0


def _difference(change: Change) -> Text:
    if change.before == NOTHING:
        return Text(f"+ {change.path}: {change.after}", "green")
    if change.after == NOTHING:
        return Text(f"- {change.path}: {change.before}", "red")
    return Text(f"~ {change}", "yellow")


def print_json(value: object) -> None:
    """Print a document on standard output."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode(), flush=True)
