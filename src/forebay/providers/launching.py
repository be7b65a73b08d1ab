"""What a process is given at its start beside its command: a launcher, cores, devices."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from forebay.providers.protocol import ProviderError


def found_launcher(launcher: Sequence[str], path: str | None) -> list[str]:
    """The words with the program as it is found in `path`, as the shell would. Raises `ProviderError`.

    The launcher has to become the command that follows, by exec: its process is the unit. So do `numactl`, `nice`,
    `taskset` and `ip netns exec`; `sudo` and `docker run` stay before it.
    """
    if not launcher:
        return []
    program = shutil.which(launcher[0], path=path)
    if program is None:
        raise ProviderError(f"the launcher `{launcher[0]}` is not in {path or 'PATH'}: see `launcher` of its node")
    return [os.path.abspath(program), *launcher[1:]]


def device_env(devices: Sequence[str]) -> dict[str, str]:
    """What makes a process see these GPUs only, for CUDA and for containers; none: nothing is said."""
    if not devices:
        return {}
    listed = ",".join(devices)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": listed, "NVIDIA_VISIBLE_DEVICES": listed}


@contextmanager
def on_cores(cpus: Sequence[int]) -> Iterator[None]:
    """What is started meanwhile by this thread runs on these cores from its first moment; none: as this thread.

    Raises `ProviderError` where none of them is there.
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
