"""Child processes that fail: which requests fail, what is reported, and that nothing leaks."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import structlog
from tests.contract.tensor.gpus import cuda
from tests.modelserver.process.rig import HERE, Heard, alive, answers, run, spec, started, until, values, work

from forebay.core.serving.errors import Kind
from forebay.modelserver.process import supervisor
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.process.values import Answer, Call, GaveUp, Work


async def _serves_again(process: ModelProcess, instance: int = 0) -> None:
    await until(lambda: process.usable(instance))
    assert values((await answers(process, work(data=[5]), instance=instance))[0]) == [5]


DEADLY = {
    "crash": "killed by signal 6",
    "kill": "killed by signal 9",
    "scribble": "sent an invalid packet",
    "hang": "no progress for 0.5 s",
}


@pytest.mark.parametrize("threads", ["yes", "no"])
@pytest.mark.parametrize("do", DEADLY)
def test_dead_or_hung_child_fails_its_batch_and_is_restarted(tmp_path: Path, do: str, threads: str) -> None:
    async def scene() -> None:
        changes: list[bool] = []
        model = spec(tmp_path, parameters={"threads": threads})
        async with started(model, hang_s=0.5, on_change=lambda: changes.append(True)) as process:
            before = list(process.pids)
            changes.clear()
            done = await run(process, work(do), work())
            assert done.failure is not None
            assert done.failure.kind is Kind.UNAVAILABLE
            assert "model 'm'" in done.failure.text
            assert DEADLY[do] in done.failure.text
            assert "retry the request" in done.failure.text
            assert (process.usable(0), bool(process.reason), bool(changes)) == (False, True, True)
            assert process.loaded is not None
            await _serves_again(process)
            assert process.reason == ""
            assert process.pids != before
            assert not alive(before[0])

    asyncio.run(scene())


def test_child_exit_is_logged_with_its_last_output(tmp_path: Path) -> None:
    async def scene() -> None:
        with structlog.testing.capture_logs() as logs:
            async with started(spec(tmp_path)) as process:
                await run(process, work("crash"))
                await _serves_again(process)
        told = next(entry["reason"] for entry in logs if entry["event"] == "model process ended")
        assert "killed by signal 6" in told
        assert "about to crash" in told
        assert "Fatal Python error: Aborted" in told

    asyncio.run(scene())


@pytest.mark.skipif(cuda.COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("say", [False, True])
def test_child_that_lost_its_gpu_answers_its_batch_and_is_replaced(tmp_path: Path, say: bool) -> None:
    async def scene() -> None:
        with structlog.testing.capture_logs() as logs:
            async with started(spec(tmp_path)) as process:
                before = list(process.pids)
                assert values((await answers(process, work("echo", data=[3])))[0]) == [3]
                done = await run(process, work("lose gpu", library=str(cuda.build(tmp_path)), say=say))
                texts = (
                    [done.failure.text]
                    if done.failure
                    else [answer.error.text for answer in done.answers if answer and answer.error]
                )
                assert texts == ["a kernel has failed"]
                await _serves_again(process)
                assert process.pids != before
        told = next(entry["reason"] for entry in logs if entry["event"] == "model process ended")
        assert "cannot use its GPU any more" in told

    asyncio.run(scene())


def test_model_calls_of_a_dead_child_are_withdrawn(tmp_path: Path) -> None:
    calls: list[Call] = []
    gone: list[int] = []

    async def scene() -> None:
        async with started(spec(tmp_path), on_call=calls.append) as process:
            first, second = Heard(), Heard()
            process.execute(0, [work("ask")], first)
            await until(lambda: len(calls) == 1)
            calls[0].on_gone = lambda: gone.append(0)
            calls[0].respond(Answer(), True)
            await until(lambda: first.done)
            process.execute(0, [work("ask")], second)
            await until(lambda: len(calls) == 2)
            calls[1].on_gone = lambda: gone.append(1)
            os.kill(process.pids[0], signal.SIGKILL)
            await until(lambda: second.done)
            assert gone == [1]
            await _serves_again(process)
            calls[1].respond(Answer(), True)
        assert gone == [1]

    asyncio.run(scene())


def test_other_instance_serves_while_one_is_replaced(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, [HERE] * 2, parameters={"threads": "no"})) as process:
            heard = Heard()
            process.execute(0, [work("kill")], heard)
            for _ in range(50):
                assert values((await answers(process, work(), instance=1))[0]) == [1, 2]
            await until(lambda: heard.done)
            await _serves_again(process)

    asyncio.run(scene())


RAISED = {
    "fail": "cannot do that",
    "garble": "half a ? character",
    "leave": "bye",
    "too few": "0 responses to 2 requests",
}


@pytest.mark.parametrize("do", RAISED)
def test_exception_in_a_model_fails_its_batch_and_keeps_the_child(tmp_path: Path, do: str) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            before = list(process.pids)
            done = await run(process, work(do), work())
            assert done.failure is not None
            assert done.failure.kind is Kind.INTERNAL
            assert RAISED[do] in done.failure.text
            await _serves_again(process)
            assert process.pids == before

    asyncio.run(scene())


def test_non_array_output_fails_only_its_request(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            first, second = await answers(process, work("odd", id="odd"), work())
            assert first.error is not None
            assert first.error.text == "output 'y' is of type str, not an array"
            assert second.error is not None
            assert second.error.text == "not me"

    asyncio.run(scene())


def test_unencodable_text_does_not_end_the_child(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            before = list(process.pids)
            first, second = await answers(process, work("garbled", id="odd"), work())
            assert first.error is not None
            assert first.error.text == "not ?"
            assert (second.parameters, values(second, "?")) == ({"?": "?"}, [1, 2])
            done = await run(process, work("garble"))
            assert done.failure is not None
            assert len(done.failure.text) < 100_000
            assert process.pids == before

    asyncio.run(scene())


def test_strings_of_numpy_are_sent_like_others(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            (found,) = await answers(process, work("numpy text"))
            assert (found.parameters, values(found, "y")) == ({"a": "b"}, [1, 2])

    asyncio.run(scene())


def test_streamed_response_that_cannot_be_sent_is_an_error(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, decoupled=True)) as process:
            heard = Heard()
            process.execute(0, [work("too many files")], heard)
            await until(lambda: heard.responses)
            ((index, answer, final),) = heard.responses
            assert (index, final) == (0, True)
            assert answer is not None
            assert answer.error is not None
            assert answer.error.text.startswith("the outputs cannot be sent: [Errno 24]")
            await until(lambda: heard.done)
            await _serves_again(process)

    asyncio.run(scene())


def test_model_output_in_the_log_is_rate_limited(tmp_path: Path) -> None:
    async def scene() -> None:
        with structlog.testing.capture_logs() as logs:
            async with started(spec(tmp_path)) as process:
                assert values((await answers(process, work("chatter")))[0]) == [1, 2]
        seconds = sum("over the log rate limit" in entry["event"] for entry in logs)
        assert seconds
        assert sum(entry["event"] == "model output" for entry in logs) <= supervisor.LINES_PER_S_MAX * (seconds + 1)

    asyncio.run(scene())


def test_garbage_on_stdout_and_stderr_is_harmless(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            for _ in range(5):
                assert values((await answers(process, work("noise")))[0]) == [1, 2]

    asyncio.run(scene())


def test_frozen_child_with_pending_responses_is_replaced(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, decoupled=True), hang_s=0.5) as process:
            heard = Heard()
            process.execute(0, [work("freeze"), work()], heard)
            await until(lambda: heard.done)
            await until(lambda: len(heard.responses) == 2)
            for index, (told, answer, final) in enumerate(heard.responses):
                assert (told, final) == (index, True)
                assert answer is not None
                assert answer.error is not None
                assert answer.error.kind is Kind.UNAVAILABLE
            await _serves_again(process)

    asyncio.run(scene())


def test_child_over_the_memory_limit_is_replaced_after_its_batch(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, rss_bytes_max=160 << 20), hang_s=4.0) as process:
            before = list(process.pids)
            for _ in range(3):
                assert values((await answers(process, work("leak")))[0]) == [1, 2]
            await until(lambda: process.pids not in ([], before))
            await _serves_again(process)
            assert not alive(before[0])

    asyncio.run(scene())


def test_outputs_stay_readable_after_their_child_has_died(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            (answer,) = await answers(process, work(data=np.full(100_000, 3, np.float32)))
            await run(process, work("kill"))
            await _serves_again(process)
            assert set(values(answer)) == {3}
            again = Work("", (answer.outputs[0],), parameters={"do": "echo"})  # its segment has gone: it is copied
            assert set(values((await answers(process, again))[0])) == {3}

    asyncio.run(scene())


BROKEN = {
    "fail": "there is no such file",
    "garble": "there is no file",
    "raise": "RuntimeError: this is a mistake in the backend",
    "abort": "something odd happened",
    "slow": "it did not load within 2 s",
}


@pytest.mark.parametrize("load", BROKEN)
def test_load_failure_reports_the_reason(tmp_path: Path, load: str) -> None:
    async def scene() -> None:
        timeout_s = 2.0 if load == "slow" else 60.0
        process = ModelProcess(
            spec(tmp_path, parameters={"load": load}),
            hang_s=10,
            load_timeout_s=timeout_s,
            log=structlog.get_logger(),
        )
        waiting = asyncio.gather(process.wait_ready(), return_exceptions=True)
        with pytest.raises(GaveUp, match=BROKEN[load]):
            await process.run()
        (heard,) = await waiting
        assert isinstance(heard, GaveUp)
        assert BROKEN[load] in process.reason
        assert not process.pids

    asyncio.run(scene())


def test_unknown_backend_is_named_in_the_error(tmp_path: Path) -> None:
    async def scene() -> None:
        process = ModelProcess(
            spec(tmp_path, backend="fortran"), hang_s=10, load_timeout_s=60, log=structlog.get_logger()
        )
        with pytest.raises(GaveUp, match="backend 'fortran' does not exist"):
            await process.run()

    asyncio.run(scene())


@pytest.mark.parametrize("more", [False, True], ids=["at first", "later"])
def test_failed_load_of_an_instance_fails_the_change(tmp_path: Path, more: bool) -> None:
    parameters = {"load": "second fails", "threads": "no"}

    async def scene() -> None:
        if more:
            async with started(spec(tmp_path, parameters=parameters)) as process:
                with pytest.raises(GaveUp, match="only one of these fits"):
                    await process.set_instances([HERE] * 3)
                assert process.instances == 1
                await _serves_again(process)
        else:
            process = ModelProcess(
                spec(tmp_path, [HERE] * 2, parameters=parameters),
                hang_s=10,
                load_timeout_s=60,
                log=structlog.get_logger(),
            )
            with pytest.raises(GaveUp, match="only one of these fits"):
                await process.run()

    asyncio.run(scene())


def test_process_gives_up_after_repeated_failed_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)

    async def scene() -> None:
        process = ModelProcess(
            spec(tmp_path, parameters={"load": "once"}), hang_s=10, load_timeout_s=60, log=structlog.get_logger()
        )
        running = asyncio.gather(process.run(), return_exceptions=True)
        await process.wait_ready()
        await run(process, work("kill"))
        (heard,) = await running
        assert isinstance(heard, GaveUp)
        assert "failed 5 times in a row" in str(heard)
        with pytest.raises(GaveUp):
            await process.wait_ready()

    asyncio.run(scene())


def test_stop_closes_the_backend_and_kills_grandchildren(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            (answer,) = await answers(process, work("child"))
            grandchild = answer.parameters["pid"]
            assert isinstance(grandchild, int)
            assert alive(grandchild)
        assert (tmp_path / "closed").exists()
        await until(lambda: not alive(grandchild))
        assert process.reason == "it has been stopped"
        with pytest.raises(GaveUp):
            await process.set_instances([HERE])

    asyncio.run(scene())


@pytest.mark.parametrize("threads", ["yes", "no"])
def test_sigterm_to_all_processes_of_a_service_ends_no_batch(tmp_path: Path, threads: str) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, parameters={"threads": threads})) as process:
            assert values((await answers(process, work("terminate")))[0]) == [1.0, 2.0]
            assert process.replaced == 0
        assert (tmp_path / "closed").exists()

    asyncio.run(scene())


@pytest.mark.parametrize("threads", ["yes", "no"])
def test_stop_closes_the_backend_during_a_batch_that_does_not_end(tmp_path: Path, threads: str) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, parameters={"threads": threads})) as process:
            heard = Heard()
            process.execute(0, [work("hang")], heard)
        assert heard.done is not None
        assert (tmp_path / "closed").exists()

    asyncio.run(scene())


@pytest.mark.parametrize("threads", ["yes", "no"])
def test_stop_kills_a_hung_child_after_the_grace_period(tmp_path: Path, threads: str) -> None:
    async def scene() -> None:
        parameters = {"close": "hang", "threads": threads}
        async with started(spec(tmp_path, parameters=parameters), stop_grace_s=0.2) as process:
            heard = Heard()
            process.execute(0, [work("hang")], heard)
        assert heard.done is not None
        assert heard.done.failure is not None
        assert heard.done.failure.text == "model 'm' is being unloaded"

    asyncio.run(scene())


@pytest.mark.parametrize("begun", [False, True])
def test_stop_before_or_during_load(tmp_path: Path, begun: bool) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, parameters={"load": "slow"}), ready=False) as process:
            if begun:
                await until(lambda: process.pids)
        with pytest.raises(GaveUp, match="stopped"):
            await process.wait_ready()

    asyncio.run(scene())


def test_stopping_a_model_frees_its_memory(tmp_path: Path) -> None:
    """The proportional share of all children, before and after: what was taken is really gone."""

    async def scene() -> None:
        parameters = {"ballast": str(200 << 20)}
        async with started(spec(tmp_path, parameters=parameters)) as process:
            await answers(process, work(data=np.zeros(1 << 20, np.float32)))
            assert sum(map(_pss_bytes, process.pids)) > 200 << 20
            own = _pss_bytes(os.getpid())
        assert _pss_bytes(os.getpid()) < own + (20 << 20)

    asyncio.run(scene())


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) << 10


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.modelserver.process.rig import spec, started
async def scene():
    async with started(spec(Path(sys.argv[1]), parameters={"threads": sys.argv[2]})) as process:
        (Path(sys.argv[1]) / "pid").write_text(str(process.pids[0]) + ".")
        await asyncio.Event().wait()
asyncio.run(scene())
"""


@pytest.mark.parametrize("threads", ["yes", "no"])
def test_children_die_when_the_server_is_killed(tmp_path: Path, threads: str) -> None:
    async def scene() -> None:
        server = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path), threads], stdout=subprocess.DEVNULL)
        try:
            told = tmp_path / "pid"
            await until(lambda: told.exists() and told.read_text().endswith("."))
            pid = int(told.read_text()[:-1])
            assert alive(pid)
        finally:
            server.kill()
            server.wait()
        await until(lambda: not alive(pid))

    asyncio.run(scene())
