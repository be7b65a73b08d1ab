"""What Python models do to their process: forks, exit handlers, closed files; what cancelled requests are told."""

import asyncio
from pathlib import Path

import pytest
from tests.modelserver.models.rig import config, serving, tensor, until, write

from forebay.core.serving.errors import Kind, Refused

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
