"""Structured logs: one JSON object a line, and no disaster where they cannot be written."""

import contextlib
import io
import json
import logging

from forebay.obs import log


def test_a_line_is_one_json_object_with_what_was_bound() -> None:
    stream = io.StringIO()

    log.configure(stream, process="gateway").warning("replica unusable", replica="chat-0")

    line = json.loads(stream.getvalue())
    assert (line["event"], line["process"], line["replica"], line["level"]) == (
        "replica unusable",
        "gateway",
        "chat-0",
        "warning",
    )


def test_what_libraries_warn_of_is_a_line_like_any_other() -> None:
    first, stream = io.StringIO(), io.StringIO()
    log.configure(first)
    log.configure(stream, process="worker")
    logging.getLogger("some.library").warning("odd: %s", "x")
    logging.getLogger("some.library").info("not that")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("some.library").exception("it broke")
    bad = logging.LogRecord("some.library", logging.WARNING, "", 0, "%d", ("no number",), None)
    logging.getLogger().handlers[-1].handle(bad)

    warned, broke, unclear = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (warned["event"], warned["level"], warned["library"], warned["process"]) == (
        "odd: x", "warning", "some.library", "worker",
    )  # fmt: skip
    assert (broke["event"], broke["level"]) == ("it broke", "error")
    assert "ValueError: why" in broke["exception"]
    assert unclear["event"] == "%d"
    assert first.getvalue() == ""


def test_a_long_value_is_cut() -> None:
    stream = io.StringIO()

    log.configure(stream).info("odd", text="x" * 100_000)

    assert len(stream.getvalue()) < log.LINE_BYTES_MAX + 1000


def test_a_full_disk_costs_the_line_and_nothing_else() -> None:
    with open("/dev/full", "w", buffering=1) as full:
        log.configure(full).info("never written")
        with contextlib.suppress(OSError):
            full.close()


def test_so_does_a_closed_stream() -> None:
    stream = io.StringIO()
    logger = log.configure(stream)
    stream.close()
    logger.error("never written")
