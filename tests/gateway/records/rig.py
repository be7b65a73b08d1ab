"""Facts to write down, a disk that can be full, and what can be read back."""

import errno
from io import StringIO
from pathlib import Path

import msgspec

from forebay.core.model import RecordsSpec
from forebay.gateway.records.audit import lines_after
from forebay.gateway.records.facts import Facts, Used
from forebay.gateway.records.ledger import usage
from forebay.gateway.records.lines import Line
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.records.saved import DAY_S, Sums
from forebay.gateway.records.writer import Sink, numbered, open_append
from forebay.obs import log
from forebay.wire.records import Attempt, Decision, decisions, payloads

DAY = 20_000
NOON = DAY * DAY_S + 43_200.0


def facts(n: int, *, ts: float = NOON, code: str = "ok", tenant: str = "acme", prompt: bytes = b"") -> Facts:
    attempts = (Attempt("chat-0", "fewest requests", "ok", 0.5),)
    record = Decision(
        ts, f"req-{n}", "chat", tenant, 200, code, 0.5, chosen="chat-0", attempts=attempts, prompt_tokens=10,
        completion_tokens=5, cached_tokens=2,
    )  # fmt: skip
    spent = Used(record.prompt_tokens, record.completion_tokens, record.cached_tokens, estimated=record.estimated)
    return Facts(record, line_of(record), spent, revision="r-1", key="key-1", client="127.0.0.1", prompt=prompt)


def line_of(record: Decision) -> bytes:
    """What the access log says of it."""
    line = Line(
        "request", record.ts, record.request_id, "/v1/chat/completions", record.model, record.status, record.code,
        round(record.total_s * 1000), replica=record.chosen, prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens, cached_tokens=record.cached_tokens,
    )  # fmt: skip
    return msgspec.json.encode(line)


class Disk:
    """A disk with so much room; one that is full takes what fits and then raises."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.files: list[Sink] = []

    def open(self, path: Path) -> "Disk.File":
        if self.room <= 0 and not path.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self.files.append(open_append(path))
        return Disk.File(self, self.files[-1])

    class File:
        def __init__(self, disk: "Disk", file: Sink) -> None:
            self._disk = disk
            self._file = file

        def write(self, data: bytes, /) -> int:
            fits = data[: self._disk.room]
            if not fits:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._disk.room -= len(fits)
            return self._file.write(fits) or 0

        def close(self) -> None:
            self._file.close()


def recorder(root: Path, disk: Disk | None = None, gateway: str = "gateway-0", **settings: int | bool) -> Recorder:
    spec = RecordsSpec(str(root), **settings)  # type: ignore[arg-type]
    return Recorder(spec, gateway, log.configure(StringIO()), (disk or Disk()).open)


def started(root: Path, disk: Disk | None = None, gateway: str = "gateway-0", **settings: int | bool) -> Recorder:
    records = recorder(root, disk, gateway, **settings)
    assert records.start()
    return records


def killed(records: Recorder, disk: Disk) -> None:
    """What the kernel closes of a process that is killed; the rest of it is just forgotten."""
    assert records._own is not None
    records._own.close()
    for file in disk.files:
        file.close()


def audit_files(root: Path) -> list[Path]:
    return [path for _, path in numbered(root / "gateway-0", "audit", ".jsonl")]


def decision_ids(root: Path, gateway: str = "gateway-0") -> list[str]:
    """Request ids of the decision files."""
    read = [payloads(path.read_bytes()) for _, path in numbered(root / gateway, "decisions", ".log")]
    assert sum(found.damaged for found in read) == 0
    return [record.request_id for one in read for payload in one.whole for record in decisions(payload)]


def audit_ids(root: Path) -> list[str]:
    """Request ids of the audit log."""
    return [line.request_id for line in lines_after(root / "gateway-0", 0, 10_000)]


def ledger_sums(root: Path) -> Sums:
    total = Sums()
    for folder in sorted(root.iterdir()):
        for sums in usage(folder, 0).values():
            total.add(sums)
    return total


def request_ids(*numbers: range) -> list[str]:
    return [f"req-{n}" for part in numbers for n in part]
