"""Resources shared by models: memory with eviction, and rate limiter resources."""

import asyncio
import gc
import os
import signal
import weakref
from pathlib import Path

import numpy as np
import pytest
from tests.modelserver.models.rig import (
    BATCH_SIZE,
    IO,
    Server,
    alive,
    children,
    config,
    ensemble,
    numbers,
    serving,
    tensor,
    until,
    write,
)

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.limiter import Amount
from forebay.core.serving.values import InferRequest, Tensor
from forebay.modelserver.models.life.memory import used_bytes
from forebay.modelserver.models.running.wake_queue import FAILURES_MAX

ONE = tensor("IN", [[1.0]])
HEAVY = """
    def initialize(self, args):
        self.weights = np.ones(120 * 2**20, dtype=np.uint8)
    def answer(self, request):
        return give(get(request))
"""
MIB = 2**20


def test_least_recently_used_model_is_evicted_and_reloaded_on_request(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, config(), HEAVY)

    async def main() -> None:
        async with serving(tmp_path, startup=("a", "b"), memory_bytes=400 * MIB) as server:
            assert 130 * MIB < used_bytes(server.pids("a")) < 200 * MIB
            assert await server.numbers("b", ONE) == [[1.0]]
            assert await server.numbers("a", ONE) == [[1.0]]
            (slept,) = server.pids("b")
            await server.load("c", {})
            assert not alive(slept)
            assert (server.pids("b"), len(server.pids("a")), len(server.pids("c"))) == ([], 1, 1)
            assert server.ready
            assert server.states("b") == {"1": ("READY", "")}
            asked = [server.ask("b", ONE) for _ in range(3)]
            assert [numbers(await each.one()) for each in asked] == [[[1.0]]] * 3
            assert (len(server.pids("b")), len(server.pids("a"))) == (1, 0)
            assert server.statistics("b", "")[0].success.count == 4
            await server.unload("a", False)
            assert server.states("a") == {"1": ("UNAVAILABLE", "unloaded")}

    asyncio.run(main())


@pytest.mark.parametrize("by", ["the operator", "its parameter"])
def test_busy_and_pinned_models_are_not_evicted(tmp_path: Path, by: str) -> None:
    gate = tmp_path / "gate"
    root = write(tmp_path / "r", "a", config(), HEAVY)
    write(root, "b", config(), HEAVY + BATCH_SIZE.format(gate=str(gate)))
    write(root, "c", config(), HEAVY)
    pinned = frozenset({"a"})
    if by == "its parameter":
        write(root, "a", config('parameters { key: "forebay.pinned" value { string_value: "True" } }'), versions=())
        pinned = frozenset()

    async def main() -> None:
        async with serving(root, startup=("a", "b"), memory_bytes=400 * MIB, turn_s=0.0, pinned=pinned) as server:
            gate.touch()
            asked = server.ask("b", ONE)
            async with asyncio.TaskGroup() as tasks:
                load = tasks.create_task(server.load("c", {}))
                await until("its size is known", lambda: server.itself._memory._queue)
                assert (len(server.pids("a")), len(server.pids("b"))) == (1, 1)
                assert not load.done()
                gate.unlink()
            assert numbers(await asked.one()) == [[1.0]]
            assert (len(server.pids("a")), server.pids("b"), len(server.pids("c"))) == (1, [], 1)
            gate.touch()
            busy = server.ask("c", ONE)
            assert numbers(await busy.one()) == [[1.0]]
            cancelled = server.ask("b", ONE)
            assert cancelled.call is not None
            cancelled.call.cancel()
            await until("b is back", lambda: server.pids("b"))
            gate.unlink()

    asyncio.run(main())


def test_eviction_leaks_no_file_descriptors(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, config("dynamic_batching { max_queue_delay_microseconds: 2000 }"), HEAVY)

    async def main() -> None:
        async with serving(tmp_path, startup=("a",), memory_bytes=250 * MIB) as server:
            counts = []
            for _ in range(4):
                await server.load("b", {})
                assert server.pids("a") == []
                await server.unload("b", False)
                assert await server.numbers("a", ONE) == [[1.0]]
                counts.append(len(os.listdir("/proc/self/fd")))
            assert counts[-1] <= counts[0]

    asyncio.run(main())


def test_an_evicted_model_is_reloaded_when_memory_is_free(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, config(), HEAVY)

    async def main() -> None:
        async with serving(tmp_path, startup=("a", "b"), memory_bytes=400 * MIB) as server:
            assert await server.numbers("a", ONE) == [[1.0]]
            await server.load("c", {})
            assert server.pids("b") == []
            await server.unload("c", False)
            await until("b is awake", lambda: server.pids("b"))
            assert await server.numbers("b", ONE) == [[1.0]]
            assert len(server.pids("a")) == 1

    asyncio.run(main())


def test_concurrent_and_cancelled_requests_reload_an_evicted_model_once(tmp_path: Path) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    loads = f"""
    def initialize(self, args):
        self.weights = np.ones(120 * 2**20, dtype=np.uint8)
        with open({str(tmp_path / "loads")!r}, "a") as file:
            file.write("x")
        while Path({str(gate)!r}).exists():
            time.sleep(0.001)
    def answer(self, request):
        return give(get(request))
"""
    write(root, "a", config(), loads)
    for name in ("b", "c"):
        write(root, name, config(), HEAVY)

    async def main() -> None:
        async with serving(root, startup=("a", "b"), memory_bytes=400 * MIB) as server:
            assert await server.numbers("b", ONE) == [[1.0]]
            await server.load("c", {})
            assert server.pids("a") == []
            gate.touch()
            for _ in range(3):
                gone = server.ask("a", ONE)
                await until("it loads", lambda: server.pids("a"))
                assert gone.call is not None
                gone.call.cancel()
            asked = server.ask("a", ONE)
            gate.unlink()
            assert numbers(await asked.one()) == [[1.0]]
            assert len(server.pids("a")) == 1
            assert (tmp_path / "loads").read_text() == "xx"

    asyncio.run(main())


def test_failed_reload_of_an_evicted_model_reports_the_reason(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, config(), HEAVY)

    async def main() -> None:
        async with serving(tmp_path, startup=("a", "b", "c"), memory_bytes=400 * MIB) as server:
            (asleep,) = (name for name in ("a", "b", "c") if not server.pids(name))
            write(tmp_path, asleep, config(), "    def initialize(self, args):\n        raise ValueError('moth')\n")
            for _ in range(FAILURES_MAX):
                assert server.states(asleep) == {"1": ("READY", "")}
                refused = await server.ask(asleep, ONE).error()
                assert refused.kind is Kind.UNAVAILABLE
                assert "moth" in refused.text
            assert "moth" in server.states(asleep)["1"][1]
            write(tmp_path, asleep, config(), HEAVY)
            await server.load(asleep, {})
            assert await server.numbers(asleep, ONE) == [[1.0]]

    asyncio.run(main())


def test_rate_limiter_shares_a_resource_between_instances(tmp_path: Path) -> None:
    gates = {name: tmp_path / f"gate-{name}" for name in "ab"}
    group = 'instance_group { count: 2 kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } } }'
    root = tmp_path / "r"
    for name, gate in gates.items():
        write(root, name, config(group), BATCH_SIZE.format(gate=str(gate)))
    write(root, "greedy", config(group.replace("count: 1", "count: 5")))

    async def main() -> None:
        options = {"limited": True, "amounts": (Amount("R", 1),)}
        async with serving(root, startup=("a", "b"), **options) as server:
            gates["a"].touch()
            asked = [server.ask(name, ONE) for name in ("a", "a", "b", "b")]
            await until("one runs", lambda: server.statistics("a", "")[0].pending == 1)
            assert server.statistics("b", "")[0].pending == 2
            gates["a"].unlink()
            assert [numbers(await each.one()) for each in asked] == [[[1.0]]] * 4
            assert await server.numbers("b", ONE) == [[1.0]]
            with pytest.raises(Refused, match="greedy"):
                await server.load("greedy", {})
            await server.unload("a", False)
            assert await server.numbers("b", ONE) == [[1.0]]

    asyncio.run(main())


def test_rate_limiter_gives_turns_by_priority(tmp_path: Path) -> None:
    gate, order, root = tmp_path / "gate", tmp_path / "order", tmp_path / "r"
    source = f"""
    def answer(self, request):
        with open({str(order)!r}, "a") as file:
            file.write(get_name())
        while Path({str(gate)!r}).exists():
            time.sleep(0.001)
        return give(get(request))

def get_name():
    return Path(pb_utils.get_model_dir()).parent.name
"""
    for name, priority in (("a", 1), ("b", 3)):
        limiter = f'rate_limiter {{ priority: {priority} resources {{ name: "R" count: 1 }} }}'
        write(root, name, config(f"instance_group {{ kind: KIND_CPU {limiter} }}"), source)

    async def main() -> None:
        async with serving(root, startup=("a", "b"), limited=True, amounts=(Amount("R", 1),)) as server:
            gate.touch()
            asked = [server.ask(name, ONE) for name in "ab" * 9]
            await until("one runs", order.exists)
            gate.unlink()
            for each in asked:
                await each.one()
            assert order.read_text()[:12].count("a") == 9

    asyncio.run(main())


def test_an_instance_whose_process_is_replaced_does_not_hold_resources(tmp_path: Path) -> None:
    loads, gate, root = tmp_path / "loads", tmp_path / "gate", tmp_path / "r"
    starts = f"""
    def initialize(self, args):
        while Path({str(loads)!r}).exists():
            time.sleep(0.001)
    def answer(self, request):
        return give(get(request))
"""
    group = 'instance_group { kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } } }'
    write(root, "a", config(group), starts)
    write(root, "b", config(group), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("a", "b"), limited=True, amounts=(Amount("R", 1),)) as server:
            gate.touch()
            running = server.ask("b", ONE)
            await until("it runs", lambda: server.statistics("b", "")[0].pending == 0)
            waiting = server.ask("a", ONE)
            loads.touch()
            (pid,) = server.pids("a")
            os.kill(pid, signal.SIGKILL)
            await until("it is being replaced", lambda: server.pids("a") not in ([], [pid]))
            gate.unlink()
            assert [numbers(await each.one()) for each in (running, server.ask("b", ONE))] == [[[1.0]]] * 2
            loads.unlink()
            assert numbers(await waiting.one()) == [[1.0]]

    asyncio.run(main())


def test_a_running_batch_keeps_its_resources_while_instances_are_added(tmp_path: Path) -> None:
    gate, running = tmp_path / "gate", tmp_path / "running"
    source = f"""
    def answer(self, request):
        with open({str(running)!r}, "a") as file:
            file.write("x")
        while Path({str(gate)!r}).exists():
            time.sleep(0.001)
        return give(get(request))
"""

    def group(count: int, needs: int) -> str:
        limiter = f'rate_limiter {{ resources {{ name: "R" count: {needs} }} }}'
        return config(f"instance_group {{ count: {count} kind: KIND_CPU {limiter} }}")

    root = write(tmp_path / "r", "a", group(1, 1), source)

    async def main() -> None:
        async with serving(root, startup=("a",), limited=True, amounts=(Amount("R", 1),)) as server:
            gate.touch()
            asked = [server.ask("a", ONE), server.ask("a", ONE)]
            await until("one runs", running.exists)
            write(root, "a", group(3, 1), versions=())
            await server.load("a", {})
            await until("both other processes are there", lambda: len(server.pids("a")) == 3)
            late = server.ask("a", ONE)
            assert server.statistics("a", "")[0].pending == 2
            gate.unlink()
            assert [numbers(await each.one()) for each in (*asked, late)] == [[[1.0]]] * 3

    asyncio.run(main())


@pytest.mark.parametrize("sequences", ["", "sequence_batching { }"])
def test_instances_that_could_never_run_are_rejected_and_those_of_before_go_on(
    tmp_path: Path, sequences: str
) -> None:
    def group(count: int, needs: int) -> str:
        limiter = f'rate_limiter {{ resources {{ name: "R" count: {needs} }} }}'
        return config(f"{sequences} instance_group {{ count: {count} kind: KIND_CPU {limiter} }}")

    root = write(tmp_path / "r", "a", group(2, 2))
    flags = {"sequence_id": 1, "sequence_start": True, "sequence_end": True} if sequences else {}

    async def main() -> None:
        async with serving(root, startup=("a",), limited=True, amounts=(Amount("R", 2),)) as server:
            before = server.pids("a")
            for count in (1, 3):
                write(root, "a", group(count, 3), versions=())
                with pytest.raises(Refused, match="minimum required count is 3"):
                    await server.load("a", {})
                assert [await server.numbers("a", ONE, **flags) for _ in range(3)] == [[[1.0]]] * 3
                assert server.view("a", "").document["instance_group"][0]["count"] == 2
                assert server.pids("a") == before
            write(root, "a", group(1, 1).replace("count: 1 }", "count: 1 global: true }"), versions=())
            await server.load("a", {})
            await until("there is one", lambda: len(server.pids("a")) == 1)
            assert await server.numbers("a", ONE, **flags) == [[1.0]]

    asyncio.run(main())


def test_a_sleeping_model_does_not_get_instances_that_could_never_run(tmp_path: Path) -> None:
    group = 'instance_group { kind: KIND_CPU rate_limiter { resources { name: "R" count: 2 } } }'
    for name in ("a", "b"):
        write(tmp_path, name, config(group), HEAVY)

    async def main() -> None:
        limits = {"memory_bytes": 250 * MIB, "limited": True, "amounts": (Amount("R", 2),)}
        async with serving(tmp_path, startup=("a",), **limits) as server:
            await server.load("b", {})
            assert server.pids("a") == []
            write(tmp_path, "a", config(group.replace("count: 2", "count: 3")), versions=())
            with pytest.raises(Refused, match="minimum required count is 3"):
                await server.load("a", {})
            assert await server.numbers("a", ONE) == [[1.0]]

    asyncio.run(main())


def test_onnx_instances_share_a_process_and_run_concurrently(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    shape = ["batch", 4]
    graph = helper.make_graph(
        [helper.make_node("Add", ["IN", "IN"], ["OUT"])],
        "double",
        [helper.make_tensor_value_info("IN", floats, shape)],
        [helper.make_tensor_value_info("OUT", floats, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text('instance_group { count: 3 kind: KIND_CPU } backend: "onnxruntime"')
    files = tmp_path / "files"
    files.mkdir()
    onnx.save(model, files / "bare.onnx")

    async def main() -> None:
        async with serving(tmp_path, startup=("m", "bare"), repositories=(tmp_path, files)) as server:
            for name in ("m", "bare"):
                assert len(server.pids(name)) == 1
                view = server.view(name, "")
                assert [(spec.name, spec.dims) for spec in view.config.inputs] == [("IN", (4,))]
                assert view.config.max_batch == 4
                asked = [server.ask(name, tensor("IN", [[float(number)] * 4])) for number in range(50)]
                for number, each in enumerate(asked):
                    assert numbers(await each.one()) == [[number * 2.0] * 4]
                with pytest.raises(Refused, match=r"unexpected shape for input 'IN'.*Expected \[-1,4\], got \[1,3\]"):
                    server.ask(name, tensor("IN", [[1.0] * 3]))

    asyncio.run(main())


def test_instances_share_the_weights_in_memory(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    side = 4096
    weights = np.ones((side, side), np.float32)
    assert weights.nbytes == 64 * MIB
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["IN", "W"], ["OUT"])],
        "large",
        [helper.make_tensor_value_info("IN", floats, ["batch", side])],
        [helper.make_tensor_value_info("OUT", floats, ["batch", side])],
        [onnx.numpy_helper.from_array(weights, "W")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "m" / "1").mkdir(parents=True)
    onnx.save(model, tmp_path / "m" / "1" / "model.onnx")
    text = 'backend: "onnxruntime" instance_group {{ count: {} kind: KIND_CPU }}'
    row = tensor("IN", np.ones((1, side)))

    async def used(server: Server, instances: int) -> int:
        """PSS once every instance has run."""
        (tmp_path / "m" / "config.pbtxt").write_text(text.format(instances))
        await server.load("m", {})
        for asked in [server.ask("m", row) for _ in range(8 * instances)]:
            assert numbers(await asked.one())[0][0] == side
        return used_bytes(server.pids("m"))

    async def main() -> None:
        async with serving(tmp_path) as server:
            one = await used(server, 1)
            assert one > 64 * MIB
            assert await used(server, 4) < 1.1 * one

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cached", "ensemble", "failing ensemble"])
def test_inputs_of_a_request_are_freed_with_it(tmp_path: Path, how: str) -> None:
    write(tmp_path, "m", config("response_cache { enable: true }" if how == "cached" else ""))
    if how == "failing ensemble":
        write(tmp_path, "m", config(), "    def answer(self, request):\n        raise ValueError\n")
    steps = [("m", {"IN": "IN"}, {"OUT": "between"}), ("m", {"IN": "between"}, {"OUT": "OUT"})]
    ensemble(tmp_path, "e", steps, f"max_batch_size: 8 {IO.format(dims='-1')}")
    name = "m" if how == "cached" else "e"

    async def main() -> None:
        async with serving(tmp_path, startup=(name,), cache_bytes=10_000) as server:
            array, done = np.ones((1, 1), np.float32), asyncio.Event()
            gone = weakref.ref(array)
            request = InferRequest(name, "", "", (Tensor("IN", Datatype.FP32, (1, 1), array.data),))
            gc.disable()
            server.infer(request, lambda _, final: final and done.set())
            del array, request
            await done.wait()
            await asyncio.sleep(0)
            assert (gone(), gc.enable()) == (None, None)

    asyncio.run(main())


@pytest.mark.parametrize("waking", [False, True])
def test_instances_can_change_while_the_memory_budget_swaps_the_model(tmp_path: Path, waking: bool) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    source = """
    def initialize(self, args):
        self.weights = np.ones({size} * 2**20, dtype=np.uint8)
        while Path({gate!r}).exists():
            time.sleep(0.01)
    def answer(self, request):
        return give(get(request))
"""
    one, two = (config(f"instance_group {{ count: {count} kind: KIND_CPU }}") for count in (1, 2))
    write(root, "a", one, source.format(size=60, gate=str(gate)))
    write(root, "b", config(), source.format(size=250, gate="-"))

    async def main() -> None:
        async with serving(root, startup=("a",), memory_bytes=350 * MIB, turn_s=0.0) as server:
            request = None
            if waking:
                await server.load("b", {})
                gate.touch()
                request = server.ask("a", ONE)
                await until("a is being woken", lambda: server.pids("a"))
            gate.touch()
            (root / "a" / "config.pbtxt").write_text(two)
            before = children()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.itself.load("a", {}))
                await until("another process is being loaded", lambda: children() > before)
                if not waking:
                    await server.load("b", {})
                    assert not server.pids("a")
                gate.unlink()
            if request is not None:
                assert numbers(await request.one()) == [[1.0]]
            assert await server.numbers("a", ONE) == [[1.0]]
            assert (len(server.pids("a")), server.view("a", "").config.instance_count) == (2, 2)

    asyncio.run(main())
