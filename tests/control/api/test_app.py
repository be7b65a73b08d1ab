"""The admin API: roles, validation, and error responses."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.control.api.rig import FakeReloader, FixedCaller, IdleControl, catalogue, services

from forebay.control.api.access import Credentials, KeyAuthenticator
from forebay.control.api.app import ANSWERS, make_app
from forebay.control.api.services import THREADS, WAITING_MAX, Services, Threads
from forebay.control.changes import Change, Reloaded
from forebay.core.errors import Refusal
from forebay.core.registry.approval import ApprovalRules, Role
from forebay.core.tenancy.roles import LEAST, OPEN, Caller
from forebay.registry.proved import signed_message
from forebay.registry.signing import own_signer
from forebay.store.database import StoreDown
from forebay.store.events import append
from forebay.wire.admin_request import BODY_BYTES_MAX
from forebay.wire.openapi import admin

OPERATIONS = sorted(admin.operations(ANSWERS), key=lambda each: each.id)
Test = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Services]:
    rig = IdleControl(tmp_path)
    yield services(rig, tmp_path)
    rig.journal.close()


def run(parts: Services, test: Test) -> None:
    async def bounded() -> None:
        transport = httpx.ASGITransport(make_app(parts))
        async with asyncio.timeout(30), httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            await test(client)

    asyncio.run(bounded())


def path(template: str) -> str:
    return template.format(
        model="chat", revision="r-1", alias="champion", id="chat:1", node="local", key="aaaaaaaa", sha256="0" * 64
    )


def problem(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.id)
def test_each_operation_rejects_exactly_the_callers_without_its_role(parts: Services, operation: Any) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for role in Role:
            transport = httpx.ASGITransport(make_app(replace(parts, authenticator=FixedCaller(Caller("bob", role)))))
            async with httpx.AsyncClient(transport=transport, base_url="http://admin") as asking:
                answer = await asking.request(operation.method, path(operation.path), content=b"{}")
            may = operation.id in OPEN or role >= LEAST[operation.id]
            assert (answer.status_code == 403) == (not may), answer.text
            if not may:
                assert problem(answer) == (403, "role_not_allowed", None)

    run(parts, test)


def test_unknown_callers_reach_open_operations_only(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for operation in OPERATIONS:
            answer = await client.request(operation.method, path(operation.path))
            assert (answer.status_code == 401) == (operation.id not in OPEN)
            if answer.status_code == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"

    run(replace(parts, authenticator=KeyAuthenticator(Path("nowhere.json"))), test)


@pytest.mark.parametrize(
    ("method", "where", "body", "says"),
    [
        ("POST", "/v1/models/chat/deploy", b"{", (400, "invalid_json", None)),
        ("POST", "/v1/models/chat/deploy", b"[]", (400, "invalid_request", None)),
        ("POST", "/v1/models/chat/deploy", b"{}", (400, "invalid_request", "revision")),
        ("POST", "/v1/models/chat/deploy", b'{"revision": 1}', (400, "invalid_request", "revision")),
        ("POST", "/v1/models/chat/deploy", b'{"revision": "r", "soon": true}', (400, "invalid_request", "soon")),
        ("POST", "/v1/models/chat/deploy", b'{"revision": "r", "plan": "canry"}', (400, "invalid_request", "plan")),
        ("POST", "/v1/models/chat/deploy", b'{"revision": "r", "plan": "a: 1"}', (400, "invalid_request", "plan")),
        ("POST", "/v1/models/chat/deploy", b'{"revision": "r", "plan": {"a": 1}}', (400, "invalid_request", "plan")),
        ("POST", "/v1/models/chat/deploy", b'{"revision": "r", "plan": 1}', (400, "invalid_request", "plan")),
        ("POST", "/v1/models/chat/deploy", b'{"revision":"r","unchecked":1}', (400, "invalid_request", "unchecked")),
        ("POST", "/v1/models/none/deploy", b'{"revision": "r"}', (404, "not_found", "model")),
        ("POST", "/v1/models/chat/deploy", b'{"revision": "r"}', (409, "conflict", None)),
        ("POST", "/v1/rollouts/chat:1/abort", b'{"why": "' + b"x" * 2001 + b'"}', (400, "invalid_request", "why")),
        ("POST", "/v1/rollouts/chat:1/abort", b'{"why": "\\u0000"}', (400, "invalid_request", "why")),
        ("GET", "/v1/rollouts?model=%00", b"", (400, "invalid_request", "model")),
        ("GET", "/v1/rollouts?ended=maybe", b"", (400, "invalid_request", "ended")),
        ("GET", "/v1/rollouts?last=0", b"", (400, "invalid_request", "last")),
        ("GET", "/v1/history?last=1001", b"", (400, "invalid_request", "last")),
        ("GET", "/v1/history?after=-1", b"", (400, "invalid_request", "after")),
        ("GET", f"/v1/history?subject={'x' * 300}", b"", (400, "invalid_request", "subject")),
        ("GET", "/v1/events?after=x", b"", (400, "invalid_request", "after")),
        ("GET", "/v1/registry/chat/r-none", b"", (404, "not_found", "revision")),
        ("POST", "/v1/registry/chat/r-none/approve", b"", (404, "not_found", "revision")),
        ("POST", "/v1/registry/chat", b'{"source": "/nowhere"}', (409, "conflict", None)),
        ("POST", "/v1/registry/chat", b'{"source":"x","settings":{"a":[]}}', (400, "invalid_request", "settings.a")),
        ("POST", "/v1/registry/chat", b'{"source":"x","metadata":{"a":1}}', (400, "invalid_request", "metadata.a")),
        ("PUT", "/v1/registry/chat/aliases/champion", b"{}", (400, "invalid_request", "revision")),
        ("POST", "/v1/registry/chat/r-1/signatures", b"{}", (400, "invalid_request", "public")),
        ("POST", "/v1/registry/chat/r-1/signatures", b'{"public": "AA=="}', (400, "invalid_request", "signature")),
        ("POST", "/v1/registry/chat/r-1/signatures", b'{"bundle": {}, "public": "AA=="}',
         (400, "invalid_request", "public")),
        ("POST", "/v1/registry/chat/r-1/signatures", b'{"bundle": {}}', (409, "conflict", None)),
        ("POST", "/v1/registry/chat/r-1/signatures", b'{"bundle": "x"}', (400, "invalid_request", "bundle")),
        ("POST", "/v1/registry/chat/r-1/signatures", b'{"public": "AA==", "signature": "AA=="}',
         (404, "not_found", "revision")),
        ("POST", "/v1/gc", b'{"all": true}', (400, "invalid_request", "all")),
        ("POST", "/v1/apply", b'{"document": ""}', (400, "invalid_request", "document")),
        ("POST", "/v1/apply", b"x" * (BODY_BYTES_MAX + 1), (413, "body_too_large", None)),
        ("GET", "/v2/none", b"", (404, "not_found", None)),
        ("DELETE", "/v1/rollouts", b"", (405, "method_not_allowed", None)),
    ],
)  # fmt: skip
def test_invalid_request_names_code_and_parameter(
    parts: Services, method: str, where: str, body: bytes, says: tuple[int, str, str | None]
) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.request(method, where, content=body)
        assert problem(answer) == says, answer.text

    run(parts, test)


@pytest.mark.parametrize(
    ("host", "meant"), [("a.b:1", "a.b"), ("[::1]:8081", "::1"), ("127.0.0.1", "127.0.0.1"), ("[bad", "bad")]
)
def test_the_authenticator_gets_the_host_that_the_client_named(parts: Services, host: str, meant: str) -> None:
    seen_credentials = list[Credentials]()

    class Listening(FixedCaller):
        def admit(self, credentials: Credentials) -> Caller:
            seen_credentials.append(credentials)
            return self.caller

    async def test(client: httpx.AsyncClient) -> None:
        await client.get("/v1/status", headers={"host": host, "authorization": "Bearer x"})

    run(replace(parts, authenticator=Listening()), test)
    assert [(each.host, each.presented, each.read_only) for each in seen_credentials] == [(meant, b"Bearer x", True)]


def test_unsupported_method_lists_allowed_methods(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.put("/v1/registry/chat")
        assert answer.status_code == 405
        assert {each.strip() for each in answer.headers["allow"].split(",")} == {"GET", "HEAD", "POST"}

    run(parts, test)


def test_changes_with_an_origin_header_are_rejected(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for operation in OPERATIONS:
            answer = await client.request(operation.method, path(operation.path), headers={"origin": "http://evil"})
            if operation.method != "get":
                assert problem(answer) == (400, "invalid_request", "origin")

    run(parts, test)


def test_registry_workflow_from_registration_to_verification(parts: Services, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    kept = catalogue(tmp_path, ApprovalRules(1, False))

    def said_by(name: str, role: Role) -> httpx.AsyncClient:
        app = make_app(replace(parts, catalogue=kept, authenticator=FixedCaller(Caller(name, role))))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin/v1")

    async def test(_: httpx.AsyncClient) -> None:
        async with said_by("bob", Role.OPERATOR) as bob, said_by("ada", Role.ADMIN) as ada:
            body = {"source": str(tmp_path / "model.bin"), "metadata": {"licence": "mit"}, "settings": {"threads": 2}}
            added = (await bob.post("/registry/chat", json=body)).json()
            id = added["revision"]["id"]
            assert (added["revision"]["created_by"], added["standing"]["state"]) == ("bob", "pending")
            assert problem(await bob.post(f"/registry/chat/{id}/approve"))[1] == "role_not_allowed"
            approved = await ada.post(f"/registry/chat/{id}/approve", json={"why": "looks good"})
            assert approved.json()["standing"]["state"] == "approved"
            assert problem(await ada.post(f"/registry/chat/{id}/approve"))[:2] == (409, "conflict")
            named = await bob.put("/registry/chat/aliases/champion", json={"revision": id})
            assert named.json()["aliases"] == ["champion"]
            assert (await bob.get("/registry/chat/champion")).json() == named.json()
            assert (await bob.get("/registry")).json()["revisions"] == [named.json()]
            assert (await bob.get("/registry/embed")).json() == {"revisions": []}
            assert (await bob.post("/verify")).json() == {"ok": True, "wrong": []}
            assert (await ada.post("/gc")).json() == {"freed_bytes": 0}

            events = (await bob.get("/history")).json()["events"]
            assert [(e["actor"], e["kind"]) for e in events] == [
                ("bob", "revision.add"),
                ("ada", "revision.approve"),
                ("bob", "alias.set"),
            ]
            assert events[1]["why"] == "looks good"
            assert (await bob.get("/history?last=1")).json()["events"] == events[-1:]
            assert (await bob.get("/history?after=1&last=1")).json()["events"] == events[1:2]
            assert (await bob.get("/history?subject=model/chat")).json()["events"] == events
            assert (await bob.get("/history?subject=model/cha")).json()["events"] == []
            with kept.store() as store, store.write() as connection:
                for cluster in ("test", "another"):
                    append(connection, at=1.0, actor="x", kind="rollout.ended", subject="model/chat", cluster=cluster)
            newest = (await bob.get("/history?after=3")).json()["events"]
            assert [(e["number"], e["cluster"]) for e in newest] == [(4, "test")], "another cluster's are not told"

            file = next(
                each
                for each in (tmp_path / "registry").rglob("*")
                if each.is_file() and each.read_bytes() == b"weights"
            )
            file.chmod(0o600)
            file.write_bytes(b"weighty")
            wrong = (await bob.post("/verify", json={"model": "chat"})).json()
            assert (wrong["ok"], len(wrong["wrong"])) == (False, 1)

    run(parts, test)


def test_only_valid_signatures_of_the_artifact_are_accepted(parts: Services, tmp_path: Path) -> None:
    """What is signed, who signed, the signature: changed anywhere it is refused, and nothing is noted."""
    (tmp_path / "model.bin").write_bytes(b"weights")
    publisher, other = own_signer(tmp_path / "publisher.pem"), own_signer(tmp_path / "other.pem")

    async def test(client: httpx.AsyncClient) -> None:
        added = (await client.post("/v1/registry/chat", json={"source": str(tmp_path / "model.bin")})).json()
        id, artifact = added["revision"]["id"], added["revision"]["artifact"]
        where, message = f"/v1/registry/chat/{id}/signatures", signed_message(artifact)
        good = publisher.prove(message)
        signed = base64.b64decode(good.signature)
        bad = [
            (other.public, good.signature),
            (good.public, other.sign(message)),
            (good.public, publisher.sign(signed_message("0" * 64))),
            *((good.public, _flipped(signed, place)) for place in range(0, len(signed), 7)),
        ]
        for public, signature in bad:
            answer = await client.post(where, json={"public": public, "signature": signature})
            assert problem(answer) == (409, "conflict", None), answer.text
            assert "not a signature of this artifact" in answer.text
        before = (await client.get("/v1/history")).json()
        assert [event["kind"] for event in before["events"]] == ["revision.add"]
        done = (await client.post(where, json=good._asdict())).json()
        assert done["signed_by"] == [publisher.public]
        assert (await client.post(where, json=good._asdict())).json() == done
        events = (await client.get("/v1/history")).json()["events"]
        assert [(event["actor"], event["kind"]) for event in events[1:]] == [("ada", "artifact.signed")]

    run(parts, test)


def _flipped(content: bytes, place: int) -> str:
    return base64.b64encode(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]).decode()


def test_apply_and_reload_record_the_caller(parts: Services) -> None:
    changing = FakeReloader([Reloaded((), (Change("name", "1", "2"),)), Reloaded(("line 1: bad",))])

    async def test(client: httpx.AsyncClient) -> None:
        done = await client.post("/v1/apply", json={"document": "a: 1", "dry_run": True})
        assert (done.status_code, done.json()["changes"][0]["path"]) == (200, "name")
        bad = await client.post("/v1/apply", json={"document": "a: 2"})
        assert (bad.status_code, bad.json()["problems"]) == (422, ["line 1: bad"])
        assert (await client.post("/v1/reload")).json() == {"problems": [], "changes": [], "effects": []}
        assert changing.asked == [
            ("apply", "a: 1", "ada", "True"),
            ("apply", "a: 2", "ada", "False"),
            ("reload", "ada"),
        ]

    run(replace(parts, changing=changing), test)


def test_store_outage_is_reported_and_status_still_works(parts: Services) -> None:
    def down() -> Any:
        raise StoreDown("postgresql://db/forebay cannot be reached")

    broken = replace(parts.catalogue, store=down, registry=down)

    async def test(client: httpx.AsyncClient) -> None:
        for where in ("/v1/history", "/v1/registry", "/v1/registry/chat"):
            answer = await client.get(where)
            assert problem(answer) == (503, "store_unavailable", None)
            assert "postgresql://db/forebay cannot be reached" in answer.text
        assert (await client.get("/v1/status")).status_code == 200

    run(replace(parts, catalogue=broken), test)


def test_full_thread_queue_rejects_work_and_loses_none() -> None:
    async def test() -> None:
        import threading

        go, threads = threading.Event(), Threads()
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(threads(lambda: go.wait(30.0))) for _ in range(THREADS + WAITING_MAX)]
            await asyncio.sleep(0)
            with pytest.raises(Refusal, match="busy"):
                await threads(lambda: None)
            go.set()
        assert all(each.result() for each in waiting)
        assert await threads(lambda: json.loads("1")) == 1

    asyncio.run(test())


def test_openapi_document_marks_secured_operations(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        asked = {
            each["operationId"]: "security" in each for paths in document["paths"].values() for each in paths.values()
        }
        assert {id for id, secured in asked.items() if not secured} == OPEN
        assert "Needs the role admin." in document["paths"]["/v1/gc"]["post"]["summary"]
        assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"

    run(parts, test)


def test_internal_error_is_journaled_and_hides_details_from_the_client(parts: Services) -> None:
    def broken() -> Any:
        raise ValueError("what is this?")

    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.get("/v1/history")
        assert problem(answer) == (500, "internal_error", None)
        assert "what is this?" not in answer.text
        [noted] = parts.journal.since(0)
        assert (noted.kind, noted.why) == ("api_mistake", "history: ValueError: what is this?")

    run(replace(parts, catalogue=replace(parts.catalogue, store=broken)), test)


@pytest.mark.parametrize("where", ["/v1/registry/a%00b", f"/v1/registry/{'x' * 200}", "/v1/rollouts/a%0Ab"])
def test_invalid_names_are_not_found(parts: Services, where: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get(where)).status_code in (404, 409)

    run(parts, test)
