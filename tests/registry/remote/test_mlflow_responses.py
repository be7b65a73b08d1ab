"""Invalid responses of an MLflow server: no file outside the folder, and no traceback."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from forebay.registry.remote import mlflow
from forebay.registry.sources import SourceError, obtain, parse

API = "/api/2.0/mlflow"
GOOD = {
    "/registered-models/alias": {"model_version": {"version": "7"}},
    "/model-versions/get-download-uri": {"artifact_uri": "mlflow-artifacts:/1/model"},
    "-artifacts/artifacts": {"files": [{"path": "model.onnx", "file_size": "3"}]},
    "-artifacts/artifacts/1/model/model.onnx": b"abc",
}


def ask(
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
    answers: Mapping[str, object],
    source: str,
    url: str = "http://ml:1",
) -> Path:
    """Fetch a source from a server with these answers."""

    def answer(request: httpx.Request) -> httpx.Response:
        content = answers[request.url.path.removeprefix(API)]
        if not isinstance(content, bytes):
            return httpx.Response(200, json=content)
        if "gzip" not in request.headers["accept-encoding"]:
            return httpx.Response(200, stream=httpx.ByteStream(content))
        packed = httpx.ByteStream(gzip.compress(content))  # as a proxy before the server does
        return httpx.Response(200, stream=packed, headers={"content-encoding": "gzip"})

    client = httpx.Client(base_url=url, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(mlflow, "_client", lambda url: client)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    return obtain(parse(source), home, lambda stage, done, total: None)


def test_valid_responses_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = ask(monkeypatch, tmp_path, GOOD, "mlflow:tiny@champion")

    assert (found / "model.onnx").read_bytes() == b"abc"
    assert found.parent == tmp_path / "models/mlflow/ml%3A1/tiny/7"


@pytest.mark.parametrize(
    ("endpoint", "answer", "text"),
    [
        ("/registered-models/alias", {"model_version": {"version": "../../../../out"}}, "not a number"),
        ("/registered-models/alias", {"model_version": []}, "no model_version.version"),
        ("/model-versions/get-download-uri", {}, "no artifact_uri"),
        ("-artifacts/artifacts", {"files": [{"path": "../../m.onnx", "file_size": 3}]}, "not a valid path"),
        ("-artifacts/artifacts", {"files": [{"path": "m.onnx"}]}, "how large"),
        ("-artifacts/artifacts", {"files": ["m.onnx"]}, "no path"),
        ("-artifacts/artifacts", {"files": [{"path": "m\0.onnx", "file_size": 3}]}, "not a valid path"),
        ("-artifacts/artifacts", {"files": None}, "nothing found"),
    ],
)
def test_invalid_response_is_reported_and_writes_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str, answer: object, text: str
) -> None:
    with pytest.raises(SourceError, match=text):
        ask(monkeypatch, tmp_path / "home", {**GOOD, endpoint: answer}, "mlflow:tiny@champion")

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("source", ["mlflow:..@champion", "mlflow:../3", "mlflow:./3"])
def test_model_name_cannot_escape_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    with pytest.raises(SourceError, match="not of the form"):
        ask(monkeypatch, tmp_path, GOOD, source)


def test_password_in_the_address_is_in_no_path_and_no_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = "http://bob:secret@ml:1"
    found = ask(monkeypatch, tmp_path, GOOD, "mlflow:tiny@champion", url)
    assert found.parent == tmp_path / "models/mlflow/ml%3A1/tiny/7"

    with pytest.raises(SourceError, match="http://ml:1 does not respond like an MLflow server") as caught:
        ask(monkeypatch, tmp_path, {**GOOD, "/registered-models/alias": b"<html>"}, "mlflow:tiny@champion", url)
    assert "secret" not in str(caught.value)
