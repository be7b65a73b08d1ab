"""The conformance suite itself: comparison, tensor encoding, its repository, and verdicts on misbehaving servers."""

import asyncio
import io
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forebay.cli.conformance import anymodel, command, generic, repository, run
from forebay.cli.conformance.cases import all_checks, observing
from forebay.cli.conformance.cases.generate import events
from forebay.cli.conformance.check import Check, Json, Level, Result, Skip, Verdict, compared, differences
from forebay.cli.conformance.known import DIFFERENCES, without_known
from forebay.cli.conformance.server import Answer, Server, client
from forebay.cli.conformance.tensors import FORMATS, packed, unpacked
from forebay.cli.settings import UserError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


NAMED = st.dictionaries(st.sampled_from(("status", "code", "error")), JSON)


@given(NAMED, NAMED)
def test_unequal_values_differ(one: Json, other: Json) -> None:
    assert bool(list(differences(one, other))) or one == other or one.get("status") == 500


async def _nothing(server: Server) -> Json:
    return None


ANY = Check("any", _nothing)


@given(JSON)
def test_value_equals_itself(value: Json) -> None:
    assert list(differences(value, value)) == []


@pytest.mark.parametrize(
    ("expected", "found", "paths", "level"),
    [
        ({"status": 400, "error": "no such"}, {"status": 400, "error": "absent"}, ["error"], Level.SHOULD),
        ({"status": 400, "error": "no such"}, {"status": 500, "error": "absent"}, ["error", "status"], Level.MUST),
        ({"status": 400, "error": "no such"}, {"status": 400, "error": ""}, ["error"], Level.MUST),
        ({"status": 400, "error": "no such"}, {"status": 400}, ["error"], Level.MUST),
        ([{"a": [1, 2]}], [{"a": [1, 3]}], ["[0].a[1]"], Level.MUST),
        ([1, 2], [1], [""], Level.MUST),
        ({"data": [1]}, {"data": [True]}, ["data[0]"], Level.MUST),
        ({"data": [1]}, {"data": [1.0]}, [], None),
        ({"status": 500, "error": "attempt to x"}, {"status": 400, "error": "attempt to x"}, [], None),
        (
            {"code": "INTERNAL", "error": "attempt to x"},
            {"code": "INVALID_ARGUMENT", "error": "x"},
            ["error"],
            Level.SHOULD,
        ),
        (
            {"status": 500, "error": "the model failed"},
            {"status": 400, "error": "x"},
            ["error", "status"],
            Level.MUST,
        ),
        ({"status": 500, "error": "attempt to x"}, {"status": 200}, ["error", "status"], Level.MUST),
    ],
)
def test_differences_are_named_and_only_wording_is_a_should(
    expected: Json, found: Json, paths: list[str], level: Level | None
) -> None:
    assert [path for path, *_ in differences(expected, found)] == paths
    result = compared(ANY, expected, found)
    assert (result.verdict, result.level) == ((Verdict.DEVIATES, level) if level else (Verdict.PASSED, ANY.level))


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_bytes_tensors_round_trip(words: list[bytes]) -> None:
    assert unpacked("BYTES", packed("BYTES", words)) == [word.decode("latin-1") for word in words]


@pytest.mark.parametrize("datatype", [each for each in repository.TYPES if each != "BYTES"])
def test_numeric_tensors_round_trip(datatype: str) -> None:
    values = [True, False] if datatype == "BOOL" else [0, 1, 2]
    data = packed(datatype, values)
    assert unpacked(datatype, data) == values
    assert set(FORMATS) == set(repository.TYPES) - {"BYTES"}


def test_a_repository_is_written_once(tmp_path: Path) -> None:
    repository.write(tmp_path / "models")
    written = {path.name for path in (tmp_path / "models").iterdir()}
    assert written == set(repository.MODELS)
    assert "Sum and difference" in (tmp_path / "models/add_sub/1/model.py").read_text()
    with pytest.raises(FileExistsError):
        repository.write(tmp_path / "models")


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(UserError, match=r"file.* cannot be written: Not a directory"):
        command.conformance(repository_out=tmp_path / "file" / "models")


def test_every_check_has_its_own_name_and_models_of_the_repository() -> None:
    checks = [*all_checks(), *generic.checks(), *anymodel.checks()]
    assert len({check.name for check in checks}) == len(checks)
    assert {name for check in checks for name in check.models} <= set(repository.MODELS)


def test_every_recorded_answer_belongs_to_a_check() -> None:
    recorded = command.recorded()["checks"]
    assert set(recorded) <= {check.name for check in all_checks()}


Handler = Callable[[httpx.Request], httpx.Response]


async def _results(handler: Handler, checks: list[Check], **about: object) -> list[Result]:
    results: list[Result] = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server") as http:
        server = Server(http, models=["m"], extensions=["model_configuration", "statistics", "model_repository"])
        await run.run(server, checks, {}, results.append)
    return results


NONSENSE: dict[str, Handler] = {
    "hello": lambda _: httpx.Response(200, text="hello"),
    "a list": lambda _: httpx.Response(200, json=[]),
    "a number": lambda _: httpx.Response(200, json=7),
    "an object": lambda _: httpx.Response(200, json={}),
    "null fields": lambda _: httpx.Response(200, json={"name": None, "inputs": None, "outputs": [None]}),
    "not found": lambda _: httpx.Response(404, json={"error": "not found"}),
    "an error of its own": lambda _: httpx.Response(500, text="Traceback"),
    "a redirection": lambda _: httpx.Response(302, headers={"location": "http://elsewhere"}),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_answers_are_deviations(kind: str) -> None:
    results = asyncio.run(_results(NONSENSE[kind], generic.checks()))
    deviating = [each for each in results if each.verdict is Verdict.DEVIATES and each.level is Level.MUST]
    assert len(deviating) > len(results) // 4
    assert not any(each.verdict is Verdict.PASSED for each in results if each.name == "any/metadata/models")


@pytest.mark.parametrize("kind", NONSENSE)
def test_checks_do_not_crash_on_nonsense_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(delay_s: float, result: None = None) -> None:
        return None

    monkeypatch.setattr(asyncio, "sleep", at_once)
    checks = [check for check in all_checks() if not check.grpc]
    results = asyncio.run(_results(NONSENSE[kind], checks))
    assert len([each for each in results if not each.name.startswith("loading ")]) == len(checks)


def _refuses(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def test_unreachable_server_is_reported_once_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BACK_TIMEOUT_S", 0)
    results = asyncio.run(_results(_refuses, generic.checks()[:2]))
    assert [each.verdict for each in results] == [Verdict.DEVIATES, Verdict.SKIPPED, Verdict.SKIPPED]


def test_missing_model_is_reported_with_the_ready_ones() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v2":
            return httpx.Response(200, json={"name": "some", "extensions": []})
        if request.url.path == "/v2/repository/index":
            return httpx.Response(200, json=[{"name": "there", "version": "1", "state": "READY"}])
        return httpx.Response(404, json={"error": "no"})

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
            await run.discover(Server(http, models=["nope"]))

    with pytest.raises(run.Absent, match="nope is not ready; ready models: there"):
        asyncio.run(main())


def test_intended_differences_are_distinguished_from_deviations() -> None:
    name, why = next(iter(DIFFERENCES.items()))
    given = [
        Result(name, Verdict.DEVIATES, Level.MUST),
        Result("any", Verdict.DEVIATES, Level.MUST),
        Result("any", Verdict.DEVIATES, Level.SHOULD),
        Result(name, Verdict.PASSED, Level.MUST),
    ]
    results = without_known(given)
    assert [each.verdict for each in results] == [
        Verdict.KNOWN, Verdict.DEVIATES, Verdict.KNOWN, Verdict.PASSED
    ]  # fmt: skip
    assert results[0].note == why
    stream = io.StringIO()
    command.show(results, Console(file=stream, width=120))
    assert "2 known differences of Forebay, see docs/triton.md" in stream.getvalue()
    assert "1 passed · 1 MUST and 0 SHOULD deviate" in stream.getvalue()


def test_output_with_null_parameters_has_its_data_in_the_json() -> None:
    output = {"name": "OUT", "datatype": "FP32", "shape": [1], "data": [7.0], "parameters": None}
    body = json.dumps({"model_name": "m", "outputs": [output]}).encode()
    assert Answer(200, {}, body).inferred()["outputs"] == [output]


def _asked_of(answers: int) -> tuple[list[int], str]:
    """Two requests to a server that closes each connection behind so many answers, and does not say so: what came."""

    def serve() -> None:
        for _ in range(answers + 1):
            connection, _ = listener.accept()
            with connection:
                for _ in range(answers):
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                connection.recv(65536)

    async def main() -> tuple[list[int], str]:
        statuses: list[int] = []
        async with client(f"http://127.0.0.1:{listener.getsockname()[1]}") as http:
            try:
                for _ in range(2):
                    statuses.append((await Server(http).get("/")).status)
            except httpx.TransportError as error:
                return statuses, type(error).__name__
        return statuses, ""

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        threads.submit(serve)
        return asyncio.run(main())


def test_only_closing_a_new_connection_is_an_error() -> None:
    assert _asked_of(1) == ([200, 200], "")
    assert _asked_of(0) == ([], "RemoteProtocolError")


@pytest.mark.parametrize("name", ["model_repository", "model_repository_extension"])
def test_extension_is_claimed_by_either_of_its_names(name: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url="http://server") as http:
            generic.claims(Server(http, extensions=[name]), "model_repository")
            with pytest.raises(Skip):
                generic.claims(Server(http, extensions=[name]), "statistics")

    asyncio.run(main())


def test_requests_that_end_the_recorded_server_are_sent_last() -> None:
    checks, recorded = all_checks(), command.recorded()["checks"]
    ordered = run.harmful_last(checks, recorded)
    harmful = [check for check in checks if recorded.get(check.name) == run.NO_ANSWER]
    assert "infer/json/shape huge" in {check.name for check in harmful}
    assert ordered == [*(check for check in checks if check not in harmful), *harmful]


def test_paths_of_the_server_are_removed_from_streamed_errors() -> None:
    body = b'data: {"error": "At:\\n  /srv/some/speak/1/model.py(15): execute"}\n\n'
    seen = events(Answer(400, {"content-type": "text/event-stream"}, body))
    assert seen["events"] == [{"error": "At:\n  /…/1/model.py(15): execute"}]


def test_failures_of_earlier_checks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "SETTLE_S", 0)
    counts = {"failure": 4, "success": 0}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            lines = [f'nv_inference_request_{name}{{model="broken"}} {count}' for name, count in counts.items()]
            return httpx.Response(200, text="\n".join(lines))
        if request.url.path.endswith("/infer"):
            counts["failure" if b"raise" in request.content else "success"] += 1
        return httpx.Response(200, json={})

    (check,) = [each for each in all_checks() if each.name == "metrics/broken"]
    seen = asyncio.run(_observation(answer, check))
    assert seen == {"nv_inference_request_failure{}": 1, "nv_inference_request_success{}": 1}


def test_failed_reload_does_not_depend_on_earlier_overrides() -> None:
    current = {"max_batch_size": 8}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/load"):
            config = json.loads(json.loads(request.content)["parameters"]["config"])
            if config["backend"] == "cobol":
                return httpx.Response(400, json={"error": "no such backend"})
            current.update(config)
        if request.url.path.endswith("/infer"):
            return httpx.Response(400 if current["max_batch_size"] else 200, json={})
        return httpx.Response(200, json=[] if request.url.path.endswith("/index") else {})

    (check,) = [each for each in all_checks() if each.name == "control/failed reload"]
    assert asyncio.run(_observation(answer, check))["infer"]["status"] == 200


async def _observation(handler: Handler, check: Check) -> Json:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server") as http:
        return await check.run(Server(http, metrics="http://server/metrics"))
