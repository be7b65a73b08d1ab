"""Uploads through the admin API: whatever a client sends, only the announced files are registered."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.control.api.rig import IdleControl, services

from forebay.cli.registry.served import catalogue_of
from forebay.control.api.app import make_app
from forebay.control.api.services import Services
from forebay.core.cluster import Cluster
from forebay.wire.admin_request import BODY_BYTES_MAX

WEIGHTS = b"weights" * 1000
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
FILE = {"path": "weights.bin", "size_bytes": len(WEIGHTS), "sha256": DIGEST}
MODELS = [{"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}]
PART = f"/v1/uploads/{DIGEST}"


def quiet(stage: str, done: int, total: int | None) -> None:
    """Nobody looks."""


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Services]:
    rig, cluster = IdleControl(tmp_path), Cluster.model_validate({"models": MODELS})
    yield replace(services(rig, tmp_path), catalogue=catalogue_of(lambda: cluster, tmp_path / "home", quiet))
    rig.journal.close()


def run(parts: Services, test: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def bounded() -> None:
        transport = httpx.ASGITransport(make_app(parts))
        async with asyncio.timeout(60), httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            await test(client)

    asyncio.run(bounded())


def place(offset: int = 0, size: int = len(WEIGHTS)) -> dict[str, int]:
    return {"size_bytes": size, "offset": offset}


def upload(name: str = "my-model", files: Any = (FILE,), **more: Any) -> dict[str, Any]:
    return {"upload": {"name": name, "files": list(files), **more}, "engine": "synthetic", "task": "chat"}


def problem(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_upload_is_announced_sent_and_registered_with_its_caller(parts: Services, tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        said = (await client.post("/v1/uploads", json={"files": [FILE], "lone": False})).json()
        one = {"sha256": DIGEST, "size_bytes": len(WEIGHTS), "have_bytes": 0}
        assert said == {"lacking": [one], "part_bytes": BODY_BYTES_MAX}
        early = await client.post("/v1/registry/chat", json=upload())
        assert problem(early) == (409, "conflict", None)
        assert "is incomplete" in early.text
        for offset, have in ((5000, 0), (0, 5000), (0, 5000), (4000, len(WEIGHTS))):
            answer = await client.put(PART, params=place(offset), content=WEIGHTS[offset : max(have, offset + 1000)])
            assert answer.json() == {"have_bytes": have}
        assert (await client.post("/v1/uploads", json={"files": [FILE]})).json()["lacking"] == []
        added = (await client.post("/v1/registry/chat", json=upload())).json()
        assert added["revision"]["source"] == "upload:my-model"
        assert (added["revision"]["created_by"], added["size_bytes"]) == ("ada", len(WEIGHTS))
        (event,) = (await client.get("/v1/history")).json()["events"]
        assert (event["actor"], event["kind"], event["why"]) == ("ada", "revision.add", "from upload:my-model")
        assert (await client.post("/v1/uploads", json={"files": [FILE]})).json()["lacking"] == []
        assert (await client.post("/v1/registry/chat", json=upload())).json() == added
        assert (await client.post("/v1/verify")).json() == {"ok": True, "wrong": []}
        assert (await client.post("/v1/gc")).json() == {"freed_bytes": 0}

    run(parts, test)
    kept = [each for each in (tmp_path / "home/registry").rglob("*") if each.is_file() and each.stat().st_size > 100]
    assert len({each.stat().st_ino for each in kept}) == 1, "one content, one file"


@pytest.mark.parametrize(
    "path",
    ["../evil", "/etc/passwd", "a/../../evil", "a//b", "./a", "", "a\u0000b", "a\nb", ".", "..", "a/", "x" * 1025],
)
def test_paths_outside_the_folder_are_rejected(parts: Services, tmp_path: Path, path: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for body, where in (({"files": [{**FILE, "path": path}]}, "/v1/uploads"),
                            (upload(files=[{**FILE, "path": path}]), "/v1/registry/chat")):  # fmt: skip
            answer = await client.post(where, json=body)
            assert problem(answer)[:2] == (400, "invalid_request"), answer.text

    run(parts, test)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"files": []}, "files"),
        ({"files": "x"}, "files"),
        ({}, "files"),
        ({"files": [FILE, FILE]}, "files"),
        ({"files": [FILE, {**FILE, "path": "b"}], "lone": True}, "files"),
        ({"files": [FILE, {**FILE, "path": "weights.bin/b"}]}, "files"),
        ({"files": [{**FILE, "size_bytes": -1}]}, "files[0].size_bytes"),
        ({"files": [{**FILE, "size_bytes": 2**60}]}, "files[0].size_bytes"),
        ({"files": [{**FILE, "sha256": DIGEST.upper()}]}, "files[0].sha256"),
        ({"files": [{**FILE, "sha256": "../" * 21 + "x"}]}, "files[0].sha256"),
        ({"files": [{**FILE, "mode": 511}]}, "files[0].mode"),
        ({"files": [{"path": "a"}]}, "files[0].size_bytes"),
    ],
)
def test_invalid_file_list_names_the_field(parts: Services, body: dict[str, Any], param: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert problem(await client.post("/v1/uploads", json=body)) == (400, "invalid_request", param)

    run(parts, test)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (upload(name="a/b"), "upload.name"),
        (upload(name=".."), "upload.name"),
        (upload(name=""), "upload.name"),
        (upload(name="ä" * 128), "upload.name"),
        (upload(files=[]), "upload.files"),
        ({**upload(), "source": "s3://a/b"}, "source"),
    ],
)
def test_invalid_upload_names_the_field(parts: Services, body: dict[str, Any], param: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert problem(await client.post("/v1/registry/chat", json=body)) == (400, "invalid_request", param)

    run(parts, test)


@pytest.mark.parametrize(
    ("where", "query", "says"),
    [
        (PART, place(offset=1), (409, "conflict", None)),
        (PART, place(size=10), (409, "conflict", None)),
        (PART, {"offset": 0}, (400, "invalid_request", "size_bytes")),
        (PART, {"size_bytes": 1}, (400, "invalid_request", "offset")),
        (PART, {"size_bytes": -1, "offset": 0}, (400, "invalid_request", "size_bytes")),
        (PART, {"size_bytes": 2**51, "offset": 0}, (400, "invalid_request", "size_bytes")),
        ("/v1/uploads/" + "z" * 64, place(), (404, "not_found", "sha256")),
        ("/v1/uploads/..%2f..%2fevil", place(), (404, "not_found", None)),
    ],
)
def test_invalid_part_is_rejected(
    parts: Services, tmp_path: Path, where: str, query: dict[str, int], says: tuple[int, str, str | None]
) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert problem(await client.put(where, params=query, content=WEIGHTS)) == says

    run(parts, test)
    assert [each for each in (tmp_path / "home").rglob("*") if each.is_file() and each.stat().st_size] == []


def test_part_size_is_limited_to_the_body_limit(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        long = await client.put(PART, params=place(size=2**30), content=bytes(BODY_BYTES_MAX + 1))
        assert problem(long) == (413, "body_too_large", None)

    run(parts, test)


def test_digest_mismatch_names_the_path_and_registers_nothing(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await client.put(PART, params=place(), content=WEIGHTS[::-1])
        answer = await client.post("/v1/registry/chat", json=upload())
        assert problem(answer)[:2] == (409, "conflict")
        assert f"weights.bin: its SHA-256 is {hashlib.sha256(WEIGHTS[::-1]).hexdigest()}" in answer.text
        assert (await client.get("/v1/registry")).json() == {"revisions": []}
        (again,) = (await client.post("/v1/uploads", json={"files": [FILE]})).json()["lacking"]
        assert again["have_bytes"] == 0

    run(parts, test)


def test_upload_without_engine_is_rejected_and_its_files_are_kept(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await client.put(PART, params=place(), content=WEIGHTS)
        answer = await client.post("/v1/registry/chat", content=json.dumps({**upload(), "engine": None}))
        assert problem(answer)[:2] == (409, "conflict")
        assert "my-model" in answer.text
        assert "uploads" not in answer.text
        assert (await client.post("/v1/uploads", json={"files": [FILE]})).json()["lacking"] == []
        assert (await client.post("/v1/registry/chat", json=upload())).status_code == 200

    run(parts, test)


def test_source_below_an_unknown_home_folder_is_refused_by_name(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/registry/chat", json={"source": "~no-such-user/m.gguf"})
        assert problem(answer) == (409, "conflict", None)
        assert "~no-such-user/m.gguf: there is no such home folder" in answer.text

    run(parts, test)
