"""Uploads the files of a model to the cluster: only missing ones, in parts, and resumed after interruptions."""

import time
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.cli.deploy.client import Admin, Busy, is_passing
from forebay.cli.settings import INTERRUPTED, UserError
from forebay.control.api.documents import LackingDocument, PartDocument
from forebay.core.registry.manifest import BadManifest, Manifest
from forebay.registry.artifacts import describe, files_of
from forebay.registry.sources import FILE, Progress
from forebay.registry.uploads.staging import Lacking
from forebay.wire.admin_request import BODY_BYTES_MAX

PATH: Final = "/v1/uploads"
PART_BYTES_MIN: Final = 64 * 1024
"""After an error parts are shorter, so that slow connections can send them within the timeout."""
PART_TIMEOUT_S: Final = 60.0
GIVE_UP_S: Final = 300.0
"""Time without any progress."""
WAIT_S_MIN: Final = 0.5
WAIT_S_MAX: Final = 10.0
RESUMABLE: Final = "Uploaded data is kept for two days: the same command resumes from there."


def send(admin: Admin, path: Path, progress: Progress) -> dict[str, Any]:
    """Upload what the cluster lacks of a file or folder; returns the `upload` to register. Raises `UserError`."""
    try:
        if not path.exists():
            there = f"For a path on the cluster's machine use {FILE}{path.absolute()}"
            raise UserError(f"{path}: no such file or folder on this machine. {there}")
        manifest = describe(path, progress)
        document = {"files": manifest.files, "lone": manifest.lone}
        if len(msgspec.json.encode(document)) > BODY_BYTES_MAX - 1024:
            text = f"{path}: has {len(manifest.files)} files, more than fit into one request"
            raise UserError(f"{text}; put them where the cluster can fetch them, such as s3://.")
        with admin.keep_alive():
            _Sender(admin, path, manifest, progress).send(admin.send("POST", PATH, LackingDocument, document))
    except KeyboardInterrupt:
        raise UserError(f"stopped. {RESUMABLE}", INTERRUPTED) from None
    except BadManifest as error:
        raise UserError(f"{path}: {error}.") from error
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror}).") from error
    return {"name": path.resolve().name, **document}


class _Sender:
    def __init__(self, admin: Admin, path: Path, manifest: Manifest, progress: Progress) -> None:
        self._admin = admin
        self._files = files_of(path)
        self._names = {file.sha256: file.path for file in manifest.files}
        self._progress = progress
        self._done = self._total = 0
        self._part_bytes = PART_BYTES_MIN
        self._moved_at = time.monotonic()
        self._wait_s = WAIT_S_MIN

    def send(self, said: LackingDocument) -> None:
        self._total = sum(each.size_bytes - each.have_bytes for each in said.lacking)
        for each in said.lacking:
            self._send(each, self._names[each.sha256], said.part_bytes)

    def _send(self, content: Lacking, name: str, part_bytes_max: int) -> None:
        where, have = f"{PATH}/{content.sha256}", content.have_bytes
        with self._files[name].open("rb") as source:
            while have < content.size_bytes:
                source.seek(have)
                part = source.read(min(self._part_bytes, content.size_bytes - have))
                if not part:
                    raise UserError(f"{name}: shrank while it was being uploaded.")
                place = {"size_bytes": content.size_bytes, "offset": have}
                try:
                    there = self._admin.put_bytes(where, PartDocument, part, PART_TIMEOUT_S, **place).have_bytes
                    if there == have:
                        raise Busy(f"{name}: the server still has only {have} bytes.")
                except UserError as error:
                    self._wait(error)
                else:
                    self._moved(name, there - have, part_bytes_max)
                    have = there

    def _moved(self, name: str, count: int, part_bytes_max: int) -> None:
        self._done = max(0, self._done + count)  # the server may have fewer bytes than before if its copy was removed
        if count > 0:
            self._moved_at, self._wait_s = time.monotonic(), WAIT_S_MIN
        self._part_bytes = min(2 * self._part_bytes, part_bytes_max)
        self._progress(f"sending {name}", self._done, self._total)

    def _wait(self, error: UserError) -> None:
        """Wait before a retry. Raises permanent errors, and temporary ones that last too long."""
        if not is_passing(error):
            raise error
        if time.monotonic() - self._moved_at > GIVE_UP_S:
            raise UserError(f"{error}\n{RESUMABLE}", error.exit_code) from error
        self._progress("waiting for the cluster", self._done, self._total)
        time.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, WAIT_S_MAX)
        self._part_bytes = max(PART_BYTES_MIN, self._part_bytes // 2)
