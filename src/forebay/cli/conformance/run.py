"""Runs checks against a server, grouped by the suite's models that they need, which are loaded before and unloaded
after."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final

import httpx

from forebay.cli.conformance.check import Check, Deviation, Json, Level, Result, Skip, Verdict, compared, shown
from forebay.cli.conformance.generic import ABSENT
from forebay.cli.conformance.server import Server

CHECK_TIMEOUT_S: Final = 90.0
BACK_TIMEOUT_S: Final = 30.0
"""How long to wait for a crashed server to be restarted."""
GONE: Final = f"the server has not responded for {BACK_TIMEOUT_S:g} s"

READY: Final = "READY"
NO_ANSWER: Final[Mapping[str, Json]] = {"answer": "none"}
"""The observation of a check whose request crashed the server, or was never answered."""

Recorded = Mapping[str, Json]
OnResult = Callable[[Result], None]


class Absent(Exception):  # noqa: N818 - states the condition
    """The server does not know the model; lists the ready ones."""

    def __init__(self, name: str, ready: Sequence[str]) -> None:
        super().__init__(f"{name} is not ready; ready models: {', '.join(ready) or 'none, or unknown'}")


class KeyRequired(Exception):  # noqa: N818 - states the condition
    """The server requires a valid API key."""


async def discover(server: Server) -> None:
    """Discover the server's extensions and models.

    Raises httpx.HTTPError if the server does not respond, `KeyRequired`, and `Absent` if it does not know a given
    model.
    """
    about = (await server.get("/v2")).json
    answer = await server.get(f"/v2/models/{ABSENT}")  # gateways tell everyone what they are
    if answer.status in (401, 403):
        raise KeyRequired(f"HTTP {answer.status}, {shown(answer.body.decode('latin-1'))}")
    if isinstance(about, dict):
        server.name = str(about.get("name", ""))
        server.extensions = [each for each in about.get("extensions", ()) if isinstance(each, str)]
    for name in server.models:
        if (await server.get(f"/v2/models/{name}")).status in (400, 404):
            raise Absent(name, sorted(await ready_models(server)))
    if not server.models:
        server.models = sorted(await ready_models(server))


async def ready_models(server: Server) -> list[str]:
    """Models that are ready according to the index; none if the server has no index."""
    index = (await server.post("/v2/repository/index", {})).json
    if not isinstance(index, list):
        return []
    return [each["name"] for each in index if isinstance(each, dict) and each.get("state") == READY]


async def run(server: Server, checks: Iterable[Check], recorded: Recorded, on_result: OnResult) -> dict[str, Json]:
    """Run the checks in order of the models they need. Returns the observations, by name of the check.

    Models that cannot be loaded are a result of their own: their checks are skipped, which alone is no failure.
    """
    observations: dict[str, Json] = {}
    troubled: set[tuple[str, ...]] = set()
    gone = False
    for models, group in groupby(checks, key=lambda check: check.models):
        loaded = await _load(server, models, 0 if gone else BACK_TIMEOUT_S)
        gone = loaded == GONE
        if loaded is not None and models not in troubled:
            troubled.add(models)
            name = f"loading {', '.join(models)}" if models else "health/any answer"
            on_result(Result(name, Verdict.DEVIATES, Level.MUST, "ready models" if models else "an answer", loaded))
        for check in group:
            result, observation = await _one(server, check, recorded, loaded)
            on_result(result)
            if observation is not None:
                observations[check.name] = observation
            if observation == NO_ANSWER:
                loaded = await _load(server, models, BACK_TIMEOUT_S)
        if loaded is None:
            await _unload(server, models)
    return observations


def harmful_last(checks: Iterable[Check], recorded: Recorded) -> list[Check]:
    """The checks, those last whose request the recorded server did not survive, so that others are run before."""
    return sorted(checks, key=lambda check: recorded.get(check.name) == NO_ANSWER)


async def start_over(server: Server, models: Iterable[str]) -> None:
    """Unload those of the models that are ready: the suite is about models that are loaded when they are needed."""
    await _unload(server, sorted({*models}.intersection(await ready_models(server))))


async def _load(server: Server, models: Sequence[str], patience_s: float) -> str | None:
    """Load models that are not ready. Returns the problem; None: all are ready."""
    if not await _answers(server, patience_s):
        return GONE
    try:
        ready = await ready_models(server) if models else ()
        for model in sorted({*models}.difference(ready)):
            answer = await server.post(f"/v2/repository/models/{model}/load", {})
            if answer.status != 200:
                return f"model {model} cannot be loaded: {shown(answer.body.decode('latin-1'))}"
    except httpx.TransportError as error:
        return f"loading {', '.join(models)}: no answer ({type(error).__name__})"
    return None


async def _unload(server: Server, models: Sequence[str]) -> None:
    with suppress(httpx.TransportError):
        for model in models:
            await server.post(f"/v2/repository/models/{model}/unload", {})


async def _one(server: Server, check: Check, recorded: Recorded, unloaded: str | None) -> tuple[Result, Json]:
    skip = unloaded
    if check.grpc and server.rpc is None:
        skip = "no gRPC address was given (--grpc)"
    if check.metrics and server.metrics is None:
        skip = "no metrics URL was given (--metrics)"
    if skip:
        return Result(check.name, Verdict.SKIPPED, check.level, note=skip), None
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            observation = await check.run(server)
    except Skip as reason:
        return Result(check.name, Verdict.SKIPPED, check.level, note=str(reason)), None
    except Deviation as found:
        level = Level.SHOULD if check.level is Level.SHOULD else found.level
        return Result(check.name, Verdict.DEVIATES, level, found.expected, found.found), None
    except httpx.TransportError as error:
        found_text = f"no answer ({type(error).__name__})"
        return Result(check.name, Verdict.DEVIATES, check.level, "an answer", found_text), dict(NO_ANSWER)
    except TimeoutError:
        found_text = f"nothing within {CHECK_TIMEOUT_S:g} s"
        return Result(check.name, Verdict.DEVIATES, check.level, "an answer", found_text), None
    except (httpx.HTTPError, AttributeError, LookupError, TypeError, ValueError) as error:
        found_text = f"{type(error).__name__}: {error}"
        return Result(check.name, Verdict.DEVIATES, check.level, "a well-formed answer", shown(found_text)), None
    if observation is None or check.name not in recorded:
        return Result(check.name, Verdict.PASSED, check.level, note="" if observation is None else "not recorded"), (
            observation
        )
    expected = recorded[check.name]
    if expected == NO_ANSWER:
        return Result(check.name, Verdict.PASSED, check.level, note="the recorded server gave no answer"), observation
    return compared(check, expected, observation), observation


async def _answers(server: Server, patience_s: float) -> bool:
    """Whether the server responds, after waiting for a restart if necessary."""
    for left in range(round(patience_s), -1, -1):
        try:
            await server.get("/v2/health/live")
        except httpx.TransportError:
            if left:
                await asyncio.sleep(1)
        else:
            return True
    return False
