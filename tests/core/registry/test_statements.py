"""What a statement of OpenSSF's Model Signing covers: all files of an artifact as they are, and nothing else."""

import json
from typing import Any

import pytest

from forebay.core.registry.manifest import File, Manifest, make_manifest
from forebay.core.registry.statements import PREDICATE, STATEMENT, mismatch, signed_bytes

FOLDER = make_manifest([File("a.bin", 1, "a" * 64), File("deep/b.txt", 2, "b" * 64)])
GGUF = make_manifest([File("model.gguf", 3, "c" * 64)], lone=True)


def statement(manifest: Manifest, **changed: Any) -> dict[str, Any]:
    resources = [{"name": f.path, "algorithm": "sha256", "digest": f.sha256} for f in manifest.files]
    how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": ["model.sig", ".git"]}
    predicate = {"serialization": how, "resources": resources}
    subject = [{"name": "model", "digest": {"sha256": "0" * 64}}]
    return {"_type": STATEMENT, "subject": subject, "predicateType": PREDICATE, "predicate": predicate, **changed}


def mismatch_text(document: object, manifest: Manifest = FOLDER) -> str:
    return mismatch(json.dumps(document).encode(), manifest)


def with_resources(manifest: Manifest, *resources: tuple[str, str]) -> dict[str, Any]:
    found = statement(manifest)
    found["predicate"]["resources"] = [
        {"name": name, "algorithm": "sha256", "digest": digest} for name, digest in resources
    ]
    return found


def with_serialization(**changed: str) -> dict[str, Any]:
    found = statement(FOLDER)
    found["predicate"]["serialization"] |= changed
    return found


def test_statement_that_lists_all_files_matches_the_manifest() -> None:
    assert mismatch_text(statement(FOLDER)) == ""
    assert mismatch_text(statement(GGUF), GGUF) == ""
    assert mismatch_text(with_resources(GGUF, (".", "c" * 64)), GGUF) == ""


def test_ignored_paths_of_a_statement_may_exist() -> None:
    extra = [*FOLDER.files, File("model.sig", 9, "d" * 64), File(".git/hooks/x", 9, "e" * 64)]
    assert mismatch_text(statement(FOLDER), make_manifest(extra)) == ""


@pytest.mark.parametrize(
    ("document", "manifest", "why"),
    [
        (statement(FOLDER), make_manifest([*FOLDER.files, File("x.sig", 1, "d" * 64)]), "x.sig: it was not signed"),
        (
            statement(FOLDER),
            make_manifest([FOLDER.files[0], File("deep/b.txt", 2, "c" * 64)]),
            "deep/b.txt: the signed content differs",
        ),
        (statement(FOLDER), make_manifest(FOLDER.files[:1]), "deep/b.txt: it was signed, but is not part"),
        (with_resources(FOLDER, (".", "a" * 64)), FOLDER, "a.bin: it was not signed"),
        (with_resources(FOLDER, *[("a.bin", "a" * 64)] * 2), FOLDER, "lists a file twice"),
        (with_serialization(method="shards"), FOLDER, "shards with sha256"),
        (with_serialization(hash_type="blake3"), FOLDER, "files with blake3"),
        (
            statement(FOLDER, predicateType="https://model_signing/Digests/v0.1"),
            FOLDER,
            "it is a https://model_signing/D",
        ),
        (statement(FOLDER, _type="https://in-toto.io/Statement/v0.1"), FOLDER, "it is a"),
        (statement(FOLDER, predicate={"unused": ""}), FOLDER, "not a statement of version 1.0"),
        ([], FOLDER, "not a statement of version 1.0"),
    ],
)
def test_statement_mismatch_names_the_files(document: object, manifest: Manifest, why: str) -> None:
    assert why in mismatch_text(document, manifest)


def test_statement_with_another_digest_algorithm_is_rejected() -> None:
    found = statement(FOLDER)
    found["predicate"]["resources"][0]["algorithm"] = "blake2b"
    assert "only whole files with sha256" in mismatch_text(found)


def test_signed_bytes_include_lengths() -> None:
    assert signed_bytes(b"{}") == b"DSSEv1 28 application/vnd.in-toto+json 2 {}"
