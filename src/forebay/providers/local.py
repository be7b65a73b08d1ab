"""Runs units as processes of this machine, each in its own session, with a folder that outlives its starter.

`units/SLOT.gN/`: `unit.json` and `spec.json` (the intent; written before the process starts), `record.json` (the
process), `endpoint.json` (written by the unit), `log`. The log of the last removed unit of a slot is kept as
`logs/SLOT.log`.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from forebay.core.model import Endpoint, WorkerSpec
from forebay.core.reconcile import Kind, ObservedUnit, Slot, UnitKey
from forebay.providers.fencing import Fence, claim_as_void, claim_command
from forebay.providers.launching import device_env, found_launcher, on_cores
from forebay.providers.processes import Identity, identify, is_alive, kill, reap, session_leaders
from forebay.providers.protocol import ProviderError
from forebay.wire.documents import UNREADABLE

LOG_BYTES_MAX = 32 * 1024 * 1024
LOG_BYTES_KEPT = 4 * 1024 * 1024
LAST_WORDS_BYTES_READ = 64 * 1024
LAST_WORDS_CHARS_MAX = 4096
LAST_WORDS_LINES_MAX = 15
HARMLESS = frozenset({"debug", "info", "warning"})
"""Levels of log lines that do not explain the end of a process: before a kill they just happen to be last."""
ACCESS = frozenset({"request", "access lines dropped"})
"""Events of a gateway's access log, which has no levels: they concern requests, not the process."""
ENV_NAMES = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
ENV_PREFIXES = (
    "LC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "OV_", "OPENVINO_",
    "ONEDNN_", "ORT_",
)  # fmt: skip

T = TypeVar("T")


class Intent(msgspec.Struct, frozen=True):
    """`unit.json`: the purpose of the folder."""

    slot: str
    generation: int
    kind: Kind
    digest: str
    drain_grace_s: float
    node: str = ""
    devices: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    device_bytes: int = 0
    launcher: tuple[str, ...] = ()


class _LogLine(msgspec.Struct):
    """A line of a log as `obs.log` writes it, or of an access log."""

    level: str = ""
    event: str = ""


@dataclass
class _Unit:
    """In-memory state of a unit's folder; all but `ended` can be read again from disk."""

    intent: Intent
    folder: Path
    process: Identity | None
    child: bool = False
    endpoint: Endpoint | None = None
    asked: bool = False
    ended: str | None = None
    pidfd: int | None = None
    blame: str = ""
    """Why the provider itself killed it; empty: it did not."""

    @property
    def log(self) -> Path:
        return self.folder / "log"


def clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that units inherit: what they need to run, without settings of Forebay or secrets."""
    return {k: v for k, v in environ.items() if k in ENV_NAMES or k.startswith(ENV_PREFIXES)}


class LocalProvider:
    """Runs `commands[kind] + [spec.json]` for every unit; `of_engines` overrides the command of replicas by engine.

    `folder` must be absolute and is created if missing. With a `fence`, it may be shared with controllers of other
    epochs.
    """

    def __init__(
        self,
        folder: Path,
        commands: Mapping[Kind, Sequence[str]],
        env: Mapping[str, str],
        of_engines: Mapping[str, Sequence[str]] | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._folder = folder / "units"
        self._logs = folder / "logs"
        self._commands = commands
        self._of_engines = of_engines or {}
        self._env = dict(env)
        self._fence = fence
        self._units: dict[UnitKey, _Unit] = {}
        self._change = asyncio.Event()
        self._swept = False

    async def place(self, slot: Slot, generation: int) -> None:
        intent = _intent(slot, generation)
        folder = self._folder / f"{slot.id}.g{generation}"
        self._check_fence()
        try:
            self._prepare(folder, intent, slot)
            unit = _Unit(intent, folder, None)
            self._units[slot.id, generation] = unit
            self._check_fence()
            self._start(unit, slot)
        except OSError as error:
            raise ProviderError(f"{error.strerror}: {error.filename or folder}") from error

    async def observe(self) -> tuple[ObservedUnit, ...]:
        self._check_fence()  # units found without a folder are killed
        try:
            if not self._swept:
                self._sweep()
                self._swept = True
            self._read_folders()
            return tuple(self._see(unit) for _, unit in sorted(self._units.items()))
        except OSError as error:
            raise ProviderError(str(error)) from error

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        unit = self._units.get((slot, generation))
        if unit is None:
            return
        self._check_fence()
        if unit.process and unit.ended is None:
            if grace_s <= 0:
                kill(unit.process, signal.SIGKILL, group=True)
            elif not unit.asked:
                unit.asked = True
                kill(unit.process, signal.SIGTERM)
        elif grace_s <= 0:
            try:
                self._forget(unit)
            except OSError as error:
                raise ProviderError(str(error)) from error

    async def changed(self) -> None:
        await self._change.wait()
        self._change.clear()

    def close(self) -> None:
        for unit in self._units.values():
            self._unwatch(unit)

    def _check_fence(self) -> None:
        if self._fence is not None:
            self._fence.check()

    def _prepare(self, folder: Path, intent: Intent, slot: Slot) -> None:
        """The folder appears complete or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            raise FileExistsError(17, "exists already", str(folder))
        draft = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
        try:
            spec = replace(slot.spec, generation=intent.generation, endpoint_path=str(folder / "endpoint.json"))
            (draft / "spec.json").write_bytes(msgspec.json.encode(spec))
            (draft / "unit.json").write_bytes(msgspec.json.encode(intent))
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _start(self, unit: _Unit, slot: Slot) -> None:
        engine = slot.spec.engine if isinstance(slot.spec, WorkerSpec) else ""
        program = self._of_engines.get(engine) or self._commands[slot.kind]
        launcher = found_launcher(slot.launcher, self._env.get("PATH"))
        command = [*launcher, *program, str(unit.folder / "spec.json")]
        if self._fence is not None:
            command = claim_command(unit.folder, command)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with on_cores(unit.intent.cpus):
            pid = os.posix_spawn(
                command[0],
                command,
                {**self._env, **device_env(unit.intent.devices)},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(unit.log), flags, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,  # a Ctrl-C in the terminal goes to `up`, which then stops units in the right order
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
            )
        unit.process, unit.child = identify(pid), True
        self._record(unit)
        self._watch(unit)

    def _record(self, unit: _Unit) -> None:
        """Record its process, if the disk is not full: it can be found without, as long as it runs."""
        draft = unit.folder / "record.tmp"
        with contextlib.suppress(OSError):
            draft.write_bytes(msgspec.json.encode(unit.process))
            draft.rename(unit.folder / "record.json")

    def _sweep(self) -> None:
        """Once, at the beginning: kill processes whose folder is gone, and remove incomplete folders."""
        for pid, spec in session_leaders(self._folder):
            lost = identify(pid)
            if lost and not (spec.parent / "unit.json").exists():
                kill(lost, signal.SIGKILL, group=True)
        for draft in self._folder.glob(".*"):
            shutil.rmtree(draft, ignore_errors=True)

    def _read_folders(self) -> None:
        """Adopt folders that are new to this process, forget those that are gone."""
        known = {unit.folder.name for unit in self._units.values()}
        there = set(os.listdir(self._folder)) if self._folder.exists() else set()
        for name in sorted(there - known):
            folder = self._folder / name
            intent = _read(folder / "unit.json", Intent)
            if intent is None:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            unit = _Unit(intent, folder, _read(folder / "record.json", Identity))
            if unit.process is None:
                self._find(unit)
            self._watch(unit)
            self._units[intent.slot, intent.generation] = unit
        for key, unit in list(self._units.items()):
            if unit.folder.name not in there:
                self._unwatch(unit)
                if unit.process:
                    kill(unit.process, signal.SIGKILL, group=True)  # no controller could find it any more
                del self._units[key]

    def _find(self, unit: _Unit) -> None:
        """The creator of this folder died before recording the process, or was deposed before starting one."""
        self._look_for(unit)
        if self._fence is not None and unit.process is None and not claim_as_void(unit.folder):
            self._look_for(unit)

    def _look_for(self, unit: _Unit) -> None:
        for pid, spec in session_leaders(self._folder):
            if spec.parent == unit.folder:
                unit.process = identify(pid)
                self._record(unit)

    def _see(self, unit: _Unit) -> ObservedUnit:
        if unit.ended is None:
            unit.ended = _ended(unit)
            if unit.ended is not None and unit.blame:
                unit.ended = f"{unit.ended}: {unit.blame}"
            if unit.ended is None:
                _bound_log(unit.log)
                unit.endpoint = unit.endpoint or self._endpoint(unit)
            else:
                self._unwatch(unit)
        intent, alive = unit.intent, unit.ended is None
        return ObservedUnit(
            slot=intent.slot,
            generation=intent.generation,
            kind=intent.kind,
            digest=intent.digest,
            drain_grace_s=intent.drain_grace_s,
            alive=alive,
            pid=unit.process.pid if unit.process else 0,
            endpoint=unit.endpoint if alive else None,
            ended=unit.ended or "",
            last_words="" if alive else _last_words(unit.log),
            node=intent.node,
            devices=intent.devices,
            cpus=intent.cpus,
            memory_bytes=intent.memory_bytes,
            device_bytes=intent.device_bytes,
        )

    def _endpoint(self, unit: _Unit) -> Endpoint | None:
        found = _read(unit.folder / "endpoint.json", Endpoint)
        if found is None or unit.process is None or found.pid == unit.process.pid:
            return found if unit.process else None
        if unit.intent.launcher and not unit.blame:
            unit.blame = (
                f"`{unit.intent.launcher[0]}` stayed before it as a process of its own: a launcher has to exec"
            )
            kill(unit.process, signal.SIGKILL, group=True)
        return None

    def _forget(self, unit: _Unit) -> None:
        self._unwatch(unit)
        if unit.log.exists():
            self._logs.mkdir(exist_ok=True)
            unit.log.replace(self._logs / f"{unit.intent.slot}.log")
        shutil.rmtree(unit.folder)
        del self._units[unit.intent.slot, unit.intent.generation]

    def _watch(self, unit: _Unit) -> None:
        if unit.process is None or not is_alive(unit.process):
            self._change.set()
            return
        try:
            unit.pidfd = os.pidfd_open(unit.process.pid)
        except OSError:  # it ended just now, or this kernel lacks pidfd: then `observe` finds out
            self._change.set()
            return
        asyncio.get_running_loop().add_reader(unit.pidfd, self._woken(unit))

    def _woken(self, unit: _Unit) -> Callable[[], None]:
        def woken() -> None:
            self._unwatch(unit)
            self._change.set()

        return woken

    def _unwatch(self, unit: _Unit) -> None:
        if unit.pidfd is not None:
            asyncio.get_running_loop().remove_reader(unit.pidfd)
            os.close(unit.pidfd)
            unit.pidfd = None


def _intent(slot: Slot, generation: int) -> Intent:
    spec = slot.spec if isinstance(slot.spec, WorkerSpec) else None
    return Intent(
        slot.id,
        generation,
        slot.kind,
        slot.digest,
        slot.drain_grace_s,
        node=spec.node if spec else "",
        devices=spec.devices if spec else (),
        cpus=spec.cpus if spec else (),
        memory_bytes=slot.memory_bytes,
        device_bytes=slot.device_bytes,
        launcher=slot.launcher,
    )


def _ended(unit: _Unit) -> str | None:
    """How the unit ended; None while it runs."""
    if unit.process is None:
        return "was never started: the controller died"
    if unit.child:
        return reap(unit.process.pid)
    return None if is_alive(unit.process) else "ended; exit status unknown, as it was not a child of this process"


def _read(path: Path, type: type[T]) -> T | None:
    """A small JSON document; None if it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except (FileNotFoundError, *UNREADABLE):
        return None


def _bound_log(log: Path) -> None:
    """Keep the tail of a log that has grown too large. The unit appends, so it continues at the new end.

    The tail is written last, where the log was: on a full disk there is no room for it before, and perhaps not then.
    """
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return
    if size <= LOG_BYTES_MAX:
        return
    with log.open("r+b") as file:
        file.seek(size - LOG_BYTES_KEPT)
        tail = file.read(LOG_BYTES_KEPT)
        file.truncate(0)
    with contextlib.suppress(OSError):
        log.with_name("log.old").write_bytes(tail)


def _last_words(log: Path) -> str:
    """The errors at the end of a log, and other output there, such as a traceback."""
    try:
        with log.open("rb") as file:
            begin = max(log.stat().st_size - LAST_WORDS_BYTES_READ, 0)
            file.seek(begin)
            lines = file.read(LAST_WORDS_BYTES_READ).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    words = [line for line in (lines[1:] if begin else lines) if not _is_harmless(line)]
    return "\n".join(words[-LAST_WORDS_LINES_MAX:])[-LAST_WORDS_CHARS_MAX:]


def _is_harmless(line: str) -> bool:
    try:
        told = msgspec.json.decode(line, type=_LogLine)
    except UNREADABLE:
        return False
    return told.level in HARMLESS or (not told.level and told.event in ACCESS)
