"""Access control of a gateway: API keys, model allow-lists and limits, and what was used of them.

Keys, leases and counts are files. One task checks them periodically; handling a request touches none of them.
"""

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import structlog

from forebay.core.errors import Code, Refusal
from forebay.core.model import TenancySpec
from forebay.core.tenancy import (
    Amounts,
    Counts,
    Demand,
    Denied,
    Directory,
    Granted,
    KeyRecord,
    Lease,
    Limiter,
    Reservation,
    Tenant,
    authorise,
)
from forebay.core.tenancy.quota import SLOTS
from forebay.core.tenancy.shares import UNLIMITED
from forebay.obs.clock import wall_s
from forebay.providers.processes import Identity, identify, is_alive
from forebay.registry.keys import KeyFileError, read_keys
from forebay.wire.documents import UNREADABLE

_LIMIT_LINES: Final = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: "
_REQUESTS_RESET: Final = [b"\r\nx-ratelimit-reset-requests: %ds\r\n" % second for second in range(SLOTS + 1)]
_TOKENS_RESET: Final = [b"\r\nx-ratelimit-reset-tokens: %ds\r\n" % second for second in range(SLOTS + 1)]
SAVE_S: Final = 1.0
"""How much a killed gateway may forget: the counts of this long."""
DAY_S: Final = 86_400
LEAVING: Final = ".leaving"
"""Suffix of the file in which a draining process publishes its counts, after gateway id and process id."""
KNOWN_MAX: Final = 4096
"""Valid credentials cached; the oldest entry is evicted."""
BEARER: Final = b"bearer "
USUAL: Final = b"Bearer "
"""As nearly all clients spell it."""
UNUSED: Final = Amounts(0, 0, 0, 0)
UNREAD: Final = Denied(Code.INTERNAL, "The gateway cannot read its API keys; its log says why.")

T = TypeVar("T")


class Admitted:
    """An admitted request; its reservation must be settled exactly once, however it ends."""

    __slots__ = ("_access", "key_id", "reservation", "tenant")

    def __init__(self, access: "AccessControl", tenant: Tenant, reservation: Reservation, key_id: str) -> None:
        self._access = access
        self.tenant = tenant
        self.reservation = reservation
        self.key_id = key_id

    def settle(self, tokens: int, now: float) -> None:
        """It has ended, however, and used `tokens`; 0 if no replica got it."""
        self._access.settle(self.reservation, tokens, now)

    def limit_lines(self, now: float) -> bytes:
        """What remains of its tenant's limits, as header lines."""
        return self._access.limit_lines(self.tenant, now)


class DeniedRefusal(Refusal):
    """Access was denied; retrying makes sense after `retry_after_s`, if that is not 0."""

    def __init__(self, verdict: Denied) -> None:
        super().__init__(verdict.code, verdict.text, "model" if verdict.code is Code.MODEL_NOT_ALLOWED else None)
        self.retry_after_s = verdict.retry_after_s


def _begun_limit_lines(limit: Amounts) -> tuple[bytes, bytes]:
    """The rate limit headers of requests and of tokens, up to the number that remains; empty: unlimited."""
    requests, tokens = limit.requests, limit.tokens
    return (
        _LIMIT_LINES % (b"requests", requests, b"requests") if requests < UNLIMITED else b"",
        _LIMIT_LINES % (b"tokens", tokens, b"tokens") if tokens < UNLIMITED else b"",
    )


def credential(header: Callable[[bytes], bytes | None]) -> bytes | None:
    """The credential of a request. `header` returns a header's value by its lower-case name.

    An `Authorization` of another scheme may be meant for something else, a proxy for instance: it counts only if
    there is no key.
    """
    given = header(b"authorization")
    if given and (given.startswith(USUAL) or given[: len(BEARER)].lower() == BEARER or b" " not in given):
        return given
    return header(b"x-api-key") or header(b"api-key") or given


def forbidden(tenant: Tenant, name: str) -> Denied:
    """The denial for a model name. It does not reveal whether there is such a model."""
    return Denied(Code.MODEL_NOT_ALLOWED, f"Tenant `{tenant.name}` may not use the model `{name[:128]}`.")


class _Watched(Generic[T]):
    """A file that is re-read when it changes. An unreadable file is logged once, and keeps the last content."""

    def __init__(self, path: Path, read: Callable[[Path], T], log: structlog.stdlib.BoundLogger) -> None:
        self.complaint = ""
        self._path = path
        self._read = read
        self._log = log
        self._seen: tuple[int, int, int] | None = None

    def news(self) -> T | None:
        """The content, if it has changed and is valid."""
        complaint, content = "", None
        try:
            stat = os.stat(self._path)
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen != self._seen:
                content = self._read(self._path)
                self._seen = seen
        except FileNotFoundError:
            complaint = "missing"
        except (OSError, KeyFileError, *UNREADABLE) as error:
            complaint = str(error)
        if complaint and complaint != self.complaint:
            self._log.warning("file unreadable, keeping its last content", path=str(self._path), problem=complaint)
        self.complaint = complaint
        return content


class AccessControl:
    """Keys, allow-lists and limits of one gateway process.

    `now` is the loop's time; `wall` is the wall clock, for days and for the expiry of keys.
    """

    def __init__(
        self,
        gateway: str,
        spec: TenancySpec,
        log: structlog.stdlib.BoundLogger,
        *,
        now: Callable[[], float],
        wall: Callable[[], float] = wall_s,
    ) -> None:
        self._tenants = spec.tenants
        self._log = log
        self._now = now
        self._wall = wall
        self._wall_ahead_s = 0.0
        self._limiter = Limiter(spec.tenants, spec.gateways)
        self._records: tuple[KeyRecord, ...] = ()
        self._directory: Directory | None = None
        self._known: dict[bytes, Granted] = {}
        self._limit_lines: dict[str, tuple[bytes, bytes]] = {}
        """What is the same in all of a tenant's rate limit headers, and before their numbers."""
        self._keys: _Watched[tuple[KeyRecord, ...]] = _Watched(Path(spec.keys_path), read_keys, log)
        self._leases: _Watched[Lease | None] | None = None
        if spec.gateways > 1:
            self._leases = _Watched(Path(spec.leases_path), lambda path: _read_lease(path, gateway), log)
        self._counts = Path(spec.counts_path)
        self._left = False
        self._before: dict[int, Counts] = {}
        """Earlier processes of this gateway, draining or about to, and the last known counts of each."""
        self._handing_over = False
        """The last of them still takes requests, and writes its counts to the file that is to be ours."""
        self._self = identify(os.getpid()) or Identity(os.getpid(), 0, "")
        self._saved: dict[str, Amounts] | None = {}
        self._saved_at = 0.0
        self._save_at = 0.0
        self._save_complaint = ""
        self._writing = threading.Lock()

    # --- requests

    def identify(self, presented: bytes | None, now: float) -> Granted | Denied:
        """The caller behind a credential; `presented` is what `credential` returned."""
        granted = self._known.get(presented) if presented else None
        if granted is not None and now + self._wall_ahead_s < granted.expires:
            return granted
        if self._directory is None:
            return UNREAD
        verdict = authorise(self._directory, presented, now + self._wall_ahead_s)
        if isinstance(verdict, Denied):
            return verdict
        assert presented
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[presented] = verdict
        return verdict

    def admit(
        self, caller: Granted, model: str, tokens: int, stream: bool, now: float, *, asked: str = ""
    ) -> Admitted | Denied:
        """Admit a request that may use up to `tokens`, prompt and completion, or say why not.

        `asked` is the name in the request, if it resolved to a different model.
        """
        tenant = caller.tenant
        if "*" not in tenant.models and not tenant.may_use(model):
            return forbidden(tenant, asked or model)
        verdict = self._limiter.reserve(tenant.name, tokens, stream, now)
        return verdict if isinstance(verdict, Denied) else Admitted(self, tenant, verdict, caller.key_id)

    def settle(self, reservation: Reservation, tokens: int, now: float) -> None:
        """A request has ended, however, and used `tokens`; 0 if no replica got it. Exactly once per request."""
        self._limiter.settle(reservation, tokens, now)

    def limit_lines(self, tenant: Tenant, now: float) -> bytes:
        """Rate limit headers in the form that OpenAI clients know: the limit per minute, what remains, and when it is
        full again. With several gateways the rest is that of this gateway's own share: that much is certain."""
        name = tenant.name
        begun = self._limit_lines.get(name)
        if begun is None:
            begun = self._limit_lines[name] = _begun_limit_lines(self._limiter.limit(name))
        requests, tokens = begun
        if not requests and not tokens:
            return b""
        requests_left, requests_s, tokens_left, tokens_s = self._limiter.minute(name, now)
        lines = b""
        if requests:
            lines = b"%b%d%b" % (requests, requests_left, _REQUESTS_RESET[min(requests_s, SLOTS)])
        if tokens:
            lines = b"%b%b%d%b" % (lines, tokens, tokens_left, _TOKENS_RESET[min(tokens_s, SLOTS)])
        return lines

    def demand(self) -> Demand:
        """The demand by which control divides the limits among gateways."""
        return self._limiter.demand(self._now())

    # --- files

    def start(self) -> None:
        """Restore the counts of the last process of this gateway, and read keys and leases. Call this before any
        request."""
        now, wall = self._now(), self._wall()
        self._save_at = now + SAVE_S
        self._turn(now, wall)
        try:
            counts = msgspec.json.decode(self._counts.read_bytes(), type=Counts)
        except FileNotFoundError:
            pass
        except (OSError, *UNREADABLE) as error:
            self._log.warning("tenant counts lost", path=str(self._counts), problem=str(error))
        else:
            self._limiter.restore(counts.used, counts.day, wall - counts.at, now)
            if counts.pid not in (0, os.getpid()):
                self._before[counts.pid] = counts
        for path in self._counts.parent.glob(f"{self._counts.stem}.*{LEAVING}"):
            pid = path.name.removeprefix(f"{self._counts.stem}.").removesuffix(LEAVING)
            if pid.isdecimal() and int(pid) != os.getpid():
                self._before.setdefault(int(pid), _read_counts(path) or Counts(0.0, 0, {}, int(pid)))
        self.look()

    def look(self) -> None:
        """Apply file changes. Call this several times a second."""
        now, wall = self._now(), self._wall()
        self._turn(now, wall)
        records = self._keys.news()
        if records is None and self._directory is None and self._keys.complaint == "missing":
            records = ()
        if records is not None:
            self._records, self._directory, self._known = records, Directory(self._tenants, records), {}
            self._log.info("keys loaded", keys=len(records))
        lease = self._leases.news() if self._leases else None
        if lease is not None:
            self._limiter.take(lease, now)
        if self._before:
            self._inherit(now)

    def configure(self, tenants: tuple[Tenant, ...]) -> None:
        """Apply other tenants, allow-lists and limits. Requests in flight end under the old ones."""
        if tenants == self._tenants:
            return
        self.look()  # a lease for the old limits must not be applied to the new ones
        self._tenants = tenants
        self._limiter.configure(tenants)
        self._limit_lines.clear()
        if self._directory is not None:
            self._directory, self._known = Directory(tenants, self._records), {}
        self._log.info("tenants changed", tenants=len(tenants))

    def leave(self) -> None:
        """Hand counting over to the successor; a separate file tells it what becomes of the requests here."""
        self._handing_over = False
        self.save()
        with self._writing:
            self._counts, self._left = self._leaving(os.getpid()), True
            self._saved = None
        self.save()

    def leave_for_good(self) -> None:
        """No requests are open any more: write that file for the last time. The successor removes it."""
        if self._left:
            self.save()
        with self._writing:
            self._saved_at = math.inf

    def save(self) -> None:
        """Save the counts if they have changed. With a full disk only the next start lacks these counts."""
        now = self._now()
        if (counts := self._unsaved(now)) is not None:
            self._write(counts, now)

    async def save_aside(self) -> None:
        """`save` once a second, on another thread: a slow disk must not delay requests."""
        now = self._now()
        if now >= self._save_at and (counts := self._unsaved(now)) is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._write, counts, now)

    def _unsaved(self, now: float) -> Counts | None:
        self._save_at = now + SAVE_S
        used = self._limiter.used(now)
        if self._handing_over or used == self._saved:
            return None
        return Counts(self._wall(), self._limiter.day, used, self._self.pid, self._self.ticks, self._self.boot)

    def _write(self, counts: Counts, now: float) -> None:
        """Replace the file, unless newer counts were written."""
        complaint = ""
        with self._writing:  # the final save may run while another thread writes, or is about to
            if now < self._saved_at:
                return
            draft = self._counts.with_suffix(".new")
            try:
                draft.parent.mkdir(parents=True, exist_ok=True)
                draft.write_bytes(msgspec.json.encode(counts))
                draft.replace(self._counts)
                self._saved, self._saved_at = counts.used, now
            except OSError as error:
                complaint = str(error)
        if complaint and complaint != self._save_complaint:
            self._log.warning("tenant counts cannot be written", path=str(self._counts), problem=complaint)
        self._save_complaint = complaint

    def _leaving(self, pid: int) -> Path:
        return self._counts.with_name(f"{self._counts.stem}.{pid}{LEAVING}")

    def _inherit(self, now: float) -> None:
        """Take over from earlier processes: the streams that they have open, and what their requests have used since
        they were restored here, more or less than was reserved for them."""
        open_streams: dict[str, int] = {}
        handing_over = False
        for pid, last in list(self._before.items()):
            path, ended = self._leaving(pid), not _runs(last)
            counts = _read_counts(path)
            if counts is None or counts.at < last.at:  # no file yet, or one of an earlier process with that id
                counts = _read_counts(self._counts)
                if counts is None or counts.pid != pid or counts.at < last.at:
                    counts = last
                else:
                    handing_over = not ended
            if counts.at > last.at:
                self._limiter.amend(_since(counts, last, day=self._limiter.day), now)
            self._before[pid] = counts
            if ended:
                del self._before[pid]
                _remove(path)
                continue
            for name, used in counts.used.items():
                open_streams[name] = open_streams.get(name, 0) + used.streams
        self._handing_over = handing_over
        self._limiter.inherit(open_streams, now)

    def _turn(self, now: float, wall: float) -> None:
        """Update the offset between the clocks, as wall time may be set, and begin a new day if it is time."""
        self._wall_ahead_s = wall - now
        day, gone_s = divmod(wall, DAY_S)
        self._limiter.begin_day(int(day), now + DAY_S - gone_s)


def _read_counts(path: Path) -> Counts | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Counts)
    except (OSError, *UNREADABLE):
        return None


def _since(counts: Counts, last: Counts, day: int) -> dict[str, Amounts]:
    """How much more was used; of the day's tokens only if both are of that day."""
    today = counts.day == last.day == day
    more = {}
    for name in {*counts.used, *last.used}:
        now, before = counts.used.get(name, UNUSED), last.used.get(name, UNUSED)
        tokens = now.day_tokens - before.day_tokens if today else 0
        more[name] = Amounts(now.requests - before.requests, now.tokens - before.tokens, 0, tokens)
    return more


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _runs(counts: Counts) -> bool:
    """Whether the process that these counts are of is there; without more than its id, whether any with it is."""
    if counts.boot:
        return is_alive(Identity(counts.pid, counts.ticks, counts.boot))
    try:
        os.kill(counts.pid, 0)
    except (OSError, OverflowError):
        return False
    return True


def _read_lease(path: Path, gateway: str) -> Lease | None:
    """The gateway's own lease, if there is one. Those of the others are skipped: with thousands of tenants, reading
    each takes milliseconds in which no request is served."""
    own = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw]).get(gateway)
    return msgspec.json.decode(own, type=Lease) if own is not None else None
