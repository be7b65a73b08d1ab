"""Log settings that clients may change while the server runs, with Triton's names."""

from collections.abc import Mapping
from typing import Any, Final

import structlog

from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip.fields import NOT_BOOLEAN, NOT_STRING, NOT_UNSIGNED, UINT64_MAX, invalid

FORMATS: Final = ("default", "ISO8601")
"""Triton's line formats. Our lines are JSON with ISO 8601 times either way."""
_SWITCHES: Final = ("log_info", "log_warning", "log_error")
_SWITCH_OF: Final = {"info": "log_info", "warning": "log_warning", "error": "log_error", "critical": "log_error"}


class LogSettings:
    """Log switches, and the structlog processor that applies them. Everything raises `Refused`."""

    def __init__(self, *, file: str = "", verbose: int = 0) -> None:
        self._values: dict[str, Any] = {
            "log_file": file,
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": verbose,
            "log_format": FORMATS[0],
        }

    @property
    def verbose(self) -> int:
        """From 1 on, every request is logged."""
        return int(self._values["log_verbose_level"])

    def __call__(self, _: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Drop lines that are switched off."""
        switch = _SWITCH_OF.get(method)
        wanted = self.verbose > 0 if switch is None else self._values[switch]
        if not wanted:
            raise structlog.DropEvent
        return event

    def install(self) -> None:
        """Apply the switches to all log lines of this process. Call `obs.log.configure` first."""
        structlog.configure(processors=[self, *structlog.get_config()["processors"]])

    def document(self) -> Mapping[str, Any]:
        """The settings as the protocol shows them."""
        return dict(self._values)

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply changes, all or none. None and unknown names are ignored."""
        fresh = dict(self._values)
        for name, value in changes.items():
            if value is not None and name in fresh:
                _check(name, value)
                fresh[name] = value
        self._values = fresh


def _check(name: str, value: Any) -> None:
    if name == "log_file":
        text = "log file location can not be updated through network protocol"
        raise Refused(Kind.UNSUPPORTED, text)
    if name in _SWITCHES:
        if type(value) is not bool:
            raise invalid(NOT_BOOLEAN)
    elif name == "log_verbose_level":
        if type(value) is not int or not 0 <= value <= UINT64_MAX:
            raise invalid(NOT_UNSIGNED)
    elif type(value) is not str:
        raise invalid(NOT_STRING)
    elif value not in FORMATS:
        raise Refused(Kind.UNAVAILABLE, f"invalid argument for --log_format, got: {value[:100]}")
