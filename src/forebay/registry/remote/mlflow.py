"""`mlflow:MODEL@ALIAS` or `mlflow:MODEL/VERSION`: a model in an MLflow server's registry, via its REST API.

The server is at MLFLOW_TRACKING_URI; MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and …_PASSWORD, authenticate.
Artifacts are downloaded through the server, which has to proxy them (`--serve-artifacts`, its default).
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from forebay.registry.remote.trees import FILES_MAX, RemoteFile, download_files
from forebay.registry.sources import Progress, RemoteSource, SourceError

FORM = re.compile(r"(?P<model>(?!\.{1,2}[@/])[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>\d+))")
"""The model and the version are used as folder names."""
API = "/api/2.0/mlflow"
TIMEOUT_S = 30.0
CHUNK_BYTES = 1024 * 1024
DEPTH_MAX = 32


def fetch_mlflow(source: RemoteSource, home: Path, progress: Progress) -> Path:
    """Download the artifacts of a registered model's version. Raises `SourceError`."""
    match = FORM.fullmatch(source.rest)
    if match is None:
        raise SourceError(f"{source}: not of the form mlflow:MODEL@ALIAS or mlflow:MODEL/VERSION")
    url = os.environ.get("MLFLOW_TRACKING_URI", "")
    if urlsplit(url).scheme not in ("http", "https"):
        raise SourceError(f"{source}: MLFLOW_TRACKING_URI has to be the URL of the server, http(s)://HOST:PORT")
    with _client(url) as client:
        server = _Server(client, str(source))
        version = match["version"] or server.version(match["model"], match["alias"])
        progress(f"version {version}", 0, None)
        root = server.artifacts(match["model"], version)
        files = sorted(server.listing(root))
        place = urlsplit(url).netloc.rpartition("@")[2]  # without a password: paths are shown and logged
        folder = home / "models" / "mlflow" / quote(place, safe="") / match["model"] / version
        return download_files(
            str(source), files, lambda file, offset: server.read(root, file, offset), folder, progress
        )


def _client(url: str) -> httpx.Client:
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    return httpx.Client(
        base_url=url.rstrip("/"),
        headers={"authorization": f"Bearer {token}"} if token else {},
        auth=(user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user and not token else None,
        timeout=TIMEOUT_S,
        trust_env=False,
        follow_redirects=True,
    )


class _Server:
    """The API of an MLflow server; `name` is the source in messages."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self._client = client
        self._name = name

    def version(self, model: str, alias: str) -> str:
        """The version that an alias refers to."""
        version = self._word(
            self._ask("/registered-models/alias", name=model, alias=alias), "model_version", "version"
        )
        if not re.fullmatch(r"[0-9]+", version):
            raise SourceError(f"{self._name}: the server says that {alias} is the version {version!r}, not a number")
        return version

    def artifacts(self, model: str, version: str) -> str:
        """The location of a version's artifacts, as a path of the server's artifact API."""
        uri = self._word(self._ask("/model-versions/get-download-uri", name=model, version=version), "artifact_uri")
        parts = urlsplit(uri)
        if parts.scheme == "models":  # a logged model of MLflow 3 is named, not located
            found = self._ask(f"/logged-models/{parts.path.strip('/') or parts.netloc}")
            parts = urlsplit(self._word(found, "model", "info", "artifact_uri"))
        if parts.scheme != "mlflow-artifacts":
            raise SourceError(f"{self._name}: its artifacts are at {parts.scheme}:…, not served by the MLflow server")
        return parts.path.strip("/")

    def listing(self, root: str) -> Iterator[RemoteFile]:
        """All files below a path."""
        folders, seen = [("", 0)], 0
        while folders:
            inner, depth = folders.pop()
            answer = self._ask("-artifacts/artifacts", path=f"{root}/{inner}".rstrip("/"))
            for entry in answer.get("files") or ():
                path = f"{inner}/{self._word(entry, 'path')}".lstrip("/")
                seen += 1
                if seen > FILES_MAX or depth > DEPTH_MAX:
                    raise SourceError(f"{self._name}: has more than {FILES_MAX} files, or folders without an end")
                if entry.get("is_dir"):
                    folders.append((path, depth + 1))
                else:
                    yield RemoteFile(path, self._size(entry), "")

    def read(self, root: str, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """The bytes of a file from an offset on, even if the server ignores ranges."""
        path = quote(f"{root}/{file.path}")
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={offset}-"} if offset else {})
        try:
            with self._client.stream("GET", f"{API}-artifacts/artifacts/{path}", headers=headers) as answer:
                if answer.status_code not in (200, 206):
                    raise SourceError(f"{self._name}: {file.path}: HTTP {answer.status_code}")
                skip = offset if answer.status_code == 200 else 0
                for chunk in answer.iter_raw(CHUNK_BYTES):
                    if skip < len(chunk):
                        yield chunk[skip:]
                    skip = max(skip - len(chunk), 0)
        except httpx.HTTPError as error:
            raise SourceError(f"{self._name}: {file.path}: {str(error) or type(error).__name__}") from error

    def _word(self, document: object, *keys: str) -> str:
        """A string in a response. Raises `SourceError` if it is missing."""
        for key in keys:
            document = document.get(key) if isinstance(document, dict) else None
        if not isinstance(document, str):
            raise SourceError(f"{self._name}: a response of the MLflow server has no {'.'.join(keys)}")
        return document

    def _size(self, entry: Mapping[str, Any]) -> int:
        size = str(entry.get("file_size"))  # a number, or a string, as protobuf writes large ones
        if not size.isdecimal():
            raise SourceError(f"{self._name}: the MLflow server does not say how large {entry['path']!r} is")
        return int(size)

    def _ask(self, endpoint: str, **parameters: str) -> dict[str, Any]:
        try:
            answer = self._client.get(f"{API}{endpoint}", params=parameters)
            document = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            place = self._client.base_url.copy_with(userinfo=b"")
            raise SourceError(f"{self._name}: {place} does not respond like an MLflow server ({error})") from error
        if answer.status_code != 200 or not isinstance(document, dict):
            said = document.get("message", "") if isinstance(document, dict) else ""
            raise SourceError(f"{self._name}: {said or 'unusable response'} (HTTP {answer.status_code})")
        return document
