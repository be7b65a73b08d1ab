"""Models in S3 on a real server: objects and folders, wrong credentials, changes between fetches."""

from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from tests.registry.remote.seaweed import KEY, SECRET, serving

from forebay.registry.sources import SourceError, obtain, parse

pytestmark = pytest.mark.slow

BUCKET = "forebay-test"
CONTENT = {"model.onnx": bytes(range(256)) * 20_000, "tokenizer/vocab.txt": b"abc"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("seaweed")) as url:
        yield url


@pytest.fixture(scope="module")
def bucket(server: str) -> str:
    """The name of a bucket with a model in it."""
    for path, data in CONTENT.items():
        obstore.put(opened(server), f"models/bge/{path}", data)
    return BUCKET


@pytest.fixture(autouse=True)
def environment(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens the server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def opened(server: str) -> S3Store:
    return S3Store(
        BUCKET,
        config={"endpoint": server, "access_key_id": KEY, "secret_access_key": SECRET},
        client_options={"allow_http": True},
    )


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def contents(folder: Path) -> dict[str, bytes]:
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_folders_and_objects_are_fetched_and_a_change_is_a_new_version(
    bucket: str, server: str, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/models/bge"
    found = obtain(parse(url), tmp_path, quiet)
    assert contents(found) == CONTENT
    assert obtain(parse(f"{url}/"), tmp_path, quiet) == found
    lone = obtain(parse(f"{url}/tokenizer/vocab.txt"), tmp_path, quiet)
    assert (lone.name, lone.read_bytes()) == ("vocab.txt", b"abc")
    obstore.put(opened(server), "models/bge/tokenizer/vocab.txt", b"xyz")
    again = obtain(parse(url), tmp_path, quiet)
    assert again != found
    assert contents(again)["tokenizer/vocab.txt"] == b"xyz"
    assert contents(found) == CONTENT


def test_interrupted_download_is_resumed(bucket: str, tmp_path: Path) -> None:
    found = obtain(parse(f"s3://{bucket}/models/bge"), tmp_path, quiet)
    part = found.rename(found.with_name(f".{found.name}.part")) / "model.onnx"
    kept = bytes(1_000_003)  # not what lies there, so that it can be told from it
    part.with_name("model.onnx.part").write_bytes(kept)
    part.unlink()
    again = obtain(parse(f"s3://{bucket}/models/bge"), tmp_path, quiet)
    assert contents(again)["model.onnx"] == kept + CONTENT["model.onnx"][len(kept) :]


def test_missing_object_and_denied_access_are_reported_without_the_secret(
    bucket: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/models"
    with pytest.raises(SourceError, match="/nothing: there is neither an object nor a folder"):
        obtain(parse(f"{url}/nothing"), tmp_path, quiet)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-of-mine")
    with pytest.raises(SourceError) as caught:
        obtain(parse(url), tmp_path, quiet)
    assert "wrong-secret-of-mine" not in str(caught.value)


def test_unreachable_server_is_reported(
    bucket: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match="s3://"):
        obtain(parse("s3://bucket/x"), tmp_path, quiet)
