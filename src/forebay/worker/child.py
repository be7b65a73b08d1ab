"""The engine child: `python -m forebay.worker.child FD PARENT_PID`.

A single-threaded loop: receive, step, send. Engine libraries hold the GIL while they step and may crash; in a process
of their own they can neither block nor crash the HTTP side. The child dies with its parent.
"""

import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

from forebay.core.errors import Refusal
from forebay.engines import create
from forebay.engines.protocol import (
    Detokenize,
    Embed,
    Engine,
    EngineBroken,
    EngineLoad,
    Event,
    Failed,
    Generate,
    Tokenize,
)
from forebay.wire.frames import FrameReader
from forebay.worker.channel import (
    Broken,
    Cancel,
    Configure,
    Ping,
    Pong,
    Progress,
    Ready,
    Stop,
    ToChild,
    ToWorker,
    decode_to_child,
    encode,
)

EXIT_BROKEN = 3
READ_BYTES = 1 << 18
REPORT_S = 0.25
"""A step without events is reported at least this often, as a sign of life."""
PR_SET_PDEATHSIG = 1


class Pipe:
    """The child's end of the socket pair. Sends block: the worker always reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, *messages: ToWorker) -> None:
        """Send messages as one frame."""
        self._socket.sendall(encode(messages))

    def receive(self, wait_s: float | None) -> list[ToChild]:
        """Received messages; waits up to `wait_s` (None: indefinitely) for some. Raises EOFError."""
        # poll() costs half of select(), and every step waits for it; but its resolution is milliseconds
        arrived = self._poll.poll(0) if wait_s == 0 else select.select([self._socket], [], [], wait_s)[0]
        if not arrived:
            return []
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise EOFError
        return [message for payload in self._reader.feed(data) for message in decode_to_child(payload)]


def serve(pipe: Pipe, engine: Engine) -> None:
    """Run the engine until the worker sends Stop. Any exception but EOFError means that the engine is broken."""
    wait_s: float | None = None
    reported, reported_at = EngineLoad(), time.monotonic()
    while True:
        events: list[Event] = []
        for message in pipe.receive(wait_s):
            match message:
                case Generate() | Embed() | Tokenize() | Detokenize():
                    try:
                        answer = engine.add(message, time.monotonic())
                        if answer is not None:
                            events.append(answer)
                    except Refusal as refusal:
                        events.append(Failed(message.id, refusal.code, refusal.text, refusal.param))
                case Cancel(id):
                    engine.cancel(id)
                case Ping():
                    pipe.send(Pong())
                case Stop():
                    return
                case Configure():
                    raise AssertionError("configured twice")
        step = engine.step(time.monotonic())
        events += step.events
        wait_s = step.wait_s
        now = time.monotonic()
        if events or step.cached is not None or step.load != reported or now - reported_at > REPORT_S:
            pipe.send(Progress(tuple(events), step.load, step.cached))
            reported, reported_at = step.load, now


def _die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the worker is gone")


def _channel(descriptor: int) -> socket.socket:
    """The worker's socket under a low number: with many connections it has a high one, which `select` rejects."""
    with socket.socket(fileno=descriptor) as given:
        return given.dup()


def _run(pipe: Pipe) -> int:
    first = pipe.receive(None)
    while not first:
        first = pipe.receive(None)
    match first:
        case [Configure(name, artifact, settings)]:
            pass
        case _:
            raise AssertionError("the first message must be Configure, alone")
    try:
        engine = create(name, artifact, settings)
        info = engine.load()
    except EngineBroken as broken:
        pipe.send(Broken(str(broken)))
        return EXIT_BROKEN
    gc.collect()
    gc.freeze()  # a loaded model never becomes garbage: do not scan it again and again
    pipe.send(Ready(info))
    serve(pipe, engine)
    engine.close()
    return 0


def main() -> None:
    """Run until the worker closes the channel; never returns."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print, and this process's stdout is not read
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # may be meant for all processes of a service: the worker drains
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent(int(sys.argv[2]))
    pipe = Pipe(_channel(int(sys.argv[1])))
    try:
        status = _run(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        status = 0  # the worker is gone
    except Exception as error:  # supervisor: after an exception the engine's state is unknown
        traceback.print_exc()
        with suppress(OSError):
            pipe.send(Broken(f"{type(error).__name__}: {error}"))
        status = EXIT_BROKEN
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: some libraries with threads of their own hang in their destructors


if __name__ == "__main__":
    main()
