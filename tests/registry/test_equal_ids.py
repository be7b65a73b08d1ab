"""Ids of revisions are short: who wants to can make two that are equal."""

from contextlib import closing
from pathlib import Path

import pytest
from tests.registry.test_catalogue import ANN, BOB, WHAT, make, quiet

from forebay.core.registry.approval import ApprovalRules
from forebay.registry.proved import RegistryError


def test_another_artifact_with_the_id_of_a_registered_one_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    first.write_bytes(b"82838")
    second.write_bytes(b"122856")
    registry = make(tmp_path, ApprovalRules())
    with closing(registry._store):
        listed = registry.add(WHAT, first, ANN, quiet)
        assert listed.revision.id == "r-13fba863"
        with pytest.raises(RegistryError, match="chat@r-13fba863: is another artifact or has other settings"):
            registry.add(WHAT, second, BOB, quiet)
        assert registry.revisions("chat") == [listed]
