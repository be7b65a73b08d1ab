"""Processes of the benchmark: started on one core, asked what they cost by the kernel's own account, killed whole."""

import argparse
import contextlib
import os
import platform
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

FILES_MAX: Final = 16_384
"""Open files allowed to every process started: a thousand streams are two thousand sockets of a proxy."""
ANSWER_TIMEOUT_S: Final = 120.0
WEIGHT: Final = "-15"
"""Nice value of a session. With `sched_autogroup` this, and not the nice value of a process, beats other sessions."""
BODY: Final = b'{"model":"mock","messages":[{"role":"user","content":"hi"}],"max_tokens":1}'


class Cores(NamedTuple):
    """What is measured, and what loads it, have a core each."""

    measured: int
    load: int


def cores(text: str) -> Cores:
    """Read `A,B`, for argparse: two different cores that this process may run on."""
    words = text.split(",")
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[0]) == int(words[1]):
        raise argparse.ArgumentTypeError(f"found {text!r}; two different core numbers are wanted, like 0,1")
    pair = Cores(*map(int, words))
    allowed = os.sched_getaffinity(0)
    if absent := [core for core in pair if core not in allowed]:
        raise argparse.ArgumentTypeError(
            f"there is no core {absent[0]}; there are {', '.join(map(str, sorted(allowed)))}"
        )
    return pair


def machine() -> dict[str, int | str]:
    """What results say of where they come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpus": os.cpu_count() or 0,
        "processor": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def allow_files() -> None:
    """Raise the limit on open files; processes started from now on inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_MAX if hard == resource.RLIM_INFINITY else min(FILES_MAX, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def cpu_ns(pid: int, *, alone: bool = False) -> int:
    """CPU time of a process tree so far, or of its first process, nanoseconds: `/proc/PID/task/*/schedstat`."""
    total = 0
    for each in [pid] if alone else tree(pid):
        for task in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(task.read_text().split()[0])
    return total


def memory_kb(pid: int, field: str) -> int:
    """`Pss` or `Rss` of a process tree in KB, from `/proc/PID/smaps_rollup`. Buffers of the kernel are not in it."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    total += int(line.split()[1])
    return total


@contextlib.contextmanager
def started(
    command: list[str], core: int | str, log: Path | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session on one core, ahead of other sessions' work; killed with its tree.

    `core` may be several: `0-5`. Its output goes to `log`; without one, its standard output is a pipe.
    """
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("wb")) if log is not None else None
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], stdout=sink or subprocess.PIPE, start_new_session=True,
            stderr=subprocess.STDOUT if sink else None, env={**os.environ, **(environ or {})},
        )  # fmt: skip
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(WEIGHT)
    try:
        yield process
    finally:
        for pid in tree(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def request(body: bytes, key: str) -> bytes:
    """A chat request as bytes of HTTP/1.1."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s" % (key.encode(), len(body), body)
    )


def await_answer(port: int, key: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the proxy really relays a request. Exits with its log if it ends, or never does."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(request(BODY, key))
            if connection.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.2)
    raise SystemExit(f"the proxy never answered; its log:\n{log.read_text(errors='replace')[-3000:]}")
