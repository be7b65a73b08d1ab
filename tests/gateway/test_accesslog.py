"""The access log is bounded and never in the way."""

import errno
import io

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


def test_lines_are_json_and_leave_out_what_says_nothing() -> None:
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


def test_more_lines_than_can_be_held_are_dropped_and_counted() -> None:
    stream = io.BytesIO()
    log = AccessLog(stream)
    for n in range(HELD_LINES_MAX + 5):
        log.add(line(n))
    log.flush()
    lines = stream.getvalue().splitlines()
    assert len(lines) == HELD_LINES_MAX + 1
    assert msgspec.json.decode(lines[-1])["lines"] == 5


def test_a_full_disk_costs_lines_but_nothing_else() -> None:
    stream = FullDisk()
    log = AccessLog(stream)
    log.add(line(1))
    log.flush()
    stream.full = False
    log.add(line(2))
    log.flush()
    assert [msgspec.json.decode(text).get("lines") for text in stream.getvalue().splitlines()] == [None, 1]
