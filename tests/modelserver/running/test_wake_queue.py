"""The queue of a sleeping model."""

import asyncio
from time import monotonic

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.modelserver.models.running.call import Call
from forebay.modelserver.models.running.counting import Counts
from forebay.modelserver.models.running.inputs import Checked
from forebay.modelserver.models.running.wake_queue import TOO_LATE, WakeQueue

PATIENCE_S = 10.0


def test_request_that_another_cancels_as_both_expire_does_not_stop_the_others() -> None:
    """As steps of one ensemble do that have the same model."""

    async def main() -> None:
        queue = WakeQueue(ModelConfig("m", "python"), Counts("m", "1"), lambda: None, lambda: None)
        late = InferRequest("m", "", "", (), deadline=monotonic())
        ended: asyncio.Future[InferResponse | None] = asyncio.get_running_loop().create_future()

        def queued(on_response: OnResponse) -> Call:
            call = Call(late, Checked(1, (), (), ()), on_response)
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
