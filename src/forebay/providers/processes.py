"""Processes by identity: pid, start time and boot together, so that a reused pid is never taken for a unit."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """One process, for all time."""

    pid: int
    ticks: int
    """When it started, in clock ticks since boot."""
    boot: str


def identify(pid: int) -> Identity | None:
    """The process that has this pid now, be it a zombie; None: there is none."""
    found = _look(pid)
    return found[0] if found else None


def is_alive(who: Identity) -> bool:
    """True while this very process exists and is no zombie."""
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
    """Send a signal to exactly this process; with `group` also to what it started in its process group."""
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(who):  # so the handle is of this process, whoever gets its pid next
            if group and os.getpgid(who.pid) == who.pid:
                os.killpg(who.pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def reap(pid: int) -> str | None:
    """How a child of this process ended, in words; None while it runs. To be called until it says so, not after."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "ended; how is unknown, for something else has asked first"
    return describe(os.waitstatus_to_exitcode(status)) if ended else None


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def session_leaders(under: Path) -> Iterator[tuple[int, Path]]:
    """Processes that lead a session and whose last argument is a path below `under`: units, known or lost."""
    prefix = os.fsencode(under) + b"/"
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            last = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").rpartition(b"\0")[2]
            if last.startswith(prefix) and os.getsid(pid) == pid:
                yield pid, Path(os.fsdecode(last))
        except OSError:  # it ended meanwhile
            continue
