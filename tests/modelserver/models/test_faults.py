"""Models that crash, hang, raise or never restart: which requests fail, and what recovers."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.modelserver.models.rig import alive, config, numbers, serving, tensor, until, write

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.models.running.wake_queue import FAILURES_MAX
from forebay.modelserver.process import supervisor

MOODY = """
    def answer(self, request):
        mood = int(get(request)[0, 0])
        if mood == 1:
            os.abort()
        if mood == 2:
            time.sleep(60)
        if mood == 3:
            raise ValueError("not today")
        if mood == 4:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("only this one"))
        if mood == 5:
            return give(get(request).astype(np.int32))
        if mood == -1:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(""))
        return give(get(request))
"""


def mood(number: float) -> "object":
    return tensor("IN", [[number]])


@pytest.mark.parametrize(("number", "text"), [(1, "process"), (2, "")])
def test_crash_or_hang_fails_one_batch_and_the_model_restarts(tmp_path: Path, number: int, text: str) -> None:
    write(tmp_path, "m", config(), MOODY)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), hang_s=0.5) as server:
            (old,) = server.pids("m")
            asked = [server.ask("m", mood(number)), server.ask("m", mood(0)), server.ask("m", mood(7))]
            refused = await asked[0].error()
            assert refused.kind is Kind.UNAVAILABLE
            assert text in refused.text
            assert [numbers(await each.one()) for each in asked[1:]] == [[[0.0]], [[7.0]]]
            assert old not in server.pids("m")
            assert server.states("m") == {"1": ("READY", "")}
            await until("ready", lambda: server.ready)
            (counts,) = server.statistics("m", "")
            assert (counts.success.count, counts.fail.count, counts.failures["BACKEND"]) == (2, 1, 1)

    asyncio.run(main())


def test_batch_queued_in_a_crashed_process_runs_in_its_replacement(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), MOODY)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for number in range(10, 15):
                assert await server.numbers("m", mood(number)) == [[number]]
            asked = [server.ask("m", mood(number)) for number in (10, 1, 11, 12, 1, 13)]
            outcomes = [await each.one() for each in asked]
            assert [outcome.error is None for outcome in outcomes] == [True, False, True, True, False, True]
            assert [numbers(outcomes[index]) for index in (0, 2, 3, 5)] == [[[10.0]], [[11.0]], [[12.0]], [[13.0]]]

    asyncio.run(main())


def test_other_instances_serve_while_one_restarts(tmp_path: Path) -> None:
    write(tmp_path, "m", config("instance_group { count: 2 kind: KIND_CPU }"), MOODY)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            old = server.pids("m")
            os.kill(old[0], signal.SIGKILL)
            for number in range(6, 26):
                asked = server.ask("m", mood(number))
                response = await asked.one()
                assert response.error is None or response.error.kind is Kind.UNAVAILABLE
            await until("both are back", lambda: len(server.pids("m")) == 2 and server.ready)
            assert old[1] in server.pids("m")

    asyncio.run(main())


CALLS_ITSELF = """
    def answer(self, request):
        if get(request)[0, 0]:
            return give(get(request))
        inputs = [pb_utils.Tensor("IN", get(request))]
        own = pb_utils.InferenceRequest(model_name="m", requested_output_names=["OUT"], inputs=inputs).exec()
        return pb_utils.InferenceResponse(error=own.error())
"""


def test_model_calls_of_a_killed_process_are_cancelled(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), CALLS_ITSELF)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), hang_s=0.5) as server:
            refused = await server.ask("m", mood(0)).error()
            assert refused.kind is Kind.UNAVAILABLE
            assert await server.numbers("m", mood(3)) == [[3.0]]
            assert server.processes().replaced == 1
            (counts,) = server.statistics("m", "")
            assert [counts.failures[why] for why in ("BACKEND", "CANCELED")] == [1, 1]

    asyncio.run(main())


STARTS_PROCESSES = """
    def initialize(self, args):
        import multiprocessing
        self.pool = multiprocessing.get_context({method!r}).Pool(1)
    def answer(self, request):
        return give(self.pool.apply(doubled, (get(request),)))

def doubled(array):
    return array * 2
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_model_can_start_processes_with_any_start_method(tmp_path: Path, method: str) -> None:
    write(tmp_path, "m", config(), STARTS_PROCESSES.format(method=method))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), hang_s=20) as server:
            assert await server.numbers("m", tensor("IN", [[1.0]])) == [[2.0]]

    asyncio.run(main())


def test_model_errors_fail_only_the_affected_requests(tmp_path: Path) -> None:
    write(tmp_path, "m", config("dynamic_batching { max_queue_delay_microseconds: 100000 }", max_batch=2), MOODY)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            (old,) = server.pids("m")
            raised = [server.ask("m", mood(3)), server.ask("m", mood(0))]
            for asked in raised:
                refused = await asked.error()
                assert "not today" in refused.text
            partly = [server.ask("m", mood(4)), server.ask("m", mood(0))]
            assert (await partly[0].error()).text == "only this one"
            assert numbers(await partly[1].one()) == [[0.0]]
            wrong = server.ask("m", mood(5))
            refused = await wrong.error()
            assert "OUT" in refused.text
            silent = await server.ask("m", mood(-1)).error()
            assert (silent.kind, silent.text) == (Kind.INTERNAL, "the model gave no message")
            assert server.pids("m") == [old]
            (counts,) = server.statistics("m", "")
            assert (counts.success.count, counts.failures["BACKEND"]) == (1, 5)

    asyncio.run(main())


ONCE = """
    def initialize(self, args):
        once = Path({once!r})
        if once.exists():
            raise ValueError("the disk is gone")
        once.touch()
    def answer(self, request):
        os.abort()
"""


def test_model_that_cannot_restart_becomes_unavailable_with_the_reason(tmp_path: Path) -> None:
    once = tmp_path / "loaded"
    root = write(tmp_path / "r", "m", config(), ONCE.format(once=str(once)))

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            asked = [server.ask("m", mood(0)) for _ in range(3)]
            for each in asked:
                assert (await each.error()).kind is Kind.UNAVAILABLE
            await until("it has been given up", lambda: server.states("m")["1"][0] == "UNAVAILABLE")
            assert "the disk is gone" in server.states("m")["1"][1]
            assert not server.ready
            with pytest.raises(Refused, match="no available versions"):
                server.ask("m", mood(0))
            once.unlink()
            await server.load("m", {})
            assert server.states("m") == {"1": ("READY", "")}

    asyncio.run(main())


def test_unload_does_not_wait_for_requests_of_a_model_that_cannot_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    root = write(tmp_path / "r", "m", config(), ONCE.format(once=str(tmp_path / "loaded")))

    async def main() -> None:
        async with serving(root, startup=("m",), drain_s=3600.0) as server:
            asked = [server.ask("m", mood(0)) for _ in range(3)]
            await asked[0].error()  # the process has ended, and is started again
            await server.unload("m", False)
            assert "the disk is gone" in (await asked[2].error()).text
            assert server.states("m") == {"1": ("UNAVAILABLE", "unloaded")}

    asyncio.run(main())


KILLED_WHILE_LOADING = """
    def initialize(self, args):
        if Path({deadly!r}).exists():
            os.kill(os.getpid(), 9)
        self.weights = np.ones(120 * 2**20, dtype=np.uint8)
    def answer(self, request):
        return give(get(request))
"""
MIB = 2**20


def test_model_killed_while_it_is_loaded_again_is_tried_several_times(tmp_path: Path) -> None:
    deadly, root = tmp_path / "deadly", tmp_path / "r"
    for name in ("a", "b"):
        write(root, name, config(), KILLED_WHILE_LOADING.format(deadly=str(deadly) if name == "a" else "-"))

    async def main() -> None:
        async with serving(root, startup=("a", "b"), memory_bytes=250 * MIB, turn_s=0.0) as server:

            async def fail() -> None:
                assert await server.numbers("b", mood(0)) == [[0.0]]
                await until("a sleeps", lambda: not server.pids("a"))
                refused = await server.ask("a", mood(0)).error()
                assert (refused.kind, refused.retry_after_s) == (Kind.UNAVAILABLE, 1)
                assert "model 'a' version 1 cannot be loaded again: " in refused.text
                assert "killed by signal 9" in refused.text

            assert await server.numbers("b", mood(0)) == [[0.0]]
            deadly.touch()
            for _ in range(FAILURES_MAX - 1):
                await fail()
                assert (server.states("a"), server.ready) == ({"1": ("READY", "")}, True)
            deadly.unlink()
            assert await server.numbers("a", mood(7)) == [[7.0]]
            assert await server.numbers("b", mood(0)) == [[0.0]]
            deadly.touch()
            for _ in range(FAILURES_MAX):
                await fail()
            assert "killed by signal 9" in server.states("a")["1"][1]
            assert not server.ready
            deadly.unlink()
            await server.load("a", {})
            assert await server.numbers("a", mood(7)) == [[7.0]]

    asyncio.run(main())


def test_failed_model_releases_its_memory_even_if_pinned(tmp_path: Path) -> None:
    deadly, root = tmp_path / "deadly", tmp_path / "r"
    write(root, "m", config(), KILLED_WHILE_LOADING.format(deadly=str(deadly)))

    async def main() -> None:
        async with serving(root, startup=("m",), memory_bytes=250 * MIB, pinned=frozenset({"m"})) as server:
            assert server.memory().used_bytes > 120 * MIB
            deadly.touch()
            os.kill(server.pids("m")[0], signal.SIGKILL)
            await until("it has been given up", lambda: server.states("m")["1"][0] == "UNAVAILABLE")
            assert (server.memory().used_bytes, server.memory().resident) == (0, 0)
            deadly.unlink()
            await server.load("m", {})
            assert server.memory().resident == 1

    asyncio.run(main())


def test_unload_drains_requests_for_at_most_drain_s(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), MOODY)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), drain_s=0.2) as server:
            stuck, waiting = server.ask("m", mood(2)), server.ask("m", mood(0))
            await server.unload("m", False)
            for asked in (stuck, waiting):
                assert (await asked.error()).kind is Kind.UNAVAILABLE
            assert server.states("m") == {"1": ("UNAVAILABLE", "unloaded")}

    asyncio.run(main())


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.modelserver.models.rig import serving
async def scene():
    async with serving(Path(sys.argv[1]), startup=("m",)):
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(scene())
"""
STARTS = """
    def initialize(self, args):
        import subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        pids = [subprocess.Popen(sleep, start_new_session=apart).pid for apart in (False, True)]
        Path({seen!r}).write_text(" ".join(map(str, pids)))
"""


def test_processes_started_by_a_model_end_when_the_server_is_killed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    write(tmp_path / "models", "m", config(), STARTS.format(seen=str(seen)))
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "models")], stdout=subprocess.PIPE, process_group=0
    ) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            started = [int(pid) for pid in seen.read_text().split()]
            assert all(map(alive, started))
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    asyncio.run(until("they end", lambda: not any(map(alive, started))))
