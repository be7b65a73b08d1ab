"""The child of a model: `python -m forebay.modelserver.process.child FD PARENT_PID PLACEMENT`.

It dies with its parent, goes where it is to run, and only then imports what serves the model.
"""

import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys

from forebay.modelserver.process import placement

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the thread that started this process ends; exit if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the server is gone")


def main() -> None:
    """Run until the server says stop or is gone; never returns."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # models print; nobody reads this process's stdout
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that what was printed before a crash is read
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # what a model starts must not keep the channel open
    placement.move(sys.argv[3])
    from forebay.modelserver.process.child.running import run

    status = run(sock)
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: libraries with threads of their own are known to hang in their destructors


if __name__ == "__main__":
    main()
