"""`forebay registry add ./model --url`: local files are uploaded despite interruptions."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import Result
from tests.cli.registry.test_remote import cluster, run
from tests.control.api.rig import quiet
from typer.testing import CliRunner

from forebay.cli.deploy.client import Admin
from forebay.cli.main import app
from forebay.cli.registry import uploading
from forebay.cli.settings import INTERRUPTED, UserError
from forebay.core.errors import Code, Refusal
from forebay.core.registry.approval import Role
from forebay.registry.artifacts import describe
from forebay.registry.uploads.staging import Staging

__all__ = ["cluster", "run"]
Run = Callable[..., Result]
Take = Callable[[], int]
SIZE = 1_000_000
ADD = ("registry", "add", "chat")
AS = ("--engine", "synthetic", "--task", "chat", "--json")


class Part(NamedTuple):
    """Where a part belongs that has come."""

    sha256: str
    size_bytes: int
    offset: int


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my-model"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(os.urandom(SIZE))
    (folder / "deep" / "ä b.txt").write_text("hello")
    (folder / "empty.txt").touch()
    (folder / "config.json").symlink_to("deep/ä b.txt")
    monkeypatch.setattr(uploading, "WAIT_S_MIN", 0.01)
    return folder


def added(done: Result) -> dict[str, str]:
    assert done.exit_code == 0, done.output + str(done.exception)
    revision: dict[str, str] = json.loads(done.stdout)["revision"]
    return revision


def wrapped(monkeypatch: pytest.MonkeyPatch, put: Callable[[Take, Part], int]) -> list[int]:
    """Let all parts go through `put`; returns the sizes of those that come, as they come."""
    sizes, real = list[int](), Staging.put

    def counted(self: Staging, sha256: str, size_bytes: int, offset: int, part: bytes) -> int:
        sizes.append(len(part))
        return put(lambda: real(self, sha256, size_bytes, offset, part), Part(sha256, size_bytes, offset))

    monkeypatch.setattr(Staging, "put", counted)
    return sizes


def plainly(take: Take, part: Part) -> int:
    return take()


def test_folder_arrives_unchanged_and_known_files_are_not_sent(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = wrapped(monkeypatch, plainly)
    first = added(run("bob", Role.OPERATOR, *ADD, str(model), *AS))
    assert first["artifact"] == describe(model, quiet).digest
    assert (first["source"], first["created_by"]) == ("upload:my-model", "bob")
    assert sum(sizes) == SIZE + 5
    assert len(sizes) < 8, "parts grow"

    sizes.clear()
    assert added(run("eve", Role.OPERATOR, *ADD, str(model), *AS)) == first
    assert sizes == []
    (model / "new.txt").write_text("new")
    second = added(run("bob", Role.OPERATOR, *ADD, str(model), *AS))
    assert second["artifact"] == describe(model, quiet).digest
    assert sizes == [3]
    assert "unmodified" in run("bob", Role.OPERATOR, "registry", "verify").stdout


def test_uploaded_revision_equals_that_of_a_path_on_the_cluster(run: Run, model: Path) -> None:
    sent = added(run("bob", Role.OPERATOR, *ADD, str(model), *AS))
    there = added(run("bob", Role.OPERATOR, *ADD, model.as_uri(), *AS))
    assert (sent["id"], sent["artifact"]) == (there["id"], there["artifact"])
    lone = added(run("bob", Role.OPERATOR, *ADD, str(model / "weights.bin"), *AS))
    assert lone["artifact"] == describe(model / "weights.bin", quiet).digest


def test_upload_continues_with_shorter_parts_after_interruptions(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = iter([False, True, True, False, True] + [False] * 100)

    def breaking(take: Take, part: Part) -> int:
        if next(breaks):
            raise Refusal(Code.OVERLOADED)
        return take()

    wrapped(monkeypatch, breaking)
    done = run("bob", Role.OPERATOR, *ADD, str(model), *AS)
    assert added(done)["artifact"] == describe(model, quiet).digest
    assert "waiting for the cluster" in done.stderr


def test_upload_recovers_from_lost_responses_and_removed_files(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def losing(take: Take, part: Part) -> int:
        have = take()
        seen.append(have)
        if len(seen) == 3:
            raise Refusal(Code.DRAINING)  # it was taken, and nobody is told
        if len(seen) == 4:
            (tmp_path / "home/registry/uploads" / f"{part.sha256}.{part.size_bytes}").unlink()
        return have

    wrapped(monkeypatch, losing)
    assert added(run("bob", Role.OPERATOR, *ADD, str(model), *AS))["artifact"] == describe(model, quiet).digest


def test_rerun_resumes_an_abandoned_upload(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(take: Take, part: Part) -> int:
        if part.offset:
            raise Refusal(Code.OVERLOADED)
        return take()

    with monkeypatch.context() as broken:
        broken.setattr(uploading, "GIVE_UP_S", -1.0)
        wrapped(broken, down)
        done = run("bob", Role.OPERATOR, *ADD, str(model), *AS)
    assert isinstance(done.exception, UserError)
    assert "the same command resumes from there" in str(done.exception)
    sizes = wrapped(monkeypatch, plainly)
    added(run("bob", Role.OPERATOR, *ADD, str(model), *AS))
    assert 0 < sum(sizes) < SIZE


def test_interrupted_upload_says_that_it_can_be_resumed(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Admin, *words: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Admin, "put_bytes", interrupted)
    done = run("bob", Role.OPERATOR, *ADD, str(model), *AS)
    assert isinstance(done.exception, UserError)
    assert done.exception.exit_code == INTERRUPTED
    assert "the same command resumes from there" in str(done.exception)


def test_file_changed_during_upload_registers_nothing(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(take: Take, part: Part) -> int:
        if part.size_bytes == SIZE:
            (model / "weights.bin").write_bytes(bytes(SIZE))
        return take()

    with monkeypatch.context() as while_sent:
        wrapped(while_sent, changing)
        done = run("bob", Role.OPERATOR, *ADD, str(model), *AS)
    assert isinstance(done.exception, UserError)
    assert "weights.bin: its SHA-256 is" in str(done.exception)
    assert "Nothing is registered" in run("bob", Role.OPERATOR, "registry", "list").stdout
    assert added(run("bob", Role.OPERATOR, *ADD, str(model), *AS))["artifact"] == describe(model, quiet).digest


def test_shrinking_file_is_named(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shrinking(take: Take, part: Part) -> int:
        os.truncate(model / "weights.bin", 1)
        return take()

    wrapped(monkeypatch, shrinking)
    done = run("bob", Role.OPERATOR, *ADD, str(model), *AS)
    assert isinstance(done.exception, UserError)
    assert "weights.bin: shrank while it was being uploaded" in str(done.exception)


def test_unsendable_files_are_rejected_before_anything_is_sent(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = wrapped(monkeypatch, plainly)
    (model / "a\nb").touch()
    odd = run("bob", Role.OPERATOR, *ADD, str(model), *AS)
    assert "is not a path inside the artifact" in str(odd.exception)
    (model / "a\nb").unlink()
    viewer = run("eve", Role.VIEWER, *ADD, str(model), *AS)
    assert "lacking needs the role operator" in str(viewer.exception)
    monkeypatch.setattr(uploading, "BODY_BYTES_MAX", 1100)
    many = run("bob", Role.OPERATOR, *ADD, str(model), *AS)
    assert "has 4 files, more than fit into one request" in str(many.exception)
    assert sizes == []


def test_unreachable_cluster_fails_immediately(model: Path) -> None:
    done = CliRunner().invoke(app, [*ADD, str(model), *AS, "--url", "http://127.0.0.1:1"])
    assert isinstance(done.exception, UserError)
    assert "No cluster runs at" in str(done.exception)
