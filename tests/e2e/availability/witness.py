"""Records the requests that replicas accept: this file is a node's launcher and runs before a replica's command.

`python witness.py NOTES COMMAND…` runs the worker of that command and appends a line to NOTES for each request that
it accepts: the replica, its generation, and the request's id. Lines of all replicas are in order."""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.core.model import WorkerSpec
from forebay.net.exchange import Exchange
from forebay.worker.__main__ import main
from forebay.worker.shell import Shell


class Taken(NamedTuple):
    """A request that a replica has taken on."""

    replica: str
    generation: int
    request: str


def observed(node: dict[str, Any], notes: Path) -> dict[str, Any]:
    """A node of a cluster file, whose replicas write down what they take."""
    return node | {"launcher": [*node.get("launcher", ()), sys.executable, str(Path(__file__).resolve()), str(notes)]}


def taken(notes: Path) -> list[Taken]:
    """What all replicas have taken on, in order."""
    lines = [line.split(" ") for line in notes.read_text().splitlines()]
    return [Taken(replica, int(generation), request) for replica, generation, request in lines]


def twice(all_taken: list[Taken]) -> list[Taken]:
    """What two generations of a replica took, and what one took when the next one had begun."""
    newest, first, found = dict[str, int](), dict[tuple[str, str], int](), []
    for each in all_taken:
        newest[each.replica] = max(each.generation, newest.get(each.replica, 0))
        begun = first.setdefault((each.replica, each.request), each.generation)
        if each.generation != newest[each.replica] or each.generation != begun:
            found.append(each)
    return found


def _write_down(notes: Path, spec: WorkerSpec) -> None:
    """From now on every request that this process takes on is noted."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    who, handle = b"%b %d" % (spec.replica.encode(), spec.generation), Shell.handle

    def noted(shell: Shell, exchange: Exchange) -> None:
        handle(shell, exchange)
        if exchange.method == b"POST" and not exchange.finished:  # a refusal is given at once
            os.write(file, b"%b %b\n" % (who, exchange.header(b"x-request-id") or b"-"))

    # The witness has to sit in the worker's own process: no setting of the product needs that.
    Shell.handle = noted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    _write_down(Path(sys.argv[1]), msgspec.json.decode(Path(sys.argv[-1]).read_bytes(), type=WorkerSpec))
    sys.exit(main(sys.argv[-1:]))
