"""Structured logs: one JSON object per line on standard error. Prompts, responses and headers are never logged."""

import logging
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

LINE_BYTES_MAX = 16_384


def _bounded(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Truncate long values, so that no request can write an arbitrarily long line."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > LINE_BYTES_MAX:
            event[key] = value[:LINE_BYTES_MAX] + "…"
    return event


class _Sink:
    """A stream that drops what it cannot write: a full disk or a closed stream must cost log lines, not requests."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


class _Libraries(logging.Handler):
    """Logs warnings of libraries in our format: a line that is not JSON breaks log readers."""

    def __init__(self, logger: structlog.stdlib.BoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; if the message does not match its arguments, without these."""
        level = logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            text = str(record.msg)
        self._logger.log(level, text, library=record.name, exc_info=record.exc_info)


def configure(stream: TextIO | None = None, **bound: str) -> structlog.stdlib.BoundLogger:
    """Configure logging of this process and return its logger; `bound` (process, replica, …) is on every line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _bounded,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Sink(stream or sys.stderr))),
        cache_logger_on_first_use=False,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(**bound)
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _Libraries)]:
        root.removeHandler(handler)
    root.addHandler(_Libraries(logger))
    return logger
