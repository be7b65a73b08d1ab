"""Processes by identity: pid, start time and boot together, so that a reused pid is never taken for a unit."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

UNWRITTEN: Final = 120
"""Python's exit code if it could not flush stdout or stderr (see `sys.exit`)."""


class Identity(msgspec.Struct, frozen=True):
    """One process, unique across pid reuse and reboots."""

    pid: int
    ticks: int
    """When it started, in clock ticks since boot."""
    boot: str


def identify(pid: int) -> Identity | None:
    """The process with this pid now, possibly a zombie; None: there is none."""
    found = _look(pid)
    return found[0] if found else None


def is_alive(who: Identity) -> bool:
    """True while exactly this process exists and is not a zombie."""
    found = _look(who.pid)
    return found is not None and found[0] == who and found[1] not in (b"Z", b"X")


def _look(pid: int) -> tuple[Identity, bytes] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Identity(pid, int(fields[19]), boot), fields[0]


def kill(who: Identity, number: signal.Signals, *, group: bool = False) -> None:
    """Send a signal to exactly this process; with `group`, to its whole process group."""
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(who):  # so the handle is of this process, even if its pid is reused
            if group and os.getpgid(who.pid) == who.pid:
                os.killpg(who.pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def reap(pid: int) -> str | None:
    """How a child of this process ended, in words; None while it runs. Call it until it returns a text, not after."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "ended; exit status unknown, as it was collected elsewhere"
    return describe(os.waitstatus_to_exitcode(status)) if ended else None


def describe(code: int) -> str:
    """An exit code in words."""
    if code == UNWRITTEN:
        return f"ended with exit code {code}: its last output could not be written; is the disk full?"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def session_leaders(under: Path) -> Iterator[tuple[int, Path]]:
    """Session leaders whose last argument is a path below `under`: units, known or lost."""
    prefix = os.fsencode(under) + b"/"
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            last = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").rpartition(b"\0")[2]
            if last.startswith(prefix) and os.getsid(pid) == pid:
                yield pid, Path(os.fsdecode(last))
        except OSError:  # it has ended
            continue
