"""What a server leaves behind that is killed."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.modelserver.models.rig import alive, until

pytestmark = pytest.mark.slow

SERVER = """
import asyncio, sys
from pathlib import Path
from tests.modelserver.models.rig import PREAMBLE, SAME, config, serving
async def scene():
    async with serving(Path(sys.argv[1]), startup=()) as server:
        await server.load("m", {"config": '{"backend": "python"}', "file:1/model.py": (PREAMBLE + SAME).encode()})
        print(*server.pids("m"), flush=True)
        await asyncio.Event().wait()
asyncio.run(scene())
"""


def test_no_process_and_no_file_of_a_model_that_a_client_has_sent(tmp_path: Path) -> None:
    repository, temporary = tmp_path / "repository", tmp_path / "temporary"
    for folder in (repository, temporary):
        folder.mkdir()
    (temporary / "forebay-model-another").mkdir()

    async def scene() -> None:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(repository)],
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        with server:
            assert server.stdout is not None
            pid = int(await asyncio.to_thread(server.stdout.readline))
            assert len(list(temporary.glob("forebay-model-*/1/model.py"))) == 1
            server.kill()
        await until("its process ends", lambda: not alive(pid))
        await until("its folder goes", lambda: len(list(temporary.glob("forebay-model-*"))) == 1)

    asyncio.run(scene())
    assert (temporary / "forebay-model-another").exists()
