"""The queue of a sleeping model."""

import asyncio
from pathlib import Path
from time import monotonic

import pytest
from tests.modelserver.models.rig import BATCH_SIZE, SAME, config, numbers, serving, tensor, until, write

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.modelserver.models.running.call import Call
from forebay.modelserver.models.running.counting import Counts
from forebay.modelserver.models.running.inputs import Checked
from forebay.modelserver.models.running.wake_queue import TOO_LATE, WakeQueue

PATIENCE_S = 10.0
MIB = 2**20


def test_request_that_another_cancels_as_both_expire_does_not_stop_the_others() -> None:
    """As steps of one ensemble do that have the same model."""

    async def main() -> None:
        queue = WakeQueue(ModelConfig("m", "python"), Counts("m", "1"), lambda: None, lambda: None)
        late = InferRequest("m", "", "", (), deadline=monotonic())
        ended: asyncio.Future[InferResponse | None] = asyncio.get_running_loop().create_future()

        def queued(on_response: OnResponse) -> Call:
            call = Call(late, Checked(1, (), (), (), 0), on_response)
            call.runner = queue
            queue.submit(call)
            return call

        calls: list[Call] = []
        calls += [queued(lambda *_: calls[1].cancel()), queued(lambda *_: None)]
        queued(lambda response, final: ended.set_result(response))
        async with asyncio.timeout(PATIENCE_S):
            response = await ended
        assert response is not None
        assert response.error is not None
        assert TOO_LATE in response.error.text
        assert queue.waiting == 0

    asyncio.run(main())


HEAVY = """
    def initialize(self, args):
        self.weights = np.ones(120 * 2**20, dtype=np.uint8)
"""


@pytest.mark.slow
def test_requests_that_wait_for_memory_are_answered_before_their_model_is_unloaded(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    one = tensor("IN", [[1.0]])
    write(tmp_path / "r", "a", config(), HEAVY + SAME)
    write(tmp_path / "r", "b", config(), HEAVY + BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(tmp_path / "r", memory_bytes=260 * MIB) as server, asyncio.TaskGroup() as tasks:
            await server.load("a", {})
            await server.load("b", {})
            gate.touch()
            busy = server.ask("b", one)
            waiting = server.ask("a", one)
            tasks.create_task(server.unload("a", False))
            await until("it is being unloaded", lambda: server.states("a")["1"][0] == "UNLOADING")
            gate.unlink()
            assert numbers(await waiting.one()) == [[1.0]]
            await busy.one()

    asyncio.run(main())
