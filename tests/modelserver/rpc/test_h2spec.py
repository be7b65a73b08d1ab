"""Conformance of the HTTP/2 server, by the tool h2spec (https://github.com/summerwind/h2spec, built with Go).

H2SPEC names the program if it is not in PATH. `tests/wire/http2` checks the same without it; here the misbehaving
clients are written by others.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.net.rig import run

from forebay.net.http2 import Http2Server, Keepalive
from forebay.wire.http2.headers import Header, well_formed
from forebay.wire.http2.session import Session
from forebay.wire.http2.streams import Stream

H2SPEC = Path(os.environ.get("H2SPEC") or shutil.which("h2spec") or "h2spec")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not H2SPEC.exists(), reason="h2spec is not there: H2SPEC says where"),
]
PATIENCE_S = 240.0
CASES_MIN = 140
HEAD = b"\x88"
"""`:status: 200`, as HPACK has it."""
TAIL = b"\0\x01a\x01b"

Headers = Sequence[Header]


class Greeting:
    """Answers each request with a few words."""

    def __init__(self, session: Session[Headers], stream: Stream) -> None:
        self._session = session
        self._stream = stream

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        if ended:
            self._session.answer(self._stream, HEAD, b"good day to you", TAIL)

    def on_reset(self) -> None:
        """Nobody wants to be greeted."""


async def run_h2spec(report: Path) -> None:
    server: Http2Server[Headers] = Http2Server(
        lambda headers: headers if well_formed(headers) else None,
        lambda session, stream, _: Greeting(session, stream),
        Keepalive(strikes_max=0),
    )
    await server.start("127.0.0.1", 0)
    try:
        words = ["--strict", "--host", "127.0.0.1", "--port", str(server.port), "--junit-report", str(report)]
        tool = await asyncio.create_subprocess_exec(H2SPEC, *words, stdout=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await tool.wait()
        finally:
            if tool.returncode is None:
                tool.kill()
                await tool.wait()
    finally:
        server.close()


@pytest.mark.timeout(PATIENCE_S + 30)
def test_server_passes_h2spec(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    run(run_h2spec(report))
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) >= CASES_MIN
    wrong = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    assert [f"{each.get('package')} {each.get('classname')}" for each in wrong] == []
