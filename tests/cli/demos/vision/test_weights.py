"""PyTorch weight files are read as PyTorch reads them, but no code in them is executed."""

import io
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from forebay.cli.repository.demos.vision.weights import MAGIC, BadWeights, read_weights


def file_of(tmp_path: Path, *pickles: object, data: bytes = b"") -> Path:
    path = tmp_path / "weights.pth"
    path.write_bytes(b"".join(pickle.dumps(each, 2) for each in pickles) + data)
    return path


def saved(tmp_path: Path) -> Path:
    """What PyTorch itself writes: of several kinds, in several layouts, two in one storage."""
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
    rows = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = {"rows": rows, "turned": rows.t(), "last": rows[2], "one": torch.tensor(7), "flat": torch.ones(1, 1, 5)}
    path = tmp_path / "saved.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def test_weights_equal_those_that_pytorch_saved(tmp_path: Path) -> None:
    found = read_weights(saved(tmp_path))

    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    wanted = {"rows": rows, "turned": rows.T, "last": rows[2], "one": np.array(7), "flat": np.ones((1, 1, 5))}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(BadWeights):
            read_weights(path)


def test_calls_in_a_pickle_are_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("called",))

    with pytest.raises(BadWeights, match=r"references __builtin__\.print"):
        read_weights(file_of(tmp_path, MAGIC, 1001, {}, Evil()))


def test_other_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match="not a PyTorch weight file"):
        read_weights(file_of(tmp_path, 5))
    (tmp_path / "weights.pth").write_bytes(b"PK\x03\x04 a newer one")
    with pytest.raises(BadWeights):
        read_weights(tmp_path / "weights.pth")


class Storing(pickle.Pickler):
    """Writes None as a reference to a storage, of a kind of its own."""

    def persistent_id(self, found: object) -> object:
        return ("storage", "kind", "0", "cpu", 3) if found is None else None


def test_reference_to_anything_but_a_storage_is_rejected(tmp_path: Path) -> None:
    file = io.BytesIO()
    Storing(file, 2).dump(None)
    data = file.getvalue() + pickle.dumps(["0"], 2) + struct.pack("<q", 3) + bytes(12)
    with pytest.raises(BadWeights, match="not a tensor storage"):
        read_weights(file_of(tmp_path, MAGIC, 1001, {}, data=data))
