"""The child: loads the model, starts instances, answers pings, and carries calls to other models.

The thread of the control channel does nothing that takes long, so that pings are answered while batches run. The main
thread loads the model. It then has the control channel, unless the model cannot share its process with other
instances (Python models): these run their batches in the main thread, and the control channel has another one. What
belongs to a thread, such as PyTorch's gradient mode or an SQLite connection, is thus the same in `initialize`,
`execute` and `finalize`, as in Triton.
"""

import gc
import itertools
import os
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.engines.tensor import create
from forebay.engines.tensor.measures import Measuring
from forebay.engines.tensor.protocol import Act, Backend, BackendFailed, Informed, Loaded, Request, Response
from forebay.modelserver.process import messages
from forebay.modelserver.process.channel import Channel, Received
from forebay.modelserver.process.child import outgoing
from forebay.modelserver.process.child.arrays import array_of
from forebay.modelserver.process.child.instance import EXIT_BROKEN, Instance, flush
from forebay.modelserver.process.child.steps import Steps
from forebay.modelserver.process.messages import (
    Broken,
    Cancel,
    Configure,
    Measure,
    Measured,
    Open,
    Ping,
    Pong,
    Ready,
    Reply,
    Respond,
    Stop,
    TakeBack,
    ToChild,
)
from forebay.modelserver.process.segments import Sharing

INSTANCE_JOIN_S: Final = 1.0
"""How long to wait for a running batch when the server stops the child."""

LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""The beginning of what Git puts in place of a large file that has not been downloaded."""
LFS_POINTER_BYTES_MAX: Final = 1024
FILES_MAX: Final = 1000
"""Files that are searched for pointers."""
IN_COPY: Final = (
    "other models cannot be called in a copy of the model's process (os.fork, multiprocessing), which gets no "
    "responses: call them in the process itself, from threads for example"
)

_OnResponse = Callable[[Response, bool], None]


class Child:
    """The model, its instances, and its calls to other models."""

    def __init__(self, channel: Channel[ToChild]) -> None:
        self._channel = channel
        self._process = os.getpid()
        self._backend: Backend | None = None
        self._declared: dict[str, Datatype] = {}
        self._instances: dict[int, Instance] = {}
        self._threads: list[threading.Thread] = []
        self._single: SimpleQueue[Instance | None] | None = None
        """For the main thread, if it runs the only instance; None in it: there will be no instance."""
        self._idle = threading.Event()
        """The main thread runs no instance any more."""
        self._reader: threading.Thread | None = None
        """The thread of the control channel; None: there is none yet, or it has ended."""
        self._first_reader: threading.Thread | None = None
        """Its first one, which ends when the server stops the child: maybe as soon as it is started."""
        self._starting = threading.Lock()
        self._calls: dict[int, _OnResponse] = {}
        self._numbers = itertools.count(1)

    def load(self, configure: Configure) -> Loaded:
        """Load the model. Raises `BackendFailed`."""
        backend = self._backend = Steps(configure.steps) if configure.steps else create(configure.backend)
        if isinstance(backend, Informed) and configure.document:
            backend.tell(configure.document)
        loaded = backend.load(configure.config, Path(configure.folder), configure.instance, self._call)
        config: ModelConfig = loaded.config or configure.config
        self._declared = {spec.name: spec.datatype for spec in loaded.outputs} | config.output_datatypes
        if loaded.threads:
            self._reader = self._reader or threading.main_thread()
        else:
            self._single = self._single or SimpleQueue()
        return loaded

    def serve(self) -> None:
        """Run instances until the server stops the child, then close the model. Raises EOFError when the server is
        gone.
        """
        if self._single is None:
            self._handle()
            self._stop_instances()
        else:
            control = self._first_reader or self._reading()
            instance = self._single.get()
            if instance is not None:
                instance.run()
            self._idle.set()
            control.join()
        self._close()

    def _reading(self) -> threading.Thread:
        """The thread of the control channel; it is started if there is none."""
        with self._starting:
            reader = self._reader
            if reader is None:
                self._single = self._single or SimpleQueue()
                reader = self._reader = threading.Thread(target=self._control, name="control", daemon=True)
                self._first_reader = self._first_reader or reader
                reader.start()
            return reader

    def _control(self) -> None:
        """The thread of the control channel beside an instance in the main thread. Ends the process if that one is
        stuck.
        """
        assert self._single is not None
        status = _guarded(self._channel, self._handle)
        self._reader = None  # the model may call again while it is closed, and the server answers until it has ended
        if status is None:
            self._single.put(None)
            self._stop_instances()
            if self._idle.wait(INSTANCE_JOIN_S):
                return  # the main thread closes the model
            status = _guarded(self._channel, self._close) or 0
        flush()
        os._exit(status)

    def _handle(self) -> None:
        """Handle messages until the server stops the child. Raises EOFError when the server is gone."""
        while True:
            received = self._channel.receive()
            match received.message:
                case Ping():
                    self._channel.send(*self._channel.pack(Pong()))
                case Measure():
                    self._tell_measures()
                case TakeBack(instance, leases):
                    if instance in self._instances:
                        self._instances[instance].channel.take_back(leases)
                case Cancel(instance, batch, index):
                    if instance in self._instances:
                        self._instances[instance].cancel(batch, index)
                case Respond(call, reply, final):
                    self._responded(call, reply, final, received.parts)
                case Open(instance):
                    self._open(instance, received)
                case Stop():
                    self._tell_measures()
                    return
                case unexpected:
                    raise AssertionError(f"unexpected {type(unexpected).__name__}")

    def _stop_instances(self) -> None:
        for instance in self._instances.values():
            with suppress(OSError):
                instance.channel.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(INSTANCE_JOIN_S)

    def _close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def _tell_measures(self) -> None:
        if isinstance(self._backend, Measuring):
            self._channel.send(*self._channel.pack(Measured(self._backend.measured())))

    def _open(self, number: int, received: Received[ToChild]) -> None:
        assert self._backend is not None
        channel = Channel[ToChild](socket.socket(fileno=received.fds[0]), ToChild, Sharing.READ)
        instance = self._instances[number] = Instance(number, channel, self._backend, self._declared)
        if self._single is not None:
            self._single.put(instance)
            return
        thread = threading.Thread(target=instance.run, name=f"instance-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _call(
        self, model: str, version: int, request: Request, on_response: _OnResponse, act: Act = Act.INFER
    ) -> Callable[[], None]:
        """Call another model. Called by the backend in any thread, as is the returned cancel function."""
        if os.getpid() != self._process:
            raise RuntimeError(IN_COPY)
        told, parcel = outgoing.ask(self._channel, request)
        number = next(self._numbers)
        self._calls[number] = on_response
        if self._reader is None:
            self._reading()
        self._channel.send(
            *self._channel.pack(messages.Call(number, outgoing.plain(model), version, told, act), parcel)
        )
        return partial(self._withdraw, number)

    def _withdraw(self, call: int) -> None:
        """Cancel a call; its end still comes from the server."""
        if call in self._calls:
            self._channel.send(*self._channel.pack(messages.Withdraw(call)))

    def _responded(self, call: int, reply: Reply | None, final: bool, parts: list[memoryview]) -> None:
        on_response = self._calls.pop(call) if final else self._calls[call]
        response = Response()
        if reply is not None:
            outputs = {piece.name: array_of(piece, parts[piece.part]) for piece in reply.outputs}
            bf16 = frozenset(piece.name for piece in reply.outputs if piece.datatype is Datatype.BF16)
            response = Response(outputs, error=reply.error, kind=reply.kind, parameters=reply.parameters, bf16=bf16)
        on_response(response, final)


def _pointers(folder: Path) -> str:
    """A note on files of the model that Git LFS has not downloaded; empty: there are none."""
    found = []
    with suppress(OSError):
        for file in itertools.islice(folder.rglob("*"), FILES_MAX):
            if file.is_file() and file.stat().st_size <= LFS_POINTER_BYTES_MAX:
                with file.open("rb") as opened:
                    if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                        found.append(str(file.relative_to(folder)))
    return f"; not downloaded from Git LFS (`git lfs pull`): {', '.join(sorted(found))}" if found else ""


def run(sock: socket.socket) -> int:
    """Serve the model named in the first message; returns the exit status."""
    channel = Channel[ToChild](sock, ToChild, Sharing.READ)
    return _guarded(channel, partial(_run, channel)) or 0


def _run(channel: Channel[ToChild]) -> int | None:
    child = Child(channel)
    configure = channel.receive().message
    assert isinstance(configure, Configure)
    try:
        loaded = child.load(configure)
    except BackendFailed as failed:
        text = str(failed) + _pointers(Path(configure.folder))
        channel.send(*channel.pack(Broken(outgoing.error_text(text))))
        return EXIT_BROKEN
    _keep_standard_files()
    gc.collect()
    gc.freeze()  # a loaded model never becomes garbage: keep the collector from scanning it again and again
    channel.send(*channel.pack(Ready(loaded)))
    child.serve()
    return None


def _keep_standard_files() -> None:
    """Replace those that the model has closed: else sockets would get their numbers, and be printed to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def _guarded(channel: Channel[ToChild], part: Callable[[], int | None]) -> int | None:
    """Run a part of the child's work: the status that the process must exit with; None: it may go on."""
    try:
        return part()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the server is gone
    except BaseException as error:  # supervisor: the state of the model is unknown from here on
        traceback.print_exc()
        with suppress(OSError):
            channel.send(*channel.pack(Broken(outgoing.error_text(f"{type(error).__name__}: {error}"))))
        return EXIT_BROKEN
