"""Every check notices a server that does wrong what it is about, and a server that does all right passes."""

import asyncio
from collections.abc import Callable

import httpx
import pytest
from tests.cli.conformance.honest import EXTENSIONS, answered, changed

from forebay.cli.conformance import anymodel, generic, run
from forebay.cli.conformance.check import Check, Level, Result, Verdict
from forebay.cli.conformance.server import HEADER_LENGTH, Server

Handler = Callable[[httpx.Request], httpx.Response]

MODEL = "/v2/models/m"
INFER = f"{MODEL}/infer"
CONFIG = f"{MODEL}/config"
STATS = f"{MODEL}/stats"
INDEX = "/v2/repository/index"
LIES: list[tuple[str, str, object, str]] = [
    (MODEL, "versions", "1", "metadata/models"),
    (CONFIG, "input.0.name", "OTHER", "extension/configuration"),
    (CONFIG, "output", [], "extension/configuration"),
    (STATS, "model_stats.0.name", "other", "extension/statistics"),
    (INDEX, "0.name", "other", "extension/index"),
    (INFER, "model_version", "7", "infer/names and datatypes"),
    (INFER, "model_version", 1, "infer/names and datatypes"),
    (INFER, "outputs.0", None, "infer/names and datatypes"),
    (INFER, "outputs.1.name", "FIRST", "infer/names and datatypes"),
    (INFER, "outputs.0.shape", [2], "infer/names and datatypes"),
    (INFER, "outputs.0.shape", [2, 1], "infer/names and datatypes"),
    (INFER, "outputs.0.data", [False, False], "infer/names and datatypes"),
    (INFER, "outputs.0.data", [None, None], "infer/names and datatypes"),
]
"""Path, place in the body, another value, and the check that is to notice."""


def _results(handler: Handler, extensions: list[str] = EXTENSIONS) -> dict[str, Result]:
    results: list[Result] = []

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server") as http:
            server = Server(http, models=["m"], extensions=extensions, may_infer=True)
            checks = [each for each in [*generic.checks(), *anymodel.checks()] if not each.grpc]
            await run.run(server, checks, {}, results.append)

    asyncio.run(main())
    return {each.name.removeprefix("any/"): each for each in results}


def _noticed(handler: Handler) -> dict[str, Level]:
    return {name: each.level for name, each in _results(handler).items() if each.verdict is Verdict.DEVIATES}


def test_honest_server_passes() -> None:
    assert {each.verdict for each in _results(answered, []).values()} == {Verdict.PASSED, Verdict.SKIPPED}
    results = _results(answered)
    assert [each for each in results.values() if each.verdict is Verdict.DEVIATES] == []
    skipped = {name for name, each in results.items() if each.verdict is Verdict.SKIPPED}
    assert skipped == {"extension/shared memory", "extension/settings"}


@pytest.mark.parametrize(("path", "place", "value", "name"), LIES)
def test_wrong_part_of_an_answer_is_noticed(path: str, place: str, value: object, name: str) -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        answer = answered(request)
        plain = answer.status_code == 200 and HEADER_LENGTH not in answer.headers
        return changed(answer, place, value) if request.url.path == path and plain else answer

    assert _noticed(lie).get(name) is Level.MUST


def test_error_without_text_is_noticed() -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        answer = answered(request)
        return changed(answer, "error", "") if answer.is_error else answer

    assert _noticed(lie).get("refuses/not JSON") is Level.MUST


def test_error_that_is_not_of_the_protocol_is_noticed_when_loading() -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/load"):
            return httpx.Response(500, text="Traceback")
        return answered(request)

    assert _noticed(lie) == {"extension/loading an unknown model": Level.MUST}


def test_bytes_behind_the_outputs_are_noticed() -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        answer = answered(request)
        if HEADER_LENGTH not in answer.headers:
            return answer
        length = answer.headers[HEADER_LENGTH]
        return httpx.Response(200, headers={HEADER_LENGTH: length}, content=answer.content + b"more")

    assert _noticed(lie) == {"infer/binary": Level.MUST}


def test_outputs_in_json_although_asked_for_in_binary_are_noticed() -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        text = request.content.replace(b'"binary_data_output": true', b'"binary_data_output": null')
        return answered(httpx.Request(request.method, request.url, headers=request.headers, content=text))

    assert _noticed(lie) == {"infer/binary": Level.SHOULD}


@pytest.mark.parametrize("action", ["ready", "infer"])
def test_taking_any_version_is_noticed(action: str) -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        absent = request.url.path == f"{MODEL}/versions/{generic.ABSENT_VERSION}/{action}"
        path = f"{MODEL}/{action}" if absent else request.url.path
        url = f"http://server{path}"
        return answered(httpx.Request(request.method, url, headers=request.headers, content=request.content))

    assert list(_noticed(lie)) == [{"ready": "metadata/unknown version", "infer": "infer/version"}[action]]


def test_refusing_the_version_that_is_served_is_noticed() -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        wrong = request.url.path == f"{MODEL}/versions/1/infer"
        return httpx.Response(404, json={"error": "no such version"}) if wrong else answered(request)

    assert _noticed(lie) == {"infer/version": Level.MUST}


def test_model_that_answers_differently_each_time_is_no_deviation() -> None:
    answers: list[int] = []

    def counting(request: httpx.Request) -> httpx.Response:
        answer = answered(request)
        if request.url.path != INFER or answer.is_error or HEADER_LENGTH in answer.headers:
            return answer
        answers.append(1)
        data = [len(answers), 0]
        return changed(answer, "outputs.0.data", data) if len(answer.json()["outputs"]) == 2 else answer

    results = _results(counting)
    assert [each for each in results.values() if each.verdict is Verdict.DEVIATES] == []
    assert results["infer/binary"].note == "m does not give the same answer twice"


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_model_with_halves_is_not_asked_in_json(side: str) -> None:
    def halves(request: httpx.Request) -> httpx.Response:
        answer = answered(request)
        if request.url.path.endswith("/infer"):
            return httpx.Response(400, json={"error": "FP16 data via JSON is not supported"})
        described = request.url.path in (MODEL, f"{MODEL}/versions/1")
        return changed(answer, f"{side}.0.datatype", "FP16") if described else answer

    results = _results(halves)
    infer = {each.verdict for name, each in results.items() if name.startswith("infer/")}
    assert infer == {Verdict.SKIPPED}


def test_suites_model_that_cannot_be_loaded_is_a_deviation() -> None:
    async def nothing(server: Server) -> None:
        return None

    results: list[Result] = []

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answered), base_url="http://server") as http:
            checks = [Check(name, nothing, ("m", "absent")) for name in ("one", "other")]
            await run.run(Server(http), checks, {}, results.append)

    asyncio.run(main())
    assert [(each.name, each.verdict) for each in results] == [
        ("loading m, absent", Verdict.DEVIATES),
        ("one", Verdict.SKIPPED),
        ("other", Verdict.SKIPPED),
    ]
    assert "/v2/repository/models/absent/load does not exist" in results[0].found


def test_server_that_is_gone_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BACK_TIMEOUT_S", 1)
    asked: list[str] = []

    async def nothing(server: Server) -> None:
        return None

    def gone(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise httpx.ConnectError("refused", request=request)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(gone), base_url="http://server") as http:
            await run.run(Server(http), [Check(name, nothing, (name,)) for name in "abc"], {}, lambda _: None)

    asyncio.run(main())
    assert len(asked) == 2 + 1 + 1
