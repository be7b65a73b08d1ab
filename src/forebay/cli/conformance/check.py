"""The definition of a check, and the comparison of observations."""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from forebay.cli.conformance.server import Server

Json = Any
"""A JSON value, as `json.loads` returns it."""

TEXT: Final = "error"
"""Fields with this name are messages for people: having one is a MUST, its wording a SHOULD."""

_FOLDERS: Final = re.compile(r"(?:/[\w.+-]+)+/(?=models/|\d+/)|(?<=['\" ])/tmp/[\w.+-]+(?:/[\w.+-]+)*")

_CLIENT_ERROR: Final = re.compile(
    "attempt to |parse the request JSON|Shape does not match|should be at least|Unable to open shared memory|"
    "failed to poll from model repository|creating Triton parameter|failed to create directory|failed to open"
)
"""Messages that Triton sends with status 500 although the request is at fault: 400 is accepted too."""

SHOWN_MAX: Final = 300
"""Maximum length of a value in tables, in characters."""


class Level(StrEnum):
    """Severity of a deviation."""

    MUST = "MUST"
    """Clients break."""
    SHOULD = "SHOULD"
    """Clients see something unusual: other words, another order."""


class Verdict(StrEnum):
    """The result of a check."""

    PASSED = "passed"
    DEVIATES = "deviates"
    KNOWN = "known"
    """It deviates, as documented for this server."""
    SKIPPED = "skipped"


class Deviation(Exception):  # noqa: N818 - not an error of ours
    """A check found something else than it expected."""

    def __init__(self, expected: str, found: object, level: Level = Level.MUST) -> None:
        super().__init__(f"expected {expected}, found {found!r}")
        self.expected = expected
        self.found = shown(found)
        self.level = level


class Skip(Exception):  # noqa: N818 - not an error either
    """The check does not apply to this server; the text says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One behaviour to check.

    `run` raises `Deviation`, or returns an observation that is compared with the recorded one of the same name, or
    None if it checks its own expectation. `models` are loaded from the suite's repository before.
    """

    name: str
    run: Callable[["Server"], Awaitable[Json]]
    models: tuple[str, ...] = ()
    grpc: bool = False
    """It needs a gRPC address."""
    metrics: bool = False
    """It needs a metrics URL."""
    level: Level = Level.MUST


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check. `expected` and `found` are for people; `note`: why it was skipped, or deviates."""

    name: str
    verdict: Verdict
    level: Level
    expected: str = ""
    found: str = ""
    note: str = ""


def without_paths(text: Json) -> Json:
    """A text without the server's own paths."""
    return _FOLDERS.sub("/…/", text) if isinstance(text, str) else text


def shown(value: object) -> str:
    """A value truncated to `SHOWN_MAX` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 1]}…"


def differences(expected: Json, found: Json, path: str = "") -> Iterator[tuple[str, Json, Json, bool]]:
    """The differences of two observations: path, both values, and whether only the wording differs."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if _is_client_error(expected, found):
            expected = {**expected, **{key: found[key] for key in ("status", "code") if key in found}}
        for key in sorted({*expected, *found}):
            inner = f"{path}.{key}" if path else key
            if key not in expected or key not in found:
                yield inner, expected.get(key, "(absent)"), found.get(key, "(absent)"), False
            else:
                yield from differences(expected[key], found[key], inner)
    elif _is_list(expected) and _is_list(found) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif expected != found or isinstance(expected, bool) != isinstance(found, bool):
        wording = path.rsplit(".", 1)[-1].split("[", maxsplit=1)[0] == TEXT and bool(expected) and bool(found)
        yield path, expected, found, wording and isinstance(expected, str) and isinstance(found, str)


def _is_client_error(expected: Mapping[str, Json], found: Mapping[str, Json]) -> bool:
    """Whether the server reports a client error where Triton wrongly reports a server error."""
    theirs = (found.get("status"), found.get("code")) in ((400, None), (None, "INVALID_ARGUMENT"))
    ours = (expected.get("status"), expected.get("code")) in ((500, None), (None, "INTERNAL"))
    return theirs and ours and bool(_CLIENT_ERROR.search(str(expected.get(TEXT))))


def _is_list(value: Json) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def compared(check: Check, expected: Json, found: Json) -> Result:
    """The result of comparing an observation with the recorded one."""
    different = list(differences(expected, found))
    if not different:
        return Result(check.name, Verdict.PASSED, check.level)
    only_words = all(wording for *_, wording in different)
    level = Level.SHOULD if only_words else check.level
    lines = [(f"{path}: " if path else "", one, other) for path, one, other, _ in different]
    return Result(
        check.name,
        Verdict.DEVIATES,
        level,
        "\n".join(path + shown(one) for path, one, _ in lines),
        "\n".join(path + shown(other) for path, _, other in lines),
    )
