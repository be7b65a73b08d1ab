"""The child process of a model: `python -m forebay.modelserver.process.child FD PARENT_PID PLACEMENT MODEL`.

Binds its life to the parent's, applies its placement, and only then imports the model's libraries.
"""

import atexit
import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys
import threading

from forebay.modelserver.process import placement

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent thread that started this process ends; exit if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the server is gone")


def survive_sigterm() -> None:
    """Leave it to the server when to end: systemd, for one, sends SIGTERM to all processes of a service at once.

    It is handled, not ignored, so that programs that the model starts end on it; so do copies of the process.
    """

    def handle(number: int, frame: object) -> None:
        pass

    masks = threading.local()

    def block() -> None:  # else a copy that is ended at once might still handle it
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def reset() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.signal(signal.SIGTERM, handle)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _run_exit_handlers() -> None:
    """Run what the model has registered to be run at the end. The server does not wait for ever."""
    processes = sys.modules.get("multiprocessing")
    if processes is not None:
        for each in processes.active_children():
            if not each.daemon:  # its handler would wait for them; they end with the model
                each.kill()
    atexit._run_exitfuncs()


def main() -> None:
    """Run until the server stops it or is gone; never returns."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # models print; nothing reads this process's stdout
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that output before a crash is not lost
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    survive_sigterm()
    descriptor, parent, place, _ = sys.argv[1:]
    sys.argv = [""]  # as in Triton: what models run may parse it
    die_with_parent(int(parent))
    sock = socket.socket(fileno=int(descriptor))
    sock.set_inheritable(False)  # processes that the model starts must not keep the channel open
    placement.move(place)
    from forebay.modelserver.process.child.instance import flush
    from forebay.modelserver.process.child.running import run

    status = run(sock)
    _run_exit_handlers()
    flush()
    os._exit(status)  # not sys.exit: some libraries hang in destructors of their threads


if __name__ == "__main__":
    main()
