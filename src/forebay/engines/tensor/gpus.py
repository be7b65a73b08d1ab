"""NVIDIA GPUs: which ones a process sees, what can run on them, and how models share one.

Uses only the driver's own library (the CUDA driver API, through ctypes), and only in processes of models that run on
a GPU, which have loaded it anyway.
"""

import ctypes
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from forebay.core.serving.config import InstanceKind, ModelConfig
from forebay.engines.tensor.protocol import BackendFailed

DEV: Final = Path("/dev")
DRIVER: Final = "libcuda.so.1"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
FRACTION: Final = "forebay.gpu_memory_fraction"
"""Parameter for the fraction of its GPU's memory that each process of a model may use, 0 to 1."""
BUILT_WITH_CUDA: Final = {
    "onnxruntime": ("onnxruntime", "capi/libonnxruntime_providers_cuda.so"),
    "pytorch": ("torch", "lib/libtorch_cuda.so"),
}
"""Backend → its library, and a file that exists only if it was built for NVIDIA GPUs."""
STICKY: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
"""Results of the CUDA driver API (cuda.h, CUresult) after which a process cannot use the GPU any more: illegal
addresses and instructions, failed assertions of kernels, uncorrected errors of memory or links, and the like.
"""


def visible(environment: Mapping[str, str], dev: Path = DEV) -> tuple[str, ...]:
    """Names for CUDA_VISIBLE_DEVICES of the devices that CUDA numbers 0, 1, …: those listed there, else all."""
    named = environment.get(VISIBLE)
    if named is None:
        count = sum(1 for each in dev.glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal())
        return tuple(map(str, range(count)))
    found: list[str] = []
    for name in map(str.strip, named.split(",")):
        if not name or name == "-1" or name in found:  # as in CUDA, devices after an invalid one are invisible
            break
        found.append(name)
    return tuple(found)


def computing() -> frozenset[str]:
    """Backends that can use a GPU with what is installed. Imports none of their libraries."""
    return frozenset({"python", *(name for name, (module, file) in BUILT_WITH_CUDA.items() if _has(module, file))})


def on_gpu(config: ModelConfig, instance: int) -> bool:
    """Whether that instance runs on a GPU. Its process sees only that one, as CUDA's device 0."""
    return config.group_of(instance).kind is InstanceKind.GPU


def memory_fraction(config: ModelConfig) -> float | None:
    """Fraction of its GPU's memory that a process may use; None: all of it. Raises `BackendFailed`."""
    text = config.parameters.get(FRACTION, "")
    if not text:
        return None
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise BackendFailed(
            f"model '{config.name}': parameter {FRACTION} is {text!r}; it must be a number above 0 and up to 1"
        )
    return share


def memory_bytes() -> int:
    """Memory of CUDA's device 0. Raises OSError if the driver call fails."""
    cuda, device, size = ctypes.CDLL(DRIVER), ctypes.c_int(), ctypes.c_size_t()
    _check(cuda.cuInit(0), "cuInit")
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device), "cuDeviceTotalMem")
    return size.value


def broken() -> bool:
    """Whether this process can no longer use one of its GPUs after a fault in a kernel: only a new process can."""
    try:
        cuda = ctypes.CDLL(DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:  # this process has never used a GPU
        return False
    count = ctypes.c_int()
    # every call returns a sticky error, this one too; before cuInit it returns another error
    found = cuda.cuDeviceGetCount(ctypes.byref(count))
    return found in STICKY or any(_state(cuda, number) in STICKY for number in range(0 if found else count.value))


def _state(cuda: ctypes.CDLL, number: int) -> int:
    """The driver's status of the work on a GPU. Does not block."""
    device, context, current = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    flags, active = ctypes.c_uint(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if not active.value:  # the check must not create a context
        return 0
    found = int(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    if not found:
        found = int(cuda.cuCtxPushCurrent_v2(context)) or int(cuda.cuStreamQuery(None))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(current))
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return found


def _has(module: str, file: str) -> bool:
    spec = find_spec(module)
    return any((Path(folder) / file).is_file() for folder in (spec and spec.submodule_search_locations) or ())


def _check(result: int, call: str) -> None:
    if result:
        raise OSError(f"{call} failed: {result}")
