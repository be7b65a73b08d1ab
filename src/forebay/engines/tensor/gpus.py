"""NVIDIA's GPUs: which a process sees, what computes on them, and how models share one.

Only the driver's own library is asked (the CUDA driver API, through ctypes), and only in processes of models that run
on a GPU: whatever such a model is written with, its process has loaded that library already.
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
"""The parameter that says how much of its GPU's memory each process of a model may take, 0 to 1."""
BUILT_WITH_CUDA: Final = {
    "onnxruntime": ("onnxruntime", "capi/libonnxruntime_providers_cuda.so"),
    "pytorch": ("torch", "lib/libtorch_cuda.so"),
}
"""Backend → its library, and the file that this has where it was built for NVIDIA's GPUs."""
STICKY: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
"""Results of the CUDA driver API (cuda.h, CUresult) after which a process can use a GPU no more: illegal addresses
and instructions, failed assertions of kernels, uncorrected errors of memory or links, and the like."""


def visible(environment: Mapping[str, str], dev: Path = DEV) -> tuple[str, ...]:
    """What CUDA would count as 0, 1, …, by names for CUDA_VISIBLE_DEVICES: those named there, else all there are."""
    named = environment.get(VISIBLE)
    if named is None:
        count = sum(1 for each in dev.glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal())
        return tuple(map(str, range(count)))
    found: list[str] = []
    for name in map(str.strip, named.split(",")):
        if not name or name == "-1" or name in found:  # as CUDA has it: what comes after one that is wrong is unseen
            break
        found.append(name)
    return tuple(found)


def computing() -> frozenset[str]:
    """The backends that can compute on a GPU with what is installed here. Imports none of their libraries."""
    return frozenset({"python", *(name for name, (module, file) in BUILT_WITH_CUDA.items() if _has(module, file))})


def on_gpu(config: ModelConfig, instance: int) -> bool:
    """Whether that instance is to compute on a GPU. Its process sees only that one: it is CUDA's device 0."""
    return config.group_of(instance).kind is InstanceKind.GPU


def memory_fraction(config: ModelConfig) -> float | None:
    """How much of its GPU's memory a process may take; None: all of it. Raises `BackendFailed`."""
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
    """The memory of CUDA's device 0. Raises OSError if the driver cannot be asked."""
    cuda, device, size = ctypes.CDLL(DRIVER), ctypes.c_int(), ctypes.c_size_t()
    _check(cuda.cuInit(0), "cuInit")
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device), "cuDeviceTotalMem")
    return size.value


def broken() -> bool:
    """Whether this process can use one of its GPUs no more, after a fault in a kernel: only another process can."""
    try:
        cuda = ctypes.CDLL(DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:  # it has never used a GPU
        return False
    count = ctypes.c_int()
    # an error that stays is what every call answers, this one too; before cuInit it is another error
    found = cuda.cuDeviceGetCount(ctypes.byref(count))
    return found in STICKY or any(_state(cuda, number) in STICKY for number in range(0 if found else count.value))


def _state(cuda: ctypes.CDLL, number: int) -> int:
    """What the driver answers to a question about the work on a GPU. Nothing is waited for."""
    device, context, current = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    flags, active = ctypes.c_uint(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if not active.value:  # to look must not make a context
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
