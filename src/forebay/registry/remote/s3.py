"""`s3://BUCKET/PATH`: any S3-compatible store, configured by the usual AWS_… variables."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store

from forebay.registry.remote.trees import RemoteFile, download_files
from forebay.registry.sources import Progress, RemoteSource, SourceError

if TYPE_CHECKING:
    from obstore.store import S3Config

CHUNK_BYTES = 4 * 1024 * 1024
TIMEOUT = "30s"


def fetch_s3(source: RemoteSource, home: Path, progress: Progress) -> Path:
    """The object, or the folder of all objects below the path, as they are now. Raises `SourceError`."""
    bucket, _, path = source.rest.partition("/")
    path = path.strip("/")
    try:
        store = _open(bucket)
        progress("listing", 0, None)
        files = _listing(store, path)
    except FileNotFoundError as error:
        raise SourceError(f"{source}: there is neither an object nor a folder of that name") from error
    except (BaseError, OSError, ValueError) as error:
        raise SourceError(f"{source}: {_reason(error)}") from error
    lone = len(files) == 1 and files[0].path == ""
    if lone:
        files = [RemoteFile(PurePosixPath(path).name, files[0].size_bytes, files[0].tag)]

    def read(file: RemoteFile, offset: int) -> Iterator[bytes]:
        key = path if lone else f"{path}/{file.path}".lstrip("/")
        try:
            answer = obstore.get(store, key, options={"if_match": file.tag, "range": {"offset": offset}})
            for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)
        except (PreconditionError, FileNotFoundError) as error:
            raise SourceError(f"{source}: {key} was changed while it was fetched; try again") from error
        except (BaseError, OSError) as error:
            raise SourceError(f"{source}: {key}: {_reason(error)}") from error

    folder = home / "models" / "s3" / bucket / (quote(path, safe="") or "all")
    found = download_files(str(source), files, read, folder, progress)
    return (found / files[0].path if lone else found).absolute()


def _open(bucket: str) -> S3Store:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    config: S3Config = {}
    if endpoint:
        config["endpoint"] = endpoint
        config["skip_signature"] = "AWS_ACCESS_KEY_ID" not in os.environ
    return S3Store(
        bucket,
        config=config,
        client_options={"allow_http": endpoint.startswith("http://"), "connect_timeout": TIMEOUT, "timeout": "1h"},
        retry_config={"max_retries": 3},
    )


def _listing(store: S3Store, path: str) -> list[RemoteFile]:
    """Files by their paths below `path`; empty for an object called `path` itself."""
    files = []
    for page in obstore.list(store, prefix=path or None):
        for entry in page:
            inner = entry["path"].removeprefix(path).lstrip("/")
            files.append(RemoteFile(inner, entry["size"], entry["e_tag"] or str(entry["last_modified"])))
    if not files and path:
        entry = obstore.head(store, path)
        files.append(RemoteFile("", entry["size"], entry["e_tag"] or str(entry["last_modified"])))
    return [file for file in files if not (file.size_bytes == 0 and file.path.endswith("/"))]


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
