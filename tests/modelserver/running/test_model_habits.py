"""What Python models do to their process: forks, exit handlers, closed files; requests that wait for an instance."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.modelserver.models.rig import (
    BATCH_SIZE,
    IO,
    SAME,
    config,
    ensemble,
    numbers,
    serving,
    tensor,
    until,
    write,
)

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.limiter import Amount

pytestmark = pytest.mark.slow
ONE = tensor("IN", [[1.0]])

FORKS = """
    def answer(self, request):
        pid = os.fork()
        if not pid:
            {end}
        return give(get(request) * 0 + os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("raise SystemExit(7)", 7.0),
        ("raise SystemExit", 0.0),
        ("raise ValueError('in the copy')", 1.0),
        ("return give(get(request))", 0.0),
        ("os._exit(3)", 3.0),
    ],
)
def test_forked_copy_of_a_model_process_ends_where_it_would_answer(tmp_path: Path, end: str, status: float) -> None:
    write(tmp_path, "m", config(), FORKS.format(end=end))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for _ in range(2):
                assert await server.numbers("m", ONE) == [[status]]
            assert server.processes().replaced == 0

    asyncio.run(main())


PARSES = """
    def initialize(self, args):
        import argparse
        self.value = argparse.ArgumentParser(prog="tool").parse_args() and 7
    def answer(self, request):
        return give(get(request) * self.value)
"""


def test_model_that_parses_its_command_line_finds_none(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), PARSES)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await server.numbers("m", ONE) == [[7.0]]

    asyncio.run(main())


LEAVES = """
    def initialize(self, args):
        import atexit
        atexit.register(Path({seen!r}).write_text, "handled")
        {then}
    def finalize(self):
        Path({seen!r}).write_text("finalized")
"""


@pytest.mark.parametrize("then", ["pass", "raise ValueError('no weights')"])
def test_exit_handlers_of_a_model_run_when_its_process_ends(tmp_path: Path, then: str) -> None:
    seen = tmp_path / "seen"
    write(tmp_path / "r", "m", config(), LEAVES.format(seen=str(seen), then=then))

    async def main() -> None:
        async with serving(tmp_path / "r") as server:
            if then == "pass":
                await server.load("m", {})
                await server.unload("m", False)
            else:
                with pytest.raises(Refused, match="no weights"):
                    await server.load("m", {})
            await until("it ran", lambda: seen.exists() and seen.read_text() == "handled")

    asyncio.run(main())


WAITS = """
    def initialize(self, args):
        import multiprocessing
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
"""


def test_exit_handlers_do_not_wait_for_processes_of_the_model(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), WAITS + SAME)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            async with asyncio.timeout(4):  # a process that does not end is killed after 5 s
                await server.unload("m", False)

    asyncio.run(main())


CLOSES = """
    def initialize(self, args):
        import sys
        {closes}
    def answer(self, request):
        if get(request).item() < 0:
            raise ValueError("not today")
        {prints}
        return give(get(request))
"""


@pytest.mark.parametrize(
    ("closes", "prints"),
    [
        ("sys.stdout.close(), sys.stderr.close()", "pass"),
        ("sys.stdout = sys.stderr = None", "pass"),
        ("os.close(1), os.close(2)", "os.write(1, b'one'), os.write(2, b'two')"),
    ],
)
def test_model_that_closes_its_standard_files_is_served(tmp_path: Path, closes: str, prints: str) -> None:
    write(tmp_path, "m", config(), CLOSES.format(closes=closes, prints=prints))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for _ in range(2):
                refused = await server.ask("m", tensor("IN", [[-1.0]])).error()
                assert (refused.kind, "not today" in refused.text) == (Kind.INTERNAL, True)
                assert await server.numbers("m", ONE) == [[1.0]]
            assert server.processes().replaced == 0

    asyncio.run(main())


NOTES = """
    def answer(self, request):
        value = get(request).item()
        while value == 1 and Path({gate!r}).exists():
            time.sleep(0.001)
        while value == 2 and not request.is_cancelled():  # it is told by another thread, usually before
            time.sleep(0.001)
        with open({seen!r}, "a") as file:
            file.write(f"{{value}} {{request.is_cancelled()}} ")
        return give(get(request))
"""


def test_request_cancelled_while_it_waits_in_the_process_is_known_as_cancelled(tmp_path: Path) -> None:
    gate, seen = tmp_path / "gate", tmp_path / "seen"
    gate.touch()
    write(tmp_path / "r", "m", config(max_batch=1), NOTES.format(gate=str(gate), seen=str(seen)))

    async def main() -> None:
        async with serving(tmp_path / "r", startup=("m",)) as server:
            version = server.itself._collection.find("m", -1)
            while not version._runner._executor._short:  # its batches are so fast that it is given them ahead
                await server.numbers("m", tensor("IN", [[0.0]]))
            running, ahead = (server.ask("m", tensor("IN", [[value]])) for value in (1.0, 2.0))
            await until("sent ahead", lambda: version.process.outstanding(0) == 2)
            ahead.call.cancel()
            gate.unlink()
            await running.one()
            await until("both ran", lambda: seen.read_text().endswith("1.0 False 2.0 True "))

    asyncio.run(main())


@pytest.mark.parametrize(
    "policy",
    [
        "default_queue_policy { default_timeout_microseconds: 10000 }",
        "default_queue_policy { allow_timeout_override: true }",
        "default_queue_policy { max_queue_size: 1 }",
    ],
)
def test_queue_policy_holds_behind_a_batch_of_a_model_whose_batches_are_fast(tmp_path: Path, policy: str) -> None:
    gate, seen = tmp_path / "gate", tmp_path / "seen"
    gate.touch()
    text = config(f"dynamic_batching {{ {policy} }}", max_batch=1)
    write(tmp_path / "r", "m", text, NOTES.format(gate=str(gate), seen=str(seen)))

    async def main() -> None:
        async with serving(tmp_path / "r", startup=("m",)) as server:
            version = server.itself._collection.find("m", -1)
            while not version._runner._executor._short:
                await server.numbers("m", tensor("IN", [[0.0]]))
            running = server.ask("m", tensor("IN", [[1.0]]))
            await until("it runs", lambda: version.process.outstanding(0) == 1)
            waiting = server.ask("m", tensor("IN", [[0.0]]), timeout_us=10_000)
            if "max_queue_size" in policy:
                with pytest.raises(Refused, match="Exceeds maximum queue size"):
                    server.ask("m", tensor("IN", [[0.0]]))
            else:
                assert (await waiting.error()).text == "Request timeout expired"
            gate.unlink()
            await running.one()

    asyncio.run(main())


def test_request_does_not_wait_for_a_busy_instance_when_another_is_free_sooner(tmp_path: Path) -> None:
    source = f"""
    def answer(self, request):
        while Path({str(tmp_path)!r}, f"gate-{{get(request).item():g}}").exists():
            time.sleep(0.001)
        return give(get(request))
"""
    gates = [tmp_path / "gate-1", tmp_path / "gate-2"]
    write(tmp_path / "r", "m", config("instance_group { count: 2 kind: KIND_CPU }", max_batch=1), source)

    async def main() -> None:
        async with serving(tmp_path / "r", startup=("m",)) as server:
            version = server.itself._collection.find("m", -1)
            while not version._runner._executor._short:
                await server.numbers("m", tensor("IN", [[0.0]]))
            for gate in gates:
                gate.touch()
            slow, slower = (server.ask("m", tensor("IN", [[value]])) for value in (2.0, 1.0))
            await until("they run", lambda: [version.process.outstanding(each) for each in (0, 1)] == [1, 1])
            asked = server.ask("m", tensor("IN", [[0.0]]))
            gates[0].unlink()
            assert (await asked.one()).error is None
            assert slower.ended.is_set()
            assert not slow.ended.is_set()
            gates[1].unlink()
            await slow.one()

    asyncio.run(main())


def test_idle_instances_of_a_model_keep_no_resources_when_its_requests_were_cancelled(tmp_path: Path) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    group = 'instance_group {{ count: {} kind: KIND_CPU rate_limiter {{ resources {{ name: "R" count: {} }} }} }}'
    write(root, "two", config(group.format(2, 1)))
    write(root, "one", config(group.format(1, 2)), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("one", "two"), limited=True, amounts=(Amount("R", 2),)) as server:
            version: Any = server.itself._collection.find("two", -1)
            limiter = version._resources._rate_limiter
            gate.touch()
            running = server.ask("one", ONE)
            await until("it runs", lambda: limiter._granted)
            cancelled = server.ask("two", ONE)
            await until("both instances of the other wait", lambda: len(limiter._waiting) == 2)
            assert cancelled.call is not None
            cancelled.call.cancel()
            late = server.ask("one", ONE)
            gate.unlink()
            assert [numbers(await each.one()) for each in (running, late)] == [[[1.0]]] * 2

    asyncio.run(main())


def test_many_requests_whose_step_rejects_them_once_their_turn_has_come_all_end(tmp_path: Path) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    write(root, "m", config("dynamic_batching {}", dims="1"), BATCH_SIZE.format(gate=str(gate)))
    whole = f"max_batch_size: 8 {IO.format(dims='-1')}"
    ensemble(root, "one", [("m", {"IN": "IN"}, {"OUT": "OUT"})], whole, "max_inflight_requests: 1")

    async def main() -> None:
        async with serving(root, startup=("one",)) as server:
            gate.touch()
            running, *bad = (server.ask("one", tensor("IN", [[1.0] * size])) for size in (1, *[2] * 1000))
            last = server.ask("one", ONE)
            await until("it runs", lambda: server.itself._collection.find("m", -1).inflight)
            assert bad[500].call is not None
            bad[500].call.cancel()
            gate.unlink()
            assert [numbers(await each.one()) for each in (running, last)] == [[[1.0]]] * 2
            del bad[500]
            assert {(await each.error()).kind for each in bad} == {Kind.INVALID_ARGUMENT}

    asyncio.run(main())


BACKWARDS = """
    def execute(self, requests):
        for request in reversed(requests):
            sender = request.get_response_sender()
            for number in range(10):
                sender.send(give(np.full((1, 1 << 20), number, np.float32)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_responses_that_wait_for_those_of_an_earlier_request_do_not_block_the_model(tmp_path: Path) -> None:
    batches = "dynamic_batching { preserve_ordering: true max_queue_delay_microseconds: 60000000 }"
    text = config(f"model_transaction_policy {{ decoupled: true }} {batches}", max_batch=2)
    write(tmp_path, "m", text, BACKWARDS)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), drain_s=1.0) as server:
            for asked in [server.ask("m", ONE) for _ in range(2)]:
                assert [numbers(each)[0][-1] for each in await asked.all()] == [*range(10)]

    asyncio.run(main())
