"""Files and folders of records that someone removes or moves while the gateway runs: later records are not lost."""

import shutil
from pathlib import Path

import pytest
from tests.gateway.records.rig import (
    Disk,
    audit_files,
    audit_ids,
    decision_ids,
    facts,
    killed,
    ledger_sums,
    recorder,
    request_ids,
    started,
)

from forebay.gateway.records.recorder import CHECKPOINT_S, Recorder
from forebay.gateway.records.verifying import verify
from forebay.wire.records import Kind


def noted(records: Recorder, *numbers: int, now: float = 0.0) -> None:
    for n in numbers:
        records.finished(facts(n))
    records.flush(now)


@pytest.mark.parametrize("rotated", ["removed", "moved", "moved, and an empty one made"])
def test_records_go_on_in_a_new_file_when_the_current_one_is_gone(tmp_path: Path, rotated: str) -> None:
    records = started(tmp_path)
    noted(records, 0, 1)
    for path in [*audit_files(tmp_path), tmp_path / "gateway-0" / "decisions-00000001.log"]:
        if rotated == "removed":
            path.unlink()
        else:
            path.rename(tmp_path / path.name)
        if rotated == "moved, and an empty one made":
            path.touch()
    noted(records, 2, 3, now=1.0)
    noted(records, 4, now=2.0)
    records.close()
    assert audit_ids(tmp_path) == decision_ids(tmp_path) == request_ids(range(2, 5))
    report = verify(tmp_path / "gateway-0")
    assert [flaw.kind for flaw in report.flaws] == [Kind.MISSING], "what was removed, and nothing else"
    assert not any(file.flaws for file in report.files)
    assert verify(tmp_path / "gateway-0", archived=True).ok


def test_the_folder_is_made_again_and_the_usage_of_the_day_with_it(tmp_path: Path) -> None:
    records = started(tmp_path)
    noted(records, 0, 1)
    shutil.rmtree(tmp_path / "gateway-0")
    noted(records, 2, 3, now=CHECKPOINT_S)
    assert audit_ids(tmp_path) == decision_ids(tmp_path) == request_ids(range(2, 4))
    assert ledger_sums(tmp_path).requests == 4
    assert records.failing == 0
    successor = started(tmp_path)  # while this one drains
    noted(successor, 9)
    successor.close()
    records.close()
    assert decision_ids(tmp_path, "gateway-0+1") == ["req-9"], "the folder has an owner"


def test_a_removed_folder_is_on_record_even_if_no_request_follows(tmp_path: Path) -> None:
    disk = Disk()
    records = started(tmp_path, disk)
    noted(records, 0, 1)
    shutil.rmtree(tmp_path / "gateway-0")
    records.flush(1.0)
    killed(records, disk)
    assert [flaw.kind for flaw in verify(tmp_path / "gateway-0").flaws] == [Kind.MISSING]


def test_records_are_held_until_the_folder_can_be_made_again(tmp_path: Path) -> None:
    root = tmp_path / "records"
    records = recorder(root)
    assert records.start()
    noted(records, 0)
    shutil.rmtree(root)
    root.touch()  # no folder can be made here
    noted(records, 1, now=1.0)
    assert records.failing == 1
    root.unlink()
    noted(records, 2, now=2.0)
    records.close()
    assert audit_ids(root) == decision_ids(root) == request_ids(range(1, 3))
    assert records.lost == 0
