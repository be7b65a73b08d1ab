"""What a process gets at its start besides its command: a launcher, cores, devices."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from forebay.providers.protocol import ProviderError


def found_launcher(launcher: Sequence[str], path: str | None) -> list[str]:
    """The launcher with its program resolved in `path`, as by the shell. Raises `ProviderError`.

    The launcher must exec the command that follows: its process is the unit. `numactl`, `nice`, `taskset` and `ip
    netns exec` do; `sudo` and `docker run` stay as parent processes.
    """
    if not launcher:
        return []
    program = shutil.which(launcher[0], path=path)
    if program is None:
        raise ProviderError(f"the launcher `{launcher[0]}` is not in {path or 'PATH'}: see `launcher` of its node")
    return [os.path.abspath(program), *launcher[1:]]


def device_env(devices: Sequence[str]) -> dict[str, str]:
    """The environment that restricts a process to these GPUs, for CUDA and for containers; none: no restriction."""
    if not devices:
        return {}
    listed = ",".join(devices)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": listed, "NVIDIA_VISIBLE_DEVICES": listed}


@contextmanager
def on_cores(cpus: Sequence[int]) -> Iterator[None]:
    """Processes started meanwhile by this thread run on these cores from the beginning; none: on this thread's.

    Raises `ProviderError` if none of them exists.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        text = f"cores {','.join(map(str, cpus))} cannot be used: {error.strerror}; see `cpus` of the node"
        raise ProviderError(text) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
