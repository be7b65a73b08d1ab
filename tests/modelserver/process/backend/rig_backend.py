"""A backend that does what a request's parameter `do`, or the model's parameter `load`, names."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.engines.tensor.protocol import BackendFailed, CallModel, Emit, Loaded, Request, Response, Rows


class RigBackend:
    """Answers with its inputs unless told otherwise."""

    def load(self, config: ModelConfig, folder: Path, instance: int, call: CallModel) -> Loaded:
        self._parameters = config.parameters
        self._loader = threading.current_thread()
        self._folder = folder
        self._call = call
        self._kept: list[Any] = []
        self._meet = threading.Barrier(2)
        match config.parameters.get("load", ""):
            case "fail":
                raise BackendFailed("there is no such file")
            case "garble":
                raise BackendFailed("there is no file \udcff")
            case "raise":
                raise RuntimeError("this is a mistake in the backend")
            case "abort":
                print("something odd happened", flush=True)
                os.abort()
            case "slow":
                threading.Event().wait()
            case "second fails" if instance > 0:
                raise BackendFailed("only one of these fits")
            case "once" if (folder / "once").exists():
                raise BackendFailed("it has gone")
        (folder / "once").touch()
        if "ballast" in config.parameters:
            self._kept.append(np.ones(int(config.parameters["ballast"]), np.uint8))
        outputs = (TensorSpec("bf", Datatype.BF16, (-1,)),)
        return Loaded(outputs=outputs, threads=config.parameters.get("threads") != "no")

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response | None]:
        name = str(requests[0].parameters.get("do", "echo")).replace(" ", "_")
        return list(getattr(self, name)(requests, emit, instance))

    def close(self) -> None:
        if self._parameters.get("close") == "hang":
            threading.Event().wait()
        (self._folder / "closed").write_text(str(threading.current_thread() is self._loader))

    def echo(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        return [Response({name: array for name, array in request.inputs.items()}) for request in requests]

    def add_in_place(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        for request in requests:
            request.inputs["x"] += 1
        return self.echo(requests, emit, instance)

    def facts(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        first = requests[0]
        whole = all(
            (a.ctypes.data + a.nbytes) == b.ctypes.data
            for a, b in zip([r.inputs["x"] for r in requests], [r.inputs["x"] for r in requests[1:]], strict=False)
        )
        told = {
            "instance": instance,
            "loader": threading.current_thread() is self._loader is threading.main_thread(),
            "pid": os.getpid(),
            "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "nice": os.nice(0),
            "omp": os.environ.get("OMP_NUM_THREADS", ""),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "adjacent": whole,
            "aligned": first.inputs["x"].ctypes.data % 16 == 0,
            "writeable": first.inputs["x"].flags.writeable,
            "memory": _mapped_at(first.inputs["x"].ctypes.data),
        }
        asked = [
            f"{r.id}|{r.wanted}|{sorted(r.parameters.items())}|{r.correlation_id}|{r.start}|{r.end}|{r.timeout_us}"
            f"|{r.priority}"
            for r in requests
        ]
        return [Response(parameters={**told, "asked": text}) for text in asked]

    def crash(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        print("about to crash")
        os.abort()

    def kill(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    def terminate(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        """End a copy of the process and another program with SIGTERM; this process gets it, too."""
        copy = os.fork()
        if not copy:
            signal.pause()
        program = subprocess.Popen(["/bin/sleep", "3600"])
        for pid in (os.getpid(), copy, program.pid):
            os.kill(pid, signal.SIGTERM)
        program.wait()
        os.waitpid(copy, 0)
        return list(self.echo(requests, emit, instance))

    def hang(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        threading.Event().wait()
        return []

    def freeze(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return [None] * len(requests)

    def fail(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        raise ValueError("cannot do that")

    def leave(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        raise SystemExit("bye")

    def lose_gpu(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        ctypes.CDLL(str(requests[0].parameters["library"]))
        os.environ["STUB_QUERY"] = "700"
        if requests[0].parameters.get("say"):
            return [Response(error="a kernel has failed") for _ in requests]
        raise ValueError("a kernel has failed")

    def garble(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        raise ValueError("half a \udcff character, " + "and much more" * 100_000)

    def garbled(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        half = "\udcff"
        told = Response({half: requests[-1].inputs["x"]}, parameters={half: half})
        return [Response(error=f"not {half}") if r.id == "odd" else told for r in requests]

    def numpy_text(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        return [Response({np.str_("y"): r.inputs["x"]}, parameters={np.str_("a"): np.str_("b")}) for r in requests]

    def chatter(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        os.write(2, b"on and on\n" * 100_000)
        return self.echo(requests, emit, instance)

    def too_few(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        return []

    def odd(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        wrong: Any = "text"
        return [Response({"y": wrong}) if r.id == "odd" else Response(error="not me") for r in requests]

    def noise(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        os.write(1, b"\xff\x00garbage\n" * 1000)
        os.write(2, b"\x80 more of it without an end " * 1000)
        return self.echo(requests, emit, instance)

    def scribble(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        for fd in range(3, 64):
            try:
                os.write(fd, b"this is not a packet")
            except OSError:
                continue
        threading.Event().wait()
        return []

    def leak(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        self._kept.append(np.ones(64 << 20, np.uint8))
        return self.echo(requests, emit, instance)

    def keep(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        self._kept.append(requests[0].inputs["x"])
        return [Response({"x": self._kept[0]}) for _ in requests]

    def meet(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        self._meet.wait()
        return self.echo(requests, emit, instance)

    def meet_in_folder(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        (self._folder / f"here-{os.getpid()}").touch()
        while len(list(self._folder.glob("here-*"))) < 2:
            time.sleep(0.01)
        return self.echo(requests, emit, instance)

    def child(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        return [Response(parameters={"pid": grandchild.pid}) for _ in requests]

    def stream(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        threading.Thread(target=self._stream, args=(requests, emit), daemon=True).start()
        return [None] * len(requests)

    def flood(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        return self._stream(requests, emit)

    def too_many_files(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        with suppress(OSError):  # what a model may do about it
            emit(0, Response({"x": np.ones(1 << 20, np.float32)}), True)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return [None]

    def _stream(self, requests: Sequence[Request], emit: Emit) -> list[Response | None]:
        for index, request in enumerate(requests):
            count = int(request.parameters["count"])
            data = np.zeros(int(request.parameters["size"]), np.uint8)
            for number in range(count):
                (self._folder / "sent").write_text(str(number))
                emit(index, Response({"y": data}, parameters={"number": number}), False)
            emit(index, None, True)
        return [None] * len(requests)

    def until_cancelled(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        (self._folder / "running").touch()
        while not requests[1].cancelled():
            time.sleep(0.005)
        return [Response(parameters={"cancelled": request.cancelled()}) for request in requests]

    def in_parts(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        """Answers two requests, then one; the others once there is a file, as `then` says."""
        made = [Response({name: array for name, array in request.inputs.items()}) for request in requests]
        x = np.concatenate([request.inputs["x"] for request in requests[:2]])
        emit(0, Rows({"x": x}, [len(request.inputs["x"]) for request in requests[:2]]), True)
        emit(2, [Response(error="not this one")], True)
        while not (self._folder / "go").exists():
            time.sleep(0.001)
        match requests[0].parameters.get("then"):
            case "fail":
                raise ValueError("the rest cannot")
            case "lose":
                return []
            case "stream":
                emit(4, made[4], True)
                return [made[3], None]
        return [*made[3:]]

    def ask(self, requests: Sequence[Request], emit: Emit, instance: int) -> list[Response | None]:
        answered = threading.Event()
        heard: list[Response] = []

        def on_response(mine: Response, final: bool) -> None:
            heard.append(mine)
            if final:
                answered.set()

        self._call("other", 3, Request("inner", dict(requests[0].inputs), ("y",)), on_response)
        answered.wait()
        last = heard[0]
        return [Response(last.outputs, error=last.error, kind=last.kind, parameters={"heard": len(heard)})]


def _mapped_at(address: int) -> str:
    """The file that is mapped at an address: its inode names a segment in every process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return inode
    return ""
