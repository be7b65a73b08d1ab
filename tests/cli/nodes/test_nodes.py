"""`forebay nodes`, `drain` and `undrain` against a scripted API: what is sent and printed, and the hints."""

import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from tests.cli.deploy.test_commands import Api, api, refused, run

from forebay.cli.nodes import view, work
from forebay.control.api.documents import NodeDocuments
from forebay.control.health.documents import DeviceStanding, NodeStanding
from forebay.control.placing.rows import PlacedDevice, PlacedNode, PlacedReplica

__all__ = ["api"]
GPU = DeviceStanding(
    device="GPU-a", index=0, name="NVIDIA H100", parent="", profile="", state="healthy", why="", since=0.0,
    remedy="ignore", calm_at=0.0, weight=1.0, lost=False, memory_bytes=80 * 1024**3, memory_used_bytes=1024**3,
    duty=0.42, temperature_c=61.0, power_w=310.0, clock_mhz=1980.0, clock_max_mhz=1980.0, throttles=(),
    ecc_errors=0, remap_pending=False, remap_failed=False, replicas=("chat-0",),
)  # fmt: skip
SICK = replace(
    GPU, device="GPU-b", state="quarantined", remedy="reset", why="XID 79: has fallen off the bus", lost=True
)
SLOW = replace(
    GPU, device="GPU-c", state="degraded", weight=0.6, why="runs at 60% of its clock: heat", throttles=("heat",)
)
BROKEN = replace(SICK, device="GPU-d", remedy="replace", why="XID 64", lost=False)
RESTING = replace(SICK, device="GPU-e", state="draining", why="XID 74", calm_at=1000.0, lost=False)
TRIED = replace(RESTING, device="GPU-f", state="recovering", why="it was reset")
UNKNOWN = replace(
    GPU, device="MIG-1", parent="GPU-a", profile="1g.10gb", memory_bytes=None, duty=None, temperature_c=None,
    power_w=None, clock_mhz=None, replicas=(),
)  # fmt: skip
NODE = NodeStanding(
    name="a", state="serving", why="", by="", since=0.0, trouble="", replicas=("chat-0", "chat-1"),
    devices=(GPU, SICK, SLOW, BROKEN, RESTING, TRIED, UNKNOWN),
)  # fmt: skip
DRAINING = replace(NODE, state="draining", since=1000.0, by="ada", why="new fans", trouble="no driver", devices=())
PLACED = PlacedNode(
    name="a", fallback=True, barred="", labels=("fast",), cpus=(0, 1, 2, 3), memory_bytes=16 * 1024**3,
    memory_taken_bytes=4 * 1024**3, devices=(),
    replicas=(
        PlacedReplica("chat-0", 1, (), (), 2 * 1024**3, 3 * 1024**3, leaves=False, why=""),
        PlacedReplica("chat-1", 1, (), (), 2 * 1024**3, 0, leaves=False, why="b has 1 GiB free"),
    ),
)  # fmt: skip
DRAINED = replace(DRAINING, state="drained", replicas=())


@pytest.fixture(autouse=True)
def swift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "REFRESH_S", 0.0)


def shown(*nodes: NodeStanding) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(view.blocks(NodeDocuments(nodes, (PLACED,), {"big-0": "a: GPU-a has 12 GiB free, 16 needed"})))
    return capture.get()


def test_every_device_is_shown_with_its_problem_and_remedy() -> None:
    text = shown(NODE, DRAINING)
    for words in (
        "GPU-a    healthy      NVIDIA H100  1.0/80.0 GiB   42%  61 °C  310 W",
        "GPU-b: XID 79: has fallen off the bus; serves again after a reset of the GPU or its machine",
        "1980 MHz (heat)    0.60",
        "GPU-d: XID 64; serves again after `forebay undrain a --device GPU-d`",
        "GPU-e: XID 74; returns to service at 1970-01-01 00:16:40 UTC unless there is another error",
        "GPU-f: it was reset; on probation until 1970-01-01 00:16:40 UTC",
        "1.0/? GiB     ?      ?      ?",
        "a  draining",
        "by ada, 1970-01-01 00:16:40 UTC: new fans",
        "its devices cannot be read: no driver",
        "replicas: chat-0, chat-1",
        "memory: 4.0 of 16.0 GiB taken, 3.0 used; cores: 4; only for low-priority models; fast",
        "chat-1 should be elsewhere: b has 1 GiB free",
        "big-0 waits: a: GPU-a has 12 GiB free, 16 needed",
    ):
        assert words in text, text
    assert "replicas: none" in shown(DRAINED)


def test_gpus_without_readings_are_shown_with_their_replicas() -> None:
    declared = tuple(PlacedDevice(id, "GPU 0", "H100", "", 80 * 1024**3, 0, 0, "") for id in ("GPU-a", "GPU-x"))
    replica = replace(PLACED.replicas[0], devices=("GPU-x",))
    placed = replace(PLACED, devices=declared, replicas=(replica,))
    console = Console(width=200, force_terminal=False)
    for node, count in ((NODE, 1), (replace(NODE, devices=()), 2)):
        with console.capture() as capture:
            console.print(view.block(node, placed))
        assert capture.get().count("no readings") == count
        row = next(line for line in capture.get().splitlines() if "GPU-x" in line)
        assert row.split() == ["GPU-x", "no", "readings", "H100", "?/80.0", "GiB", *"?????", "chat-0"]


def test_nodes_are_shown_as_table_or_json(api: Api) -> None:
    api.answers["GET /v1/nodes"] = [(200, NodeDocuments((NODE,)))]
    assert "GPU-a" in run("nodes").stdout
    assert msgspec.json.decode(run("nodes", "--json").stdout, type=NodeDocuments) == NodeDocuments((NODE,))


def test_drain_sends_its_options_and_waits_until_the_node_is_empty(api: Api) -> None:
    api.answers["POST /v1/nodes/a/drain"] = [(200, DRAINING)]
    fewer = replace(DRAINING, replicas=("chat-1",))
    api.answers["GET /v1/nodes"] = [(200, NodeDocuments((each, NODE))) for each in (DRAINING, fewer, DRAINED)]
    done = run("drain", "a", "--why", "new fans", "--force", "--wait")

    assert done.exit_code == 0, done.output
    assert api.asked[0][2] == {"why": "new fans", "force": True}
    assert "a: chat-0, chat-1 still running" in done.stderr
    assert "a: chat-1 still running" in done.stderr
    assert "a  drained" in done.stdout
    assert msgspec.json.decode(run("drain", "a", "--json").stdout, type=NodeStanding) == DRAINING


def test_drain_waits_while_the_cluster_does_not_answer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cli.deploy.client.AGAIN_S", 0.0)
    down = (503, {"error": {"message": "The cluster is stopping.", "code": "draining"}})
    api.answers["POST /v1/nodes/a/drain"] = [(200, DRAINING)]
    api.answers["GET /v1/nodes"] = [down, down, (200, NodeDocuments((DRAINED,)))]

    assert run("drain", "a", "--wait").exit_code == 0
    api.answers["GET /v1/nodes"] = [down]
    assert "is stopping" in str(refused("drain", "a", "--wait", "--timeout", "0"))


STUCK = NodeDocuments((DRAINING,), (PLACED,))


def test_forced_drain_reports_stuck_replicas_and_times_out(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("forebay.cli.nodes.work.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("forebay.cli.nodes.work.time.sleep", lambda _: clock.__setitem__(0, clock[0] + 20.0))
    api.answers["POST /v1/nodes/a/drain"] = [(200, DRAINING)] * 3
    api.answers["GET /v1/nodes"] = [(200, STUCK)] * 20
    done = run("drain", "a", "--force", "--wait", "--timeout", "70")

    assert done.exit_code == work.NOT_EMPTY, done.output
    assert done.stderr.splitlines() == [
        "a: chat-0, chat-1 still running",
        "  chat-1: b has 1 GiB free",
        "a after 40 s: chat-0, chat-1 still running",
        "  chat-1: b has 1 GiB free",
        "a after 80 s: chat-0, chat-1 still running",
        "  chat-1: b has 1 GiB free",
        "a is not empty after 70 s: chat-0, chat-1 still running; it continues to drain",
    ]
    assert "a  draining" in done.stdout
    done = run("drain", "a", "--force", "--wait", "--timeout", "0", "--json")
    assert (done.exit_code, done.stderr) == (work.NOT_EMPTY, "")
    assert msgspec.json.decode(done.stdout, type=NodeStanding) == DRAINING


def test_drain_shows_progress_on_a_terminal(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr("forebay.cli.settings.screen", lambda stderr=False: console)
    api.answers["POST /v1/nodes/a/drain"] = [(200, DRAINING)]
    api.answers["GET /v1/nodes"] = [(200, each) for each in (STUCK, STUCK, NodeDocuments((DRAINED,)))]
    with console.capture() as shown:
        done = run("drain", "a", "--force", "--wait")

    assert done.exit_code == 0, done.output
    assert shown.get().count("chat-1: b has 1 GiB free") == 1
    assert "a drains" in shown.get()


def test_a_timeout_needs_wait(api: Api) -> None:
    assert "--timeout needs --wait" in str(refused("drain", "a", "--timeout", "3"))
    assert api.asked == []


def test_ctrl_c_while_waiting_leaves_the_node_draining(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    api.answers["POST /v1/nodes/a/drain"] = [(200, DRAINING)]
    api.answers["GET /v1/nodes"] = [(200, NodeDocuments((DRAINING,)))]
    monkeypatch.setattr("forebay.cli.nodes.work.time.sleep", interrupted)
    done = run("drain", "a", "--wait")
    assert done.exit_code == 130
    assert "a is still draining" in done.stderr


def test_undrain_accepts_a_node_or_a_device(api: Api) -> None:
    api.answers["POST /v1/nodes/a/undrain"] = [(200, NODE)]
    assert run("undrain", "a").exit_code == 0
    assert run("undrain", "a", "--device", "GPU-b", "--why", "reseated", "--json").exit_code == 0
    assert [asked[2] for asked in api.asked] == [{"why": ""}, {"why": "reseated", "device": "GPU-b"}]


def test_rejected_drain_shows_the_capacity_calculation(api: Api) -> None:
    message = "a is not drained: what runs there fits nowhere else\n  chat-0: needs 16 GiB, b has 12"
    api.answers["POST /v1/nodes/a/drain"] = [(409, {"error": {"message": message, "code": "conflict"}})]
    assert "chat-0: needs 16 GiB, b has 12" in str(refused("drain", "a"))
