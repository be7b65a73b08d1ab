"""Reads files of PyTorch weights without PyTorch: the format of before version 1.6, of float tensors on the CPU.

Such a file is a row of pickles, and the elements after them. Of what a pickle may name, nothing but the few things of
the closed table `KNOWN` is ever called.
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
"""What the format's first pickle holds."""
_ITEMS_MAX: Final = 1 << 31


class BadWeights(SourceError):  # noqa: N818 - states the condition
    """The file is not of this format; the text is for people."""


class _Storage:
    """A run of elements, which are read after all pickles."""

    def __init__(self, dtype: np.dtype[Any], count: int) -> None:
        self.elements: Array = np.empty(count, dtype)


class _Reader(pickle.Unpickler):
    """Reads pickles of tensors, and nothing else."""

    def __init__(self, file: io.BufferedReader, storages: dict[str, _Storage]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get(f"{module}.{name}")
        if found is None:
            raise BadWeights(f"the file wants {module}.{name}, which no file of weights needs")
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid[:5]
        if kind != "storage" or not isinstance(dtype, np.dtype) or not 0 <= count < _ITEMS_MAX:
            raise BadWeights("the file refers to something that is no storage of elements")
        return self._storages.setdefault(key, _Storage(dtype, count))


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Array:
    """A view of a storage, which is filled later. `strides` count elements."""
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if min((offset, *strides)) < 0 or 0 in shape or last >= storage.elements.size:
        raise BadWeights("the file holds a tensor that lies beyond its storage")
    steps = tuple(step * storage.elements.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(storage.elements[offset:], shape, steps, writeable=False)


KNOWN: Final[Mapping[str, Any]] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.LongStorage": np.dtype("<i8"),
}
"""What a pickle of weights may name, and what that is here."""


def read_weights(file: Path) -> dict[str, Array]:
    """The tensors of a file by their names. Raises `BadWeights`."""
    storages: dict[str, _Storage] = {}
    with file.open("rb") as stream:
        try:
            reader = _Reader(stream, storages)
            if reader.load() != MAGIC:
                raise BadWeights(f"{file.name} is not a file of PyTorch weights of the old format")
            _protocol, _system, found = (_Reader(stream, storages).load() for _ in range(3))
            for key in _Reader(stream, storages).load():
                storage = storages[key].elements
                if int.from_bytes(stream.read(8), "little") != storage.size:
                    raise BadWeights(f"{file.name} says two things about the size of a storage")
                if stream.readinto(storage.view(np.uint8).data) != storage.nbytes:
                    raise BadWeights(f"{file.name} ends too early")
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
            raise BadWeights(f"{file.name} cannot be read: {error}") from error
    return dict(found)
