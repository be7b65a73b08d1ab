"""Tables on narrow terminals: text wraps, and nothing is cut off."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
from rich.console import Console, RenderableType
from rich.table import Table
from tests.cli.deploy.test_commands import ROLLOUT

from forebay.cli.deploy.view import past
from forebay.cli.registry.work import SPARE, listing
from forebay.cli.view.status import view
from forebay.cli.view.table import Fitting, table
from forebay.control.status import ModelStatus, ReplicaStatus, Status, UnitStatus
from forebay.core.model import ReplicaState, Task
from forebay.core.registry.approval import ApprovalState, Standing
from forebay.registry.catalogue import Listed
from forebay.registry.proved import Revision

NAMES = ("recommender-large-0", "recommender-large-1")


def printed(shown: RenderableType, width: int) -> str:
    console = Console(width=width, file=StringIO())
    console.print(shown)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cluster() -> Status:
    def replica(id: str, state: ReplicaState) -> ReplicaStatus:
        return ReplicaStatus(
            id, 1, 1234567, "http://127.0.0.1:8100", state, "", 1.0, 0, None, "", "recommender-large", "r-4c1f09aa",
            engine_pid=3, engine_restarts=0, in_flight=3, running=3, waiting=0, capacity=16,
            kv_used_tokens=10, kv_total_tokens=100, batch_fill=0.3,
        )  # fmt: skip

    replicas = tuple(map(replica, NAMES, (ReplicaState.READY, ReplicaState.QUARANTINED)))
    gateway = UnitStatus("gateway-0", 1, 7, "http://127.0.0.1:8080", ReplicaState.READY, "", 1.0, 0, None, "")
    model = ModelStatus("recommender-large", "chat", "openvino", "s", "r-4c1f09aa", {}, 1, 2, replicas)
    return Status("prod", "0.1.0", 1, True, "run", "", "http://127.0.0.1:8080", (gateway,), (model,))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_status_has_names_states_and_revisions_on_narrow_terminals(width: int) -> None:
    shown = printed(view(cluster()), width)

    for words in (*NAMES, "quarantined", "gateway-0", "r-4c1f09aa", "1/2 ready"):
        assert words in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


def test_status_has_all_columns_where_they_fit() -> None:
    shown = printed(view(cluster()), 120)

    for words in ("3/16", "10%", "1234567", "127.0.0.1:8100", "openvino"):
        assert words in shown


def test_brackets_in_a_cell_are_printed() -> None:
    shown = table("why")
    shown.add_row("[canary] as in [/var/log]")

    assert "[canary] as in [/var/log]" in printed(shown, 80)


def test_columns_are_left_out_in_the_given_order_until_the_rest_fits() -> None:
    def make(without: Collection[str]) -> Table:
        shown = table(*(name for name in ("a", "b", "c") if name not in without))
        shown.add_row(*["x" * 10] * len(shown.columns))
        return shown

    def headers(width: int) -> list[str]:
        return printed(Fitting(make, ("c", "b")), width).splitlines()[0].split()

    assert [headers(width) for width in (40, 30, 26, 20, 5)] == [
        ["a", "b", "c"],
        ["a", "b"],
        ["a", "b"],
        ["a"],
        ["a"],
    ]


def test_text_wraps_and_whole_columns_do_not() -> None:
    shown = table("id", "of", whole=("id",))
    shown.add_row("0123456789", "somebody@example.com")
    lines = printed(shown, 24).splitlines()[1:]

    assert lines[0].startswith("0123456789  ")
    assert "".join(line[12:].strip() for line in lines) == "somebody@example.com"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_ids_of_revisions_are_in_one_piece_on_narrow_terminals(width: int) -> None:
    revision = Revision("chat", "r-8ca3345e", "a" * 64, "b" * 64, Task.CHAT, "synthetic", {}, "./m", 1.0, "somebody")
    made = Listed(revision, Standing(ApprovalState.APPROVED), ("champion", "stable"), 1_500_000)
    shown = printed(Fitting(partial(listing, (made,)), SPARE), width)

    assert "r-8ca3345e" in shown
    assert max(map(len, shown.splitlines())) <= width
    assert ("synthetic" in shown) == (width == 120)


@pytest.mark.parametrize("width", [80, 120])
def test_history_of_rollouts_has_ids_in_one_piece(width: int) -> None:
    shown = printed(past((replace(ROLLOUT, why="5 x server_error of the canary within 30 s"),)), width)

    for id in ("chat:3", "r-0000aaaa", "r-1111bbbb"):
        assert id in shown
