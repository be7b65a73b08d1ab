"""A real S3 server for tests: SeaweedFS on free ports of 127.0.0.1."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

KEY, SECRET = "forebay-test", "not-a-secret"
START_S = 60


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of an S3 server that knows one key, for as long as the block runs."""
    config = {
        "identities": [
            {
                "name": "test",
                "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                "actions": ["Admin", "Read", "Write", "List"],
            }
        ]
    }
    (folder / "s3.json").write_text(json.dumps(config))
    master, volume, filer, s3 = _free(4)
    command = [
        str(Path(sys.executable).parent / "weed"),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-volume.port={volume}",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={folder / 's3.json'}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        until = time.monotonic() + START_S
        while not _answers(s3):
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < until, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield f"http://127.0.0.1:{s3}"
    finally:
        server.kill()
        server.wait()


def _free(count: int) -> list[int]:
    """Ports that are free, and so are those 10,000 above, where SeaweedFS answers gRPC."""
    found: list[int] = []
    for port in range(21_000, 50_000, 7):
        if _is_free(port) and _is_free(port + 10_000):
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/", timeout=2, trust_env=False)
    except httpx.HTTPError:
        return False
    return True
