"""Random loads, reloads, unloads, crashes and requests: every request ends once, with a correct result."""

import asyncio
import contextlib
import os
import signal
import tempfile
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.modelserver.models.rig import PendingRequest, Server, config, numbers, serving, tensor, write

from forebay.core.serving.errors import Kind, Refused

STEPS_MAX = 14
TURNS = st.sampled_from([0, 10, 200, 2000])
"""Of the event loop, from one step to the next."""
FATES = {Kind.UNAVAILABLE, Kind.NOT_FOUND}
"""What a client may be told while models come and go: try again, or that there is none."""
SOURCE = """
    def answer(self, request):
        return give(get(request) + {add})
"""
STEPS = st.sampled_from(
    ["load", "unload", "reload", "broken", "kill", "ask", "ask", "ask", "burst", "cancel", "wait"]
)


class _World:
    """What the test knows."""

    def __init__(self, root: Path, server: Server) -> None:
        self.root = root
        self.server = server
        self.asked: list[PendingRequest] = []
        self.cancelled: list[PendingRequest] = []
        self.added = {0}
        """What versions of the model that have ever served add to their input."""

    def ask(self) -> None:
        with contextlib.suppress(Refused):
            self.asked.append(self.server.ask("m", tensor("IN", [[100.0]])))

    async def do(self, step: str, number: int) -> None:
        server = self.server
        match step:
            case "load":
                with contextlib.suppress(Refused):  # it may be broken
                    await server.load("m", {})
            case "unload":
                await server.unload("m", False)
            case "reload":
                self.added.add(number)
                write(self.root, "m", config("dynamic_batching {}"), SOURCE.replace("{add}", str(number)))
                with contextlib.suppress(Refused):  # another step may have broken it meanwhile
                    await server.load("m", {})
            case "broken":
                write(self.root, "m", config(), "    def initialize(self, args):\n        raise ValueError(1)\n")
            case "kill":
                for model in server.index(True):
                    for pid in server.pids(model.name):
                        os.kill(pid, signal.SIGKILL)
            case "burst":
                for _ in range(20):
                    self.ask()
            case "cancel" if self.asked:
                asked = self.asked.pop()
                assert asked.call is not None
                if not asked.ended.is_set():
                    asked.call.cancel()
                    self.cancelled.append(asked)
            case "wait" if self.asked:
                asked = self.asked.pop(0)  # no other step cancels it now
                await asked.all()
                self.asked.append(asked)
            case _:
                self.ask()


@settings(max_examples=4, phases=[Phase.generate])
@given(st.lists(st.tuples(STEPS, TURNS), min_size=6, max_size=STEPS_MAX))
def test_every_request_ends_once_with_a_correct_result_under_any_sequence_of_events(
    steps: list[tuple[str, int]],
) -> None:
    async def main(root: Path) -> None:
        write(root, "m", config("dynamic_batching {}"), SOURCE.replace("{add}", "0"))
        async with serving(root, startup=("m",)) as server:
            world = _World(root, server)
            doing = []
            async with asyncio.TaskGroup() as tasks:
                for number, (step, turns) in enumerate(steps):
                    doing.append(tasks.create_task(world.do(step, number + 1)))
                    for _ in range(turns):
                        await asyncio.sleep(0)
            for asked in world.asked:
                response = await asked.one()
                if response.error is None:
                    assert numbers(response)[0][0] - 100 in world.added
                else:
                    assert response.error.kind in FATES, response.error.text
            write(root, "m", config(), SOURCE.replace("{add}", "0.5"))
            await server.load("m", {})
            assert await server.numbers("m", tensor("IN", [[1.0]])) == [[1.5]]
            assert not any(asked.ended.is_set() for asked in world.cancelled)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
