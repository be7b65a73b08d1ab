"""The registry: artifacts are immutable, served once approved, and verified to the last byte."""

import base64
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert

from forebay.core.model import Task
from forebay.core.registry.approval import ApprovalRules, ApprovalState, Role, Step
from forebay.core.revision import revision_id
from forebay.registry.artifacts import describe
from forebay.registry.catalogue import SIGNATURES_MAX, Actor, Description, Registry
from forebay.registry.proved import RegistryError, Tampered, signed_message
from forebay.registry.sealing import KeyFile
from forebay.registry.signing import Proof, own_signer
from forebay.registry.sources import SourceError
from forebay.registry.vault import Vault
from forebay.store.database import open_store
from forebay.store.schema import ALIASES

ANN, BOB, CID = Actor("ann", Role.OPERATOR), Actor("bob"), Actor("cid")
WHAT = Description("chat", "./model", Task.CHAT, "openvino", {"threads": 2}, {"licence": "apache-2.0"})


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model.bin").write_bytes(bytes(range(64)))
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    (folder / "copy.bin").write_bytes(bytes(range(64)))
    return folder


def make(
    home: Path,
    rules: ApprovalRules,
    publishers: tuple[str, ...] = (),
    vault: Vault | None = None,
    encrypts: bool = False,
) -> Registry:
    store = open_store(f"sqlite:///{home / 'store.db'}")
    return Registry(
        store,
        home / "registry",
        own_signer(home / "registry.key"),
        rules,
        publishers=publishers,
        vault=vault or Vault(home / "registry", None, home / "memory"),
        encrypts=encrypts,
    )


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    made = make(tmp_path, ApprovalRules())
    yield made
    made._store.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_registered_artifact_is_independent_of_its_source(registry: Registry, model: Path) -> None:
    before = contents(model)
    listed = registry.add(WHAT, model, ANN, quiet)
    (model / "model.bin").write_bytes(b"something else")
    again, path = registry.open("chat", listed.revision.id, quiet)
    assert contents(path) == before
    assert again == listed
    assert (listed.revision.task, listed.revision.engine, listed.size_bytes) == (Task.CHAT, "openvino", 132)
    assert listed.standing.state is ApprovalState.APPROVED


def test_revision_is_identified_by_content_and_settings(registry: Registry, model: Path) -> None:
    first = registry.add(WHAT, model, ANN, quiet)
    assert registry.add(WHAT, model, BOB, quiet) == first
    other = registry.add(Description("chat", "./model", Task.CHAT, "openvino", {"threads": 3}), model, ANN, quiet)
    assert other.revision.id != first.revision.id
    assert other.revision.artifact == first.revision.artifact
    assert [each.revision.id for each in registry.revisions("chat")] == [first.revision.id, other.revision.id]


def test_identical_contents_are_stored_once_and_read_only(registry: Registry, model: Path, tmp_path: Path) -> None:
    registry.add(WHAT, model, ANN, quiet)
    blobs = [each for each in (tmp_path / "registry" / "blobs").rglob("*") if each.is_file()]
    assert len(blobs) == 2
    assert all(not os.stat(blob).st_mode & 0o222 for blob in blobs)


def test_reregistered_content_is_reused_unless_damaged(registry: Registry, model: Path, tmp_path: Path) -> None:
    def files() -> set[int]:
        kept = (each for each in (tmp_path / "registry").rglob("*") if each.is_file() and each.stat().st_size)
        return {each.stat().st_ino for each in kept}

    registry.add(WHAT, model, ANN, quiet)
    before = files()
    registry.add(WHAT, model, ANN, quiet)
    assert files() == before
    for blob in (tmp_path / "registry" / "blobs").glob("*/*"):
        blob.chmod(0o600)
        blob.write_bytes(b"damaged")
    (model / "new.txt").write_text("another artifact with the same contents")
    listed = registry.add(WHAT, model, ANN, quiet)
    _, path = registry.open("chat", listed.revision.id, quiet)
    assert contents(path) == contents(model)


def spoil(folder: Path) -> None:
    """Damage every file in place."""
    for each in [each for each in folder.rglob("*") if each.is_file()]:
        each.chmod(0o600)
        each.write_bytes(b"damaged")


def test_linked_folders_belong_to_the_artifact(registry: Registry, model: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "merges.txt").write_text("a b")
    (model / "linked").symlink_to(tmp_path / "shared")
    listed = registry.add(WHAT, model, ANN, quiet)
    _, path = registry.open("chat", listed.revision.id, quiet)
    assert contents(path) == {**contents(model), "linked/merges.txt": b"a b"}
    assert [file.path for file in describe(model, quiet).files if "linked" in file.path] == ["linked/merges.txt"]
    (tmp_path / "shared" / "up").symlink_to(model)
    with pytest.raises(RegistryError, match=r"Too many levels of symbolic links: .*linked/up"):
        registry.add(WHAT, model, ANN, quiet)


def test_registering_a_damaged_artifact_again_repairs_it(registry: Registry, model: Path, tmp_path: Path) -> None:
    listed = registry.add(WHAT, model, ANN, quiet)
    spoil(tmp_path / "registry" / "trees")
    assert len(registry.verify(quiet)) == 3
    assert registry.add(WHAT, model, ANN, quiet) == listed
    assert registry.verify(quiet) == []
    (tmp_path / "registry" / "trees" / listed.revision.artifact / "copy.bin").unlink()
    registry.add(WHAT, model, ANN, quiet)
    assert registry.verify(quiet) == []
    assert [each.name for each in (tmp_path / "registry" / "trees").iterdir()] == [listed.revision.artifact]


def test_uploading_a_damaged_content_again_repairs_it(registry: Registry, model: Path, tmp_path: Path) -> None:
    registry.add(WHAT, model, ANN, quiet)
    spoil(tmp_path / "registry" / "blobs")
    manifest = describe(model, quiet)
    with pytest.raises(SourceError, match="has 7 bytes, not 64"), registry.sent(manifest, "model", quiet):
        pass
    for file in {file.sha256: file for file in manifest.files}.values():
        registry.uploads.put(file.sha256, file.size_bytes, 0, (model / file.path).read_bytes())
    assert registry.lacking(manifest) == ()
    with registry.sent(manifest, "model", quiet) as path:
        registry.add(WHAT, path, ANN, quiet)
    assert registry.verify(quiet) == []


def test_single_file_artifact_digest_is_its_sha256(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"abc")
    listed = registry.add(WHAT, file, ANN, quiet)
    assert listed.revision.artifact == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    _, path = registry.open("chat", listed.revision.id, quiet)
    assert (path.name, path.read_bytes()) == ("m.gguf", b"abc")


def test_only_approved_revisions_are_served(tmp_path: Path, model: Path) -> None:
    registry = make(tmp_path, ApprovalRules(approvals_min=2))
    id = registry.add(WHAT, model, ANN, quiet).revision.id
    with pytest.raises(RegistryError, match=rf"chat@{id}: is pending: 2 approvals of 2 missing"):
        registry.open("chat", id, quiet)
    registry.step("chat", id, Step.APPROVE, BOB, "looks good")
    with pytest.raises(RegistryError, match="bob has already approved it"):
        registry.step("chat", id, Step.APPROVE, BOB)
    with pytest.raises(RegistryError, match="needs the role admin"):
        registry.step("chat", id, Step.APPROVE, Actor("dan", Role.OPERATOR))
    assert registry.step("chat", id, Step.APPROVE, CID).standing.approved_by == ("bob", "cid")
    registry.open("chat", id, quiet)
    registry.step("chat", id, Step.REJECT, BOB, "it hallucinates")
    with pytest.raises(RegistryError, match="is rejected: rejected by bob: it hallucinates"):
        registry.open("chat", id, quiet)


def test_alias_points_to_one_revision_at_a_time(registry: Registry, model: Path) -> None:
    first = registry.add(WHAT, model, ANN, quiet).revision.id
    (model / "model.bin").write_bytes(b"2")
    second = registry.add(WHAT, model, ANN, quiet).revision.id
    assert registry.set_alias("chat", "champion", first, ANN).aliases == ("champion",)
    assert registry.set_alias("chat", "champion", first, ANN).aliases == ("champion",)
    registry.set_alias("chat", "champion", second, ANN)
    assert registry.show("chat", "champion").revision.id == second
    assert registry.show("chat", first).aliases == ()
    with pytest.raises(RegistryError, match="cannot be an alias"):
        registry.set_alias("chat", first, second, ANN)
    assert registry.set_alias("chat", "a" * 64, first, ANN).aliases == ("a" * 64,)
    with pytest.raises(RegistryError, match="an alias has at most 64 characters"):  # as PostgreSQL would say
        registry.set_alias("chat", "a" * 65, first, ANN)
    with pytest.raises(RegistryError, match=rf"no such revision; there is: .*{first}"):
        registry.set_alias("chat", "stable", "r-none", ANN)


def test_alias_never_stands_for_the_id_of_another_revision(tmp_path: Path, model: Path) -> None:
    registry = make(tmp_path, ApprovalRules(approvals_min=1))
    bad, good = WHAT, Description("chat", "./model", Task.CHAT, "openvino", {"threads": 3})
    first = registry.add(bad, model, ANN, quiet)
    planned = revision_id(first.revision.artifact, good.engine, good.settings)
    with pytest.raises(RegistryError, match="has the form of a revision's id, and cannot be an alias"):
        registry.set_alias("chat", planned, first.revision.id, ANN)
    with registry._store.write() as connection:  # an earlier version allowed it
        values = {"model": "chat", "alias": planned, "revision": first.revision.id}
        connection.execute(insert(ALIASES).values(changed_at=0.0, changed_by="ann", **values))

    assert registry.add(good, model, ANN, quiet).revision.id == planned
    approved = registry.step("chat", planned, Step.APPROVE, BOB)
    assert approved.revision.id == planned
    assert registry.show("chat", first.revision.id).standing.state is ApprovalState.PENDING


def test_sweep_removes_only_unreferenced_contents(registry: Registry, model: Path, tmp_path: Path) -> None:
    listed = registry.add(WHAT, model, ANN, quiet)
    stray = tmp_path / "registry" / "blobs" / "ab" / ("ab" * 32)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"12345")
    (tmp_path / "registry" / "blobs" / ".draft-x").write_bytes(b"123")
    (tmp_path / "registry" / "trees" / ("cd" * 32)).mkdir()
    assert registry.sweep() == 8
    assert registry.sweep() == 0
    assert registry.verify(quiet) == []
    registry.open("chat", listed.revision.id, quiet)


def test_missing_tree_is_rebuilt_and_missing_contents_are_reported(
    registry: Registry, model: Path, tmp_path: Path
) -> None:
    listed = registry.add(WHAT, model, ANN, quiet)
    tree = tmp_path / "registry" / "trees" / listed.revision.artifact
    (tree / "model.bin").unlink()
    assert registry.verify(quiet) == [f"{listed.revision.name}: model.bin: it is missing"]
    os.rename(tree, tmp_path / "away")
    assert registry.verify(quiet) == []
    os.rename(tree, tmp_path / "away2")
    for blob in (tmp_path / "registry" / "blobs").rglob("*"):
        if blob.is_file():
            blob.unlink()
    assert "register the artifact again" in registry.verify(quiet)[0]
    assert registry.add(WHAT, model, ANN, quiet) == listed
    assert registry.verify(quiet) == []


def test_empty_folder_and_added_symlink_are_rejected(registry: Registry, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RegistryError, match="no files"):
        registry.add(WHAT, tmp_path / "empty", ANN, quiet)
    listed = registry.add(WHAT, model, ANN, quiet)
    tree = tmp_path / "registry" / "trees" / listed.revision.artifact
    (tree / "extra.so").symlink_to("/etc/passwd")
    with pytest.raises(Tampered, match=r"extra\.so: it is not part of the artifact"):
        registry.open("chat", listed.revision.id, quiet)


@pytest.mark.slow
def test_every_changed_byte_of_an_artifact_is_detected(registry: Registry, model: Path, tmp_path: Path) -> None:
    listed = registry.add(WHAT, model, ANN, quiet)
    tree = tmp_path / "registry" / "trees" / listed.revision.artifact
    for file in sorted(each for each in tree.rglob("*") if each.is_file()):
        good = file.read_bytes()
        file.chmod(0o644)
        for place in range(len(good)):
            file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(Tampered, match=file.name):
                registry.open("chat", listed.revision.id, quiet)
        file.write_bytes(good)
    registry.open("chat", listed.revision.id, quiet)


COLUMNS = {
    ("artifacts", "manifest"): "manifest",
    ("revisions", "document"): "document",
    ("revisions", "digest"): "document",
    ("revisions", "artifact"): "document",
    ("approvals", "document"): "record 1 of its approval",
    ("approvals", "signature"): "record 1 of its approval",
}


@pytest.mark.slow
@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_every_changed_byte_of_a_record_is_detected(tmp_path: Path, model: Path, table: str, column: str) -> None:
    registry = make(tmp_path, ApprovalRules(approvals_min=1))
    id = registry.add(WHAT, model, ANN, quiet).revision.id
    registry.step("chat", id, Step.APPROVE, BOB)
    with sqlite3.connect(tmp_path / "store.db", isolation_level=None) as database:
        rowid, good = database.execute(f"SELECT rowid, {column} FROM {table} ORDER BY rowid").fetchone()
        for place in range(len(good)):
            bad = good[:place] + chr(ord(good[place]) ^ 1) + good[place + 1 :]
            database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (bad, rowid))
            with pytest.raises(Tampered, match=COLUMNS[table, column]):
                registry.open("chat", id, quiet)
            assert registry.verify(quiet)
        database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (good, rowid))
    registry.open("chat", id, quiet)
    assert registry.verify(quiet) == []


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM approvals WHERE number = 3", "has 2 records of approval, but the event log has 3"),
        ("DELETE FROM approvals WHERE number = 2", "belongs to|does not follow|signature|number 3"),
        ("UPDATE approvals SET number = 9 WHERE number = 2", "number"),
        ("UPDATE approvals SET model = 'other', revision = 'r-x'", "has 0 records of approval"),
        ("DELETE FROM events WHERE kind = 'revision.reject'", "the event log has 2"),
    ],
)
def test_rejection_cannot_be_undone_by_editing_the_store(
    tmp_path: Path, model: Path, statement: str, said: str
) -> None:
    registry = make(tmp_path, ApprovalRules(approvals_min=1))
    id = registry.add(WHAT, model, ANN, quiet).revision.id
    registry.step("chat", id, Step.APPROVE, BOB)
    registry.step("chat", id, Step.REJECT, CID)
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute(statement)
    with pytest.raises(Tampered, match=said):
        registry.open("chat", id, quiet)
    assert registry.verify(quiet)


def test_publishers_setting_requires_one_of_their_signatures(tmp_path: Path, model: Path) -> None:
    ours, theirs = own_signer(tmp_path / "ours.pem"), own_signer(tmp_path / "theirs.pem")
    registry = make(tmp_path, ApprovalRules(), (ours.public,))
    id = registry.add(WHAT, model, ANN, quiet).revision.id
    with pytest.raises(
        RegistryError, match=r"no signature of a key in `registry\.publishers`; `forebay registry sign"
    ):
        registry.open("chat", id, quiet)
    artifact = registry.show("chat", id).revision.artifact
    message = signed_message(artifact)
    with pytest.raises(RegistryError, match=f"not a signature of this artifact by the key {re.escape(ours.public)}"):
        registry.sign("chat", id, Proof(ours.public, theirs.sign(message)), ANN)
    registry.sign("chat", id, theirs.prove(message), ANN)
    with pytest.raises(RegistryError, match="do not count"):
        registry.open("chat", id, quiet)
    signed = registry.sign("chat", id, ours.prove(message), BOB)
    assert registry.sign("chat", id, ours.prove(message), BOB) == signed
    assert registry.open("chat", id, quiet)[0].signed_by == (theirs.public, ours.public)
    with sqlite3.connect(tmp_path / "store.db") as database:
        (text,) = database.execute("SELECT signatures FROM artifacts").fetchone()
        for signature in json.loads(text):
            for field in ("public", "signature"):
                good = signature[field]
                bad = good[:9] + ("A" if good[9] != "A" else "B") + good[10:]
                database.execute("UPDATE artifacts SET signatures = ?", (text.replace(good, bad),))
                database.commit()
                with pytest.raises(Tampered, match="a signature was changed"):
                    registry.open("chat", id, quiet)
                assert any("a signature was changed" in each for each in registry.verify(quiet))


def test_signatures_of_others_leave_room_for_those_of_publishers(tmp_path: Path, model: Path) -> None:
    ours = own_signer(tmp_path / "ours.pem")
    registry = make(tmp_path, ApprovalRules(), (ours.public,))
    listed = registry.add(WHAT, model, ANN, quiet)
    message = signed_message(listed.revision.artifact)
    proofs = [own_signer(tmp_path / f"{number}.pem").prove(message) for number in range(SIGNATURES_MAX + 1)]
    made = [{"public": each.public, "signature": each.signature, "by": "ann", "at": 0.0} for each in proofs]
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("UPDATE artifacts SET signatures = ?", (json.dumps(made[:SIGNATURES_MAX]),))
    with pytest.raises(RegistryError, match="has 100 signatures, the most allowed"):
        registry.sign("chat", listed.revision.id, proofs[-1], ANN)
    registry.sign("chat", listed.revision.id, ours.prove(message), BOB)
    registry.open("chat", listed.revision.id, quiet)


def test_approval_signed_by_another_registry_is_rejected(tmp_path: Path, model: Path) -> None:
    registry = make(tmp_path, ApprovalRules())
    id = registry.add(WHAT, model, ANN, quiet).revision.id
    (tmp_path / "registry.key").unlink()
    with pytest.raises(Tampered, match="another registry has signed it"):
        make(tmp_path, ApprovalRules()).open("chat", id, quiet)


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="forebay-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_encrypted_artifact_is_never_on_disk_in_plaintext(tmp_path: Path, memory: Path, model: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(base64.b64encode(os.urandom(32)))
    registry = make(
        tmp_path, ApprovalRules(), vault=Vault(tmp_path / "registry", KeyFile(key), memory), encrypts=True
    )
    before = contents(model)
    listed = registry.add(WHAT, model, ANN, quiet)
    id = listed.revision.id
    assert registry.add(WHAT, model, ANN, quiet) == listed
    on_disk = b"".join(contents(tmp_path / "registry").values())
    assert all(data not in on_disk for data in before.values() if len(data) > 8)
    _, path = registry.open("chat", id, quiet)
    assert path.is_relative_to(memory)
    assert contents(path) == before
    assert registry.verify(quiet) == []
    (path / "model.bin").chmod(0o600)
    (path / "model.bin").write_bytes(b"touched")
    assert contents(registry.open("chat", id, quiet)[1]) == before
    assert registry.sweep() == 0
    assert contents(registry.open("chat", id, quiet)[1]) == before

    without = make(tmp_path, ApprovalRules(), vault=Vault(tmp_path / "registry", None, memory))
    with pytest.raises(RegistryError, match=r"is encrypted, and `registry\.encryption` names no key"):
        without.open("chat", id, quiet)
    on_a_disk = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        vault = Vault(tmp_path / "registry", KeyFile(key), on_a_disk)
        with pytest.raises(RegistryError, match="must be on a tmpfs"):
            make(tmp_path, ApprovalRules(), vault=vault).open("chat", id, quiet)
    finally:
        on_a_disk.rmdir()


def test_registering_a_damaged_encrypted_artifact_again_repairs_it(tmp_path: Path, memory: Path, model: Path) -> None:
    (tmp_path / "key").write_bytes(base64.b64encode(os.urandom(32)))
    vault = Vault(tmp_path / "registry", KeyFile(tmp_path / "key"), memory)
    registry = make(tmp_path, ApprovalRules(), vault=vault, encrypts=True)
    listed = registry.add(WHAT, model, ANN, quiet)
    folder = tmp_path / "registry" / "sealed"
    for damage in (lambda each: each.write_bytes(b"damaged"), Path.unlink):
        for name in ("0", "key"):
            damage(folder / listed.revision.artifact / name)
            assert registry.verify(quiet)
            assert registry.add(WHAT, model, ANN, quiet) == listed
            assert registry.verify(quiet) == []
    assert [each.name for each in folder.iterdir()] == [listed.revision.artifact]


def test_memory_folder_writable_by_others_is_rejected(tmp_path: Path, memory: Path, model: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(base64.b64encode(os.urandom(32)))
    (memory / "open").mkdir()
    (memory / "open").chmod(0o777)
    (memory / "mine").mkdir()
    (memory / "link").symlink_to(memory / "mine")
    for folder in (memory / "open" / "x", memory / "link"):
        vault = Vault(tmp_path / "registry", KeyFile(key), folder)
        registry = make(tmp_path, ApprovalRules(), vault=vault, encrypts=True)
        id = registry.add(WHAT, model, ANN, quiet).revision.id
        with pytest.raises(RegistryError, match="other users can modify it"):
            registry.open("chat", id, quiet)
    assert contents(memory) == {}


def test_tampering_with_the_vault_is_detected_and_named(tmp_path: Path, memory: Path, model: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(base64.b64encode(os.urandom(32)))
    vault = Vault(tmp_path / "registry", KeyFile(key), memory)
    registry = make(tmp_path, ApprovalRules(), vault=vault, encrypts=True)
    listed = registry.add(WHAT, model, ANN, quiet)
    id, folder = listed.revision.id, tmp_path / "registry" / "sealed" / listed.revision.artifact
    for file, said in {
        "0": "copy.bin: chunk 0",
        "1": "model.bin: chunk 0",
        "2": "vocab.txt",
        "key": "is not the key",
    }.items():
        good = (folder / file).read_bytes()
        for place in range(0, len(good), 7):
            (folder / file).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(RegistryError, match=said):
                registry.open("chat", id, quiet)
            wrong = registry.verify(quiet)
            assert wrong
            assert all(each.startswith(f"chat@{id}: ") for each in wrong)
        (folder / file).unlink()
        with pytest.raises(RegistryError, match=r"missing|cannot be read"):
            registry.open("chat", id, quiet)
        (folder / file).write_bytes(good)
    (folder / "extra").write_bytes(b"x")
    with pytest.raises(RegistryError, match="extra: it is not part"):
        registry.open("chat", id, quiet)
    (folder / "extra").unlink()
    registry.open("chat", id, quiet)
