"""Loading, reloading and unloading: which versions serve when, and what is left afterwards."""

import asyncio
import shutil
from pathlib import Path

import pytest
import structlog
from tests.modelserver.models.rig import BATCH_SIZE, SAME, alive, config, numbers, serving, tensor, until, write

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.models.options import Control

ONE = tensor("IN", [[1.0]])
NUMBER = """
    def answer(self, request):
        return give(get(request) * 0 + {version})
"""
TWO = NUMBER.replace("{version}", "2")
BROKEN = """
    def initialize(self, args):
        raise ValueError("no weights here")
"""


def test_model_serves_between_load_and_unload(tmp_path: Path) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path) as server:
            assert server.ready
            assert server.states("m") == {"": ("", "")}
            with pytest.raises(Refused, match=r"^Request for unknown model: 'm' is not found$"):
                server.ask("m", ONE)
            await server.load("m", {})
            assert server.states("m") == {"1": ("READY", "")}
            view = server.view("m", "")
            assert (view.version, view.versions, view.config.name) == ("1", ["1"], "m")
            assert await server.numbers("m", ONE) == [[1.0]]
            pids = server.pids("m")
            await server.unload("m", False)
            assert not any(map(alive, pids))
            assert server.states("m") == {"1": ("UNAVAILABLE", "unloaded")}
            assert server.ready
            with pytest.raises(Refused, match=r"^Request for unknown model: 'm' has no available versions$"):
                server.ask("m", ONE)
            with pytest.raises(Refused, match=r"'m' version 1 is not at ready state$") as caught:
                server.ask("m", ONE, version="1")
            assert caught.value.kind is Kind.UNAVAILABLE
            await server.load("m", {})
            assert await server.numbers("m", ONE) == [[1.0]]

    asyncio.run(main())


def test_version_policy_selects_the_served_versions(tmp_path: Path) -> None:
    write(tmp_path, "m", config("version_policy { all {} }"), NUMBER, (1, 2, 3))
    write(tmp_path, "n", config(), NUMBER, (1, 2, 3))

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            assert list(server.states("m")) == ["1", "2", "3"]
            assert list(server.states("n")) == ["3"]
            assert await server.numbers("m", ONE) == [[3.0]]
            assert await server.numbers("m", ONE, version="2") == [[2.0]]
            with pytest.raises(Refused, match=r"'m' version 9 is not found$"):
                server.ask("m", ONE, version="9")
            await server.unload("m", False, "3")
            assert await server.numbers("m", ONE) == [[2.0]]
            assert server.states("m")["3"] == ("UNAVAILABLE", "unloaded")
            pids = server.pids("m")
            await server.load("m", {})
            assert await server.numbers("m", ONE) == [[3.0]]
            assert server.pids("m", 2) == pids

    asyncio.run(main())


def test_version_number_can_be_the_largest_int64(tmp_path: Path) -> None:
    large = 2**63 - 1
    write(tmp_path, "m", config(f"version_policy {{ specific {{ versions: {large} }} }}"), SAME, (1, large))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert server.states("m") == {str(large): ("READY", "")}
            assert await server.numbers("m", ONE, version=str(large)) == [[1.0]]
            assert server.statistics("m", str(large))[0].success.count == 1
            await server.load("m", {"version": str(large)})
            await server.unload("m", False, str(large))

    asyncio.run(main())


@pytest.mark.parametrize("as_number", [True, False])
def test_load_of_one_version_leaves_other_versions_serving(tmp_path: Path, as_number: bool) -> None:
    write(tmp_path, "m", config("version_policy { specific { versions: [1, 2, 4] } }"), NUMBER, (1, 2, 3))

    async def main() -> None:
        async with serving(tmp_path) as server:

            async def load(number: int) -> None:
                await server.load("m", {"version": number if as_number else str(number)})

            for number, why in ((3, "its version policy chooses 1, 2$"), (9, "the repository has 1, 2, 3$")):
                with pytest.raises(Refused, match=f"^version {number} of model 'm' cannot be loaded: {why}"):
                    await load(number)
            assert server.ready
            await load(2)
            assert server.states("m") == {"2": ("READY", "")}
            pids = server.pids("m", 2)
            await load(1)
            assert list(server.states("m").values()) == [("READY", "")] * 2
            await server.unload("m", False, "1")
            await load(1)
            await load(1)
            assert await server.numbers("m", ONE, version="1") == [[1.0]]
            old = server.pids("m", 1)
            write(tmp_path, "m", config("version_policy { specific { versions: [1, 2, 4] } }"), NUMBER + "\n", (1, 2))
            await load(1)
            assert (server.pids("m", 1) != old, server.pids("m", 2)) == (True, pids)
            await server.load("m", {})
            assert server.pids("m", 2) != pids

    asyncio.run(main())


def test_load_of_one_version_requires_the_configuration_of_the_loaded_ones(tmp_path: Path) -> None:
    both = "version_policy { all {} }"
    write(tmp_path, "m", config(both), NUMBER, (1, 2))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            await server.unload("m", False, "1")
            write(tmp_path, "m", config(both, max_batch=4), NUMBER, (1, 2))
            with pytest.raises(Refused, match="has a configuration that differs from its loaded versions"):
                await server.load("m", {"version": "1"})
            assert await server.numbers("m", ONE) == [[2.0]]
            for more in ({"version": "1", "config": "{}"}, *({"version": each} for each in (-1, b"1", "9" * 5000))):
                with pytest.raises(Refused, match="Load parameter 'version'"):
                    await server.load("m", more)
            await server.load("m", {})
            await server.load("m", {"version": "1"})
            assert await server.numbers("m", ONE, version="1") == [[1.0]]

    asyncio.run(main())


def test_loading_all_versions_after_a_single_one(tmp_path: Path) -> None:
    write(tmp_path, "m", config("version_policy { all {} }"), NUMBER, (1, 2))

    async def main() -> None:
        async with serving(tmp_path) as server:
            await server.load("m", {"version": "1"})
            await server.load("m", {})
            assert await server.numbers("m", ONE) == [[2.0]]

    asyncio.run(main())


def test_reload_without_changes_keeps_the_processes(tmp_path: Path) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            pids = server.pids("m")
            await server.load("m", {})
            assert server.pids("m") == pids

    asyncio.run(main())


def test_reload_switches_over_without_losing_requests(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    root = write(tmp_path / "r", "m", config(), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            gate.touch()
            old = server.pids("m")
            asked = [server.ask("m", ONE) for _ in range(4)]
            write(root, "m", config(), TWO)
            async with asyncio.TaskGroup() as tasks:
                loading = tasks.create_task(server.load("m", {}))
                await until("the new one serves", lambda: server.pids("m") != old)
                assert await server.numbers("m", ONE) == [[2.0]]
                assert not loading.done()
                assert all(map(alive, old))
                gate.unlink()
            assert not any(map(alive, old))
            assert [numbers(await each.one()) for each in asked] == [[[1.0]]] * 4

    asyncio.run(main())


def test_failed_reload_leaves_the_old_version_serving(tmp_path: Path) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            pids = server.pids("m")
            write(tmp_path, "m", config(), BROKEN)
            with pytest.raises(
                Refused, match=r"^load failed for model 'm': version 1 is at UNAVAILABLE state: "
            ) as no:
                await server.load("m", {})
            assert "no weights here" in no.value.text
            write(tmp_path, "m", "max_batch_size: many")
            with pytest.raises(Refused, match=r"^load failed for model 'm'"):
                await server.load("m", {})
            assert server.pids("m") == pids
            assert await server.numbers("m", ONE) == [[1.0]]
            assert server.ready

    asyncio.run(main())


def test_failed_startup_model_reports_the_reason_and_makes_the_server_not_ready(tmp_path: Path) -> None:
    write(tmp_path, "bad", config(), BROKEN)
    write(tmp_path, "worse", "max_batch_size: many")
    write(tmp_path, "none", config("version_policy { specific { versions: [7] } }"))
    write(tmp_path, "good", config())

    async def main() -> None:
        async with serving(tmp_path, control=Control.NONE) as server:
            assert len(await server.started()) == 3
            assert not server.ready
            assert await server.numbers("good", ONE) == [[1.0]]
            state, reason = server.states("bad")["1"]
            assert state == "UNAVAILABLE"
            assert "no weights here" in reason
            assert "max_batch_size" in server.states("worse")[""][1]
            assert "at least one version must be available" in server.states("none")[""][1]
            assert [entry.name for entry in server.index(True)] == ["good"]
            with pytest.raises(Refused, match=r"explicit model load / unload is not allowed if polling is enabled"):
                await server.load("good", {})
            with pytest.raises(Refused, match=r"explicit model load / unload is not allowed if polling is enabled"):
                await server.unload("good", False)
        async with serving(tmp_path, control=Control.NONE, strict_readiness=False) as server:
            assert server.ready

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "parameters", "shown"),
    [
        ("worse", {}, True),
        ("nobody", {"config": "{}"}, False),
        ("once", {"config": '{"max_batch_size": "many"}'}, True),
    ],
)
def test_rejected_load_request_leaves_the_server_ready(
    tmp_path: Path, name: str, parameters: dict[str, str | bytes | int | bool], shown: bool
) -> None:
    write(tmp_path, "worse", "max_batch_size: many")
    write(tmp_path, "once", config())
    write(tmp_path, "good", config())

    async def main() -> None:
        async with serving(tmp_path, startup=("good", "once")) as server:
            await server.unload("once", False)
            for _ in range(2):
                with pytest.raises(Refused, match="load failed for model"):
                    await server.load(name, parameters)
                assert server.ready
                assert (name in {entry.name for entry in server.index(False)}) == shown
        async with serving(tmp_path, startup=("good", "worse")) as server:
            with pytest.raises(Refused, match="load failed for model"):
                await server.load("worse", {})
            assert not server.ready, "it was to be served from the start"

    asyncio.run(main())


def test_changed_instance_count_scales_without_reload(tmp_path: Path) -> None:
    write(tmp_path, "m", config("instance_group { count: 1 kind: KIND_CPU }"))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            (first,) = server.pids("m")
            write(tmp_path, "m", config("instance_group { count: 3 kind: KIND_CPU }"), versions=())
            await server.load("m", {})
            assert first in server.pids("m")
            assert len(server.pids("m")) == 3
            assert server.view("m", "").document["instance_group"][0]["count"] == 3
            assert await server.numbers("m", ONE) == [[1.0]]
            write(tmp_path, "m", config("instance_group { count: 1 kind: KIND_CPU }"), versions=())
            await server.load("m", {})
            await until("the others are gone", lambda: server.pids("m") == [first])
            assert server.statistics("m", "")[0].success.count == 1

    asyncio.run(main())


def test_load_request_can_override_configuration_and_files(tmp_path: Path) -> None:
    write(tmp_path, "m", config())
    override = '{"backend": "python", "max_batch_size": 2, "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}], "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}]}'  # noqa: E501
    source = (
        (tmp_path / "m" / "1" / "model.py").read_bytes().replace(b"give(get(request))", b"give(get(request) + 5)")
    )

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            await server.load("m", {"config": override})
            assert server.view("m", "").config.max_batch == 2
            assert await server.numbers("m", ONE) == [[1.0]]
            await server.load("m", {"config": override, "file:4/model.py": source})
            assert await server.numbers("m", ONE, version="4") == [[6.0]]
            assert list(server.view("m", "").versions) == ["4"]
            await server.load("new", {"config": override, "file:1/model.py": source})
            assert await server.numbers("new", ONE) == [[6.0]]
            await server.load("m", {})
            assert server.view("m", "").config.max_batch == 8
            assert await server.numbers("m", ONE) == [[1.0]]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "parameters", "text"),
    [
        ("", {}, "Model name cannot be empty. Please enter a valid name to deploy."),
        ("..", {}, "invalid model name '..', model name must not contain path traversal characters"),
        ("a/b", {}, "invalid model name 'a/b', model name must not contain path traversal characters"),
        ("nobody", {}, "failed to load 'nobody', failed to poll from model repository"),
        ("m", {"colour": 3}, "Unrecognized load parameter 'colour' with type 'INT'"),
        ("m", {"config": 3}, "Config parameter 'config' must have string type for its value"),
        ("m", {"file:1/x": "y"}, "File parameter 'file:1/x' must have bytes type for its value"),
        ("m", {"file:1/x": b"y"}, "Load parameter 'config' must be specified for model file override"),
    ],
)
def test_an_invalid_load_request_is_rejected(
    tmp_path: Path, name: str, parameters: dict[str, str | bytes | int | bool], text: str
) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path) as server:
            with pytest.raises(Refused) as caught:
                await server.load(name, parameters)
            assert caught.value.text == text
            await server.unload("nobody", False)

    asyncio.run(main())


def test_poll_mode_follows_repository_changes(tmp_path: Path) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path, control=Control.POLL, poll_s=0.02) as server:
            assert await server.numbers("m", ONE) == [[1.0]]
            old = server.pids("m")
            write(tmp_path, "n", config(), TWO)
            await until("added", lambda: server.states("n").get("1") == ("READY", ""))
            assert server.pids("m") == old
            write(tmp_path, "m", config(), TWO)
            await until("changed", lambda: server.pids("m") != old)
            assert await server.numbers("m", ONE) == [[2.0]]
            (tmp_path / "n").rename(tmp_path.parent / f"{tmp_path.name}-gone")
            await until("gone", lambda: not server.states("n"))

    asyncio.run(main())


STARTS = """
    def initialize(self, args):
        import subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        more = "import subprocess, sys, time; "
        more += "print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid, flush=True); time.sleep(600)"
        apart = subprocess.Popen(
            [sys.executable, "-c", more, *sleep], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        pids = [subprocess.Popen(sleep).pid, apart.pid, int(apart.stdout.readline())]
        Path({seen!r}).write_text(" ".join(map(str, pids)))
    def answer(self, request):
        os.abort()
"""


@pytest.mark.parametrize("crash", [False, True])
def test_processes_started_by_a_model_end_with_it(tmp_path: Path, crash: bool) -> None:
    seen = tmp_path / "seen"
    write(tmp_path, "m", config(), STARTS.format(seen=str(seen)))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            started = [int(pid) for pid in seen.read_text().split()]
            assert len(started) == 3
            assert all(map(alive, started))
            if crash:
                refused = await server.ask("m", ONE).error()
                assert refused.kind is Kind.UNAVAILABLE
            else:
                await server.unload("m", False)
            await until("gone", lambda: not any(map(alive, started)))

    asyncio.run(main())


def test_missing_repository_leaves_loaded_models_serving(tmp_path: Path) -> None:
    root = write(tmp_path / "r", "m", config())

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            root.rename(tmp_path / "moved")
            with pytest.raises(Refused, match=r"^failed to load 'm', failed to poll from model repository: No such"):
                await server.load("m", {})
            assert server.states("m") == {"1": ("READY", "")}
            assert await server.numbers("m", ONE) == [[1.0]]

    asyncio.run(main())


@pytest.mark.parametrize("way", ["removed", "succeeded"])
def test_failed_version_no_longer_affects_readiness_once_removed_or_superseded(tmp_path: Path, way: str) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            write(tmp_path, "m", config(), "    no Python", versions=(2,))
            with pytest.raises(Refused, match="SyntaxError"):
                await server.load("m", {})
            assert not server.ready
            assert await server.numbers("m", ONE) == [[1.0]]
            if way == "removed":
                shutil.rmtree(tmp_path / "m/2")
            else:
                write(tmp_path, "m", config(), versions=(3,))
            await server.load("m", {})
            assert server.ready
            assert server.states("m")["2"] == ("UNAVAILABLE", "unloaded")

    asyncio.run(main())


def test_git_lfs_pointer_files_are_named_in_the_load_error(tmp_path: Path) -> None:
    (tmp_path / "m/1/data").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text('backend: "onnxruntime"')
    for name in ("model.onnx", "data/weights.bin"):
        (tmp_path / "m/1" / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")

    async def main() -> None:
        async with serving(tmp_path) as server:
            with pytest.raises(Refused, match=r"\(`git lfs pull`\): data/weights\.bin, model\.onnx"):
                await server.load("m", {})

    asyncio.run(main())


def test_unsupported_model_outputs_are_logged(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, floats, ["n"]) for name in "XY")
    many = helper.make_tensor_sequence_value_info("MANY", floats, None)
    nodes = [helper.make_node("Identity", ["X"], ["Y"]), helper.make_node("SequenceConstruct", ["X"], ["MANY"])]
    graph = helper.make_graph(nodes, "g", [x], [many, y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, str(tmp_path / "part.onnx"))
    heard = structlog.testing.LogCapture()

    async def main() -> None:
        async with serving(tmp_path, log=structlog.wrap_logger(None, processors=[heard]), startup=("part",)):
            (told,) = [each for each in heard.entries if each["event"] == "outputs of the model cannot be served"]
            assert (told["model"], "'MANY'" in str(told["omitted"])) == ("part", True)

    asyncio.run(main())


def test_bare_model_files_hidden_by_a_model_folder_are_logged(tmp_path: Path) -> None:
    (tmp_path / "left.onnx").write_bytes(b"no model")
    heard = structlog.testing.LogCapture()

    async def main() -> None:
        log = structlog.wrap_logger(None, processors=[heard])
        async with serving(tmp_path, log=log, control=Control.POLL, poll_s=0.02) as server:
            assert list(server.states("left")) == ["1"]
            write(tmp_path, "m", config())
            await until("it serves", lambda: server.states("m").get("1") == ("READY", ""))
        (told,) = [each for each in heard.entries if each["event"].startswith("model files are no longer served")]
        assert told["models"] == ["left"]

    asyncio.run(main())


def test_pinned_model_in_no_repository_is_logged(tmp_path: Path) -> None:
    write(tmp_path, "here", config())
    heard = structlog.testing.LogCapture()

    async def main() -> None:
        log = structlog.wrap_logger(None, processors=[heard])
        async with serving(tmp_path, log=log, pinned=frozenset({"here", "hear"})):
            assert [each["model"] for each in heard.entries if "--pin" in each["event"]] == ["hear"]

    asyncio.run(main())
