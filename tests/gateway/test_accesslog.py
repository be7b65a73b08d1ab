"""The access log is bounded and never in the way."""

import asyncio
import errno
import fcntl
import io
import os

import msgspec

from forebay.gateway.records.accesslog import HELD_LINES_MAX, AccessLog
from forebay.gateway.records.lines import Line


def line(n: int) -> Line:
    return Line("request", 1.0, f'id-"{n}"', "/v1/chat/completions", "m", 200, "ok", n)


class FullDisk(io.BytesIO):
    """Refuses writes while `full`."""

    full = True

    def write(self, data: object) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)  # type: ignore[arg-type]


def test_access_log_lines_are_json_without_empty_fields() -> None:
    stream = io.BytesIO()
    log = AccessLog(stream)
    log.add(line(1))
    log.add(line(2))
    log.flush()
    log.flush()
    first, second = (msgspec.json.decode(text) for text in stream.getvalue().splitlines())
    assert first["request_id"] == 'id-"1"'
    assert second["ms"] == 2
    assert "replica" not in first


def test_access_log_overflow_is_dropped_and_counted() -> None:
    stream = io.BytesIO()
    log = AccessLog(stream)
    for n in range(HELD_LINES_MAX + 5):
        log.add(line(n))
    log.flush()
    lines = stream.getvalue().splitlines()
    assert len(lines) == HELD_LINES_MAX + 1
    assert msgspec.json.decode(lines[-1])["lines"] == 5


def test_full_disk_loses_only_access_log_lines() -> None:
    stream = FullDisk()
    log = AccessLog(stream)
    for n in range(3):
        log.add(line(n))
        log.flush()
    stream.full = False
    log.add(line(3))
    log.flush()
    assert [msgspec.json.decode(text).get("lines") for text in stream.getvalue().splitlines()] == [None, 3]


def test_a_full_log_pipe_blocks_no_request_and_loses_nothing() -> None:
    reading, writing = os.pipe()
    count = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) // 20  # lines that are five times what the pipe takes

    async def main() -> list[bytes]:
        async with asyncio.TaskGroup() as group:
            with os.fdopen(reading, "rb") as pipe:
                with os.fdopen(writing, "wb") as stream:
                    log = AccessLog(stream)
                    for n in range(count):
                        log.add(line(n))
                    flushing = group.create_task(log.flush_aside())
                    first = await asyncio.to_thread(pipe.readline)
                    log.add(line(-1))
                    assert not flushing.done()
                    rest = group.create_task(asyncio.to_thread(pipe.readlines))
                    await flushing
                    log.flush()
                return [first, *await rest]

    assert [msgspec.json.decode(read)["ms"] for read in asyncio.run(main())] == [*range(count), -1]
