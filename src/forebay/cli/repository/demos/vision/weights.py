"""Reads PyTorch weight files without PyTorch: the format before version 1.6, float tensors on the CPU only.

Such a file is a sequence of pickles, followed by the elements. Of the names in a pickle only those in the closed
table `KNOWN` are ever called.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.engines.tensor.protocol import Array
from forebay.registry.sources import SourceError

MAGIC: Final = 0x1950A86A20F9469CFC6C
"""Content of the format's first pickle."""
_ITEMS_MAX: Final = 1 << 31


class BadWeights(SourceError):  # noqa: N818 - states the condition
    """The file is not in this format; the text is for the user."""


class _Storage:
    """A contiguous run of elements, read after all pickles."""

    def __init__(self, dtype: np.dtype[Any], count: int) -> None:
        self.elements: Array = np.empty(count, dtype)


class _Reader(pickle.Unpickler):
    """Unpickles tensors, and nothing else."""

    def __init__(self, file: io.BufferedReader, storages: dict[str, _Storage]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get(f"{module}.{name}")
        if found is None:
            raise BadWeights(f"the file references {module}.{name}, which no weight file needs")
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid[:5]
        if kind != "storage" or not isinstance(dtype, np.dtype) or not 0 <= count < _ITEMS_MAX:
            raise BadWeights("the file references an object that is not a tensor storage")
        return self._storages.setdefault(key, _Storage(dtype, count))


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Array:
    """A view of a storage, which is filled later. `strides` are in elements."""
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if min((offset, *strides)) < 0 or 0 in shape or last >= storage.elements.size:
        raise BadWeights("the file has a tensor that exceeds its storage")
    steps = tuple(step * storage.elements.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(storage.elements[offset:], shape, steps, writeable=False)


KNOWN: Final[Mapping[str, Any]] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.LongStorage": np.dtype("<i8"),
}
"""Names allowed in a pickle of weights, and what they stand for."""


def read_weights(file: Path) -> dict[str, Array]:
    """The tensors of a file by name. Raises `BadWeights`."""
    storages: dict[str, _Storage] = {}
    with file.open("rb") as stream:
        try:
            reader = _Reader(stream, storages)
            if reader.load() != MAGIC:
                raise BadWeights(f"{file.name} is not a PyTorch weight file in the legacy format")
            _protocol, _system, found = (_Reader(stream, storages).load() for _ in range(3))
            for key in _Reader(stream, storages).load():
                storage = storages[key].elements
                if int.from_bytes(stream.read(8), "little") != storage.size:
                    raise BadWeights(f"{file.name} has contradictory sizes of a storage")
                if stream.readinto(storage.view(np.uint8).data) != storage.nbytes:
                    raise BadWeights(f"{file.name} is truncated")
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
            raise BadWeights(f"{file.name} cannot be read: {error}") from error
    return dict(found)
