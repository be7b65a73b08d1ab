"""Sequence batching: requests of one sequence go to one instance, in order, one after the other.

The rules are those of Triton's `sequence_batch_scheduler.cc`. A sequence holds a slot of an instance from its START
to its END; while none is free, it waits in the backlog. *Direct*: the slot is the position in the batch, and an
instance runs what its slots hold, one request of each. *Oldest*: the next request of each slot goes to a dynamic
batcher.

Differences from Triton: a sequence is idle only while none of its requests is queued or running; a direct run is
built around the request that has waited longest, so that one with an odd shape does not starve; and cancelling a
request drops only the later ones of its own sequence.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

from forebay.core.serving.batcher import Batch, Batcher, Idle, WaitUntil
from forebay.core.serving.config import Control, Datatype, DynamicBatching, SequenceBatching
from forebay.core.serving.errors import Kind, Refused

T = TypeVar("T", bound=Hashable)

ID_LENGTH_MAX: Final = 128
"""Longest string correlation id, characters; Triton's limit."""

BACKLOG_EXPIRED: Final = "timeout of the corresponding sequence has been expired"
"""Error text for requests returned by `Sequencer.expire` (UNAVAILABLE)."""

EXPIRIES_PRUNED_MIN: Final = 64

_INTEGERS: Final = {Datatype.UINT64, Datatype.INT64, Datatype.UINT32, Datatype.INT32}


class Life:
    """One sequence from a START to its end. State with the same lifetime (implicit state) is kept in `state`."""

    __slots__ = ("corrid", "state")

    def __init__(self, corrid: int | str) -> None:
        self.corrid = corrid
        self.state: object = None


class Row(NamedTuple, Generic[T]):
    """A row of a run. `item` None (then `life` too): fill it with zeros shaped like the first row that has one."""

    slot: int
    item: T | None = None
    life: Life | None = None
    start: bool = False
    end: bool = False


class Run(NamedTuple, Generic[T]):
    """What an instance runs next. Direct: row i is slot i, up to the last slot with a request."""

    instance: int
    rows: tuple[Row[T], ...]


def control_values(controls: Iterable[Control], row: Row[T]) -> Iterator[tuple[Control, float | int | str]]:
    """The value of each control input in that row (CORRID of an empty row: 0 or "")."""
    flags = {"START": row.start, "END": row.end, "READY": row.item is not None}
    for control in controls:
        if control.kind != "CORRID":
            yield control, control.false_true[flags[control.kind]]
        elif row.life is not None:
            yield control, row.life.corrid
        else:
            yield control, "" if control.datatype is Datatype.BYTES else 0


def id_flaw(model: str, batching: SequenceBatching, corrid: int | str) -> str:
    """What is wrong with a correlation id, in Triton's words (empty: nothing); for request validation."""
    text = isinstance(corrid, str)
    if not corrid:
        return ""  # no id at all: `offer` says so, or chooses one
    if isinstance(corrid, str) and len(corrid) > ID_LENGTH_MAX:
        return f"string correlation ID cannot be longer than {ID_LENGTH_MAX} characters"
    for control in batching.controls:
        if control.kind == "CORRID" and (
            control.datatype is not Datatype.BYTES if text else control.datatype not in _INTEGERS
        ):
            return (
                f"sequence batching control '{control.tensor}' data-type is '{'BYTES' if text else 'UINT64'}',"
                f" but model '{model}' expects '{control.datatype}'"
            )
    return ""


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    """A request that is queued in its sequence or in the dynamic batcher of its instance."""

    item: T
    track: "_Track[T]"
    life: Life
    start: bool
    end: bool
    shape: Hashable
    since: float


class _Track(Generic[T]):
    """The holder of a slot, or a candidate for one: a sequence, and those started under its id before it ended."""

    __slots__ = ("closed", "current", "expires", "key", "lane", "life", "slot", "waiting")

    def __init__(self, key: int | str | None) -> None:
        self.key = key
        """The correlation id of further requests; None: not known to clients."""
        self.lane: _Lane[T] | None = None
        self.slot = 0
        self.life = Life(0)
        self.waiting: deque[_Entry[T]] = deque()
        self.current: _Entry[T] | None = None
        """The request in the dynamic batcher or in a run."""
        self.closed = False
        """No more requests come: the slot becomes free as soon as the queued ones have run."""
        self.expires = math.inf


class _Lane(Generic[T]):
    """An instance. `batcher` None: direct."""

    __slots__ = ("away", "batcher", "instance", "retiring", "run", "slots")

    def __init__(self, instance: int, slots: int, batcher: Batcher[T] | None) -> None:
        self.instance = instance
        self.slots: list[_Track[T] | None] = [None] * slots
        self.batcher = batcher
        self.run: Run[T] | None = None
        """Direct: what it runs now."""
        self.retiring = False
        self.away = False
        """Its process has ended and was not replaced yet."""


class Sequencer(Generic[T]):
    """The sequences of one model version over all its instances. It does not bound `waiting`: the caller must.

    Usage: `offer` → `poll(instance)` for free instances whenever something was offered, done or due → run →
    `done(run)`, however it went. Call `expire` at `due()`. Items are compared by their hashes and must be distinct.
    """

    def __init__(self, model: str, batching: SequenceBatching, max_batch: int, instances: Iterable[int]) -> None:
        self._model = model
        self._batching = batching
        self._max_batch = max_batch
        self._slots = batching.candidates_max if batching.oldest and batching.candidates_max else max(1, max_batch)
        self._closed = False
        self._number = 0
        self._lanes: dict[int, _Lane[T]] = {}
        self._free: list[tuple[int, int]] = []
        """(slot, instance): the lowest slot first, so that batches are dense."""
        self._tracks: dict[int | str, _Track[T]] = {}
        self._entries: dict[T, _Entry[T]] = {}
        self._backlog: OrderedDict[_Track[T], None] = OrderedDict()
        self._expiries: list[tuple[float, int, _Track[T]]] = []
        self._quiet: OrderedDict[_Track[T], float] = OrderedDict()
        """Those with a slot and nothing to run, with the time since when."""
        for instance in sorted(instances):
            self.add(instance, 0.0)

    @property
    def sequences(self) -> int:
        """Sequences that have a slot or wait for one."""
        held = sum(track is not None for lane in self._lanes.values() for track in lane.slots)
        return held + len(self._backlog)

    @property
    def waiting(self) -> int:
        """Queued requests."""
        return len(self._entries)

    def offer(
        self, item: T, corrid: int | str, *, start: bool, end: bool, rows: int, shape: Hashable, now: float,
        timeout_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Queue a request. Its START cuts short a running sequence with the same id.

        `rows` is the request's batch size; `shape` must be equal within a batch. `timeout_s` bounds the wait of its
        sequence for a slot (0: unlimited). Raises Refused with Triton's texts.
        """
        assert item not in self._entries, "it is already queued"
        key: int | str | None = corrid
        if self._batching.iterative and not corrid:
            self._number += 1
            key, corrid, start, end = None, self._number, True, False
        self._check(key, start, rows)
        track = self._tracks.get(key) if key is not None else None
        if track is None:
            track = _Track(key)
            if key is not None:
                self._tracks[key] = track
            self._place(track)
        if start:
            track.life = Life(corrid)
        entry = _Entry(item, track, track.life, start, end, shape, now)
        track.waiting.append(entry)
        self._entries[item] = entry
        self._quiet.pop(track, None)
        if end:
            self._shut(track)
        if track.lane is not None:
            self._feed(track, now)
        elif timeout_s and now + timeout_s < track.expires:
            track.expires = now + timeout_s
            self._number += 1
            if len(self._expiries) >= EXPIRIES_PRUNED_MIN + 2 * len(self._backlog):  # of sequences that have ended
                kept = [each for each in self._expiries if each[2] in self._backlog and each[0] == each[2].expires]
                heapify(kept)
                self._expiries = kept
            heappush(self._expiries, (track.expires, self._number, track))

    def poll(self, instance: int, now: float) -> Run[T] | WaitUntil | Idle:
        """What a free instance runs next. A poll also marks an instance as back after `lost`."""
        lane = self._lanes.get(instance)
        if lane is None or lane.run is not None:
            return Idle()
        if lane.away:
            lane.away = False
            self._open(lane, now)
        if lane.batcher is None:
            return self._direct(lane, now)
        batch = lane.batcher.poll(now)
        if not isinstance(batch, Batch):
            return batch
        return Run(instance, tuple(self._row(self._entries.pop(item)) for item in batch.items))

    def done(self, run: Run[T], now: float, again: Collection[T] = ()) -> list[T]:
        """The run has ended, successfully or not: its sequences continue.

        `again`: items of an iterative model that want another turn; other sequences of such a model end. Returns
        those of `again` whose sequences have ended meanwhile, so that they cannot have one.
        """
        self._after(run, now, again)
        items = (row.item for row in run.rows if row.item is not None)
        return [item for item in items if item in again and item not in self._entries] if again else []

    def cancel(self, item: T, now: float) -> list[T]:
        """Cancel a queued request: it and the later ones of its sequence are removed, and the sequence ends.

        Returns the removed items; empty: it is not (or no longer) queued.
        """
        entry = self._entries.get(item)
        if entry is None:
            return []
        track, life = entry.track, entry.life
        before: list[_Entry[T]] = []
        behind = list(track.waiting)
        if track.current is entry:
            self._unbatch(track)
        else:
            at = behind.index(entry)
            before, behind = behind[:at], behind[at + 1 :]
        gone = [entry, *(each for each in behind if each.life is life)]
        track.waiting = deque([*before, *(each for each in behind if each.life is not life)])
        if track.life is life:
            self._shut(track)
        for each in gone:
            del self._entries[each.item]
        self._go_on(track, now)
        return [each.item for each in gone]

    def expire(self, now: float) -> list[T]:
        """End idle sequences, and remove the requests of sequences that waited too long for a slot.

        Answer these with `BACKLOG_EXPIRED`, UNAVAILABLE; then poll, as freed slots may have been reassigned.
        """
        gone: list[T] = []
        heirs = self._heirs() if self._expiries and self._expiries[0][0] <= now else ()
        while self._expiries and self._expiries[0][0] <= now:
            track = heappop(self._expiries)[2]
            if track in self._backlog and track not in heirs:
                gone += self._forget(track)
                self._go_on(track, now)
        while self._quiet:
            track, since = next(iter(self._quiet.items()))
            if since + self._batching.idle_max_s > now:
                break
            del self._quiet[track]
            self._shut(track)
            self._go_on(track, now)
        return gone

    def due(self) -> float | None:
        """When `expire` has something to do, at the earliest; None: never."""
        at = self._expiries[0][0] if self._expiries else math.inf
        if self._quiet:
            at = min(at, next(iter(self._quiet.values())) + self._batching.idle_max_s)
        return None if at == math.inf else at

    def lost(self, instance: int, now: float) -> list[T]:
        """The instance's process has ended, and with it the model's state of its sequences: they end.

        Returns their queued requests; the caller handles those of current runs. Its slots are not assigned until it
        is polled again: do that when it is back.
        """
        lane = self._lanes.get(instance)
        if lane is None:
            return []
        lane.run, lane.away = None, True
        self._withhold(instance)
        gone: list[T] = []
        for track in [each for each in lane.slots if each is not None]:
            if track.current is not None and track.current.item in self._entries:
                track.waiting.appendleft(track.current)
                self._unbatch(track)
            track.current = None
            gone += self._forget(track)
            self._go_on(track, now)
        return gone

    def add(self, instance: int, now: float) -> None:
        """Add an instance, or keep one that retires; sequences of the backlog take its free slots."""
        lane = self._lanes.get(instance)
        assert lane is None or lane.retiring, f"instance {instance} was already added"
        if lane is None:
            dynamic = DynamicBatching(self._batching.preferred_sizes, self._batching.delay_s)
            batcher: Batcher[T] | None = Batcher(dynamic, self._max_batch) if self._batching.oldest else None
            lane = self._lanes[instance] = _Lane(instance, self._slots, batcher)
        lane.retiring = False
        self._open(lane, now)

    def retire(self, instance: int) -> None:
        """Assign no new sequences to the instance; it is removed (`retired`) when its sequences have ended."""
        self._lanes[instance].retiring = True
        self._withhold(instance)
        self._leave(self._lanes[instance])

    def retired(self, instance: int) -> bool:
        """Whether the instance has been removed."""
        return instance not in self._lanes

    def end(self) -> list[T]:
        """Remove and return all queued requests, in the order of arrival; new sequences are rejected, as in Triton.

        `done` is not needed for current runs, but allowed.
        """
        self._closed = True
        gone = list(self._entries)
        for kept in (self._entries, self._tracks, self._backlog, self._quiet, self._lanes):
            kept.clear()
        self._free.clear()
        self._expiries.clear()
        return gone

    def _after(self, run: Run[T], now: float, again: Collection[T]) -> None:
        lane = self._lanes.get(run.instance)
        if lane is None:
            return
        if lane.run is run:
            lane.run = None
        for row in run.rows:
            track = lane.slots[row.slot]
            entry = track.current if track is not None else None
            if track is None or entry is None or entry.item is not row.item:
                continue  # an empty row, or the sequence ended with a lost process
            track.current = None
            if entry.item in again:
                entry.start, entry.end, entry.since = False, False, now
                track.waiting.appendleft(entry)
                self._entries[entry.item] = entry
            elif self._batching.iterative:
                self._shut(track)
            self._go_on(track, now)

    def _check(self, key: int | str | None, start: bool, rows: int) -> None:
        if rows > 1:
            raise Refused(
                Kind.INVALID_ARGUMENT,
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of"
                " sequence batcher",
            )
        if key is not None and not key:
            raise Refused(
                Kind.INVALID_ARGUMENT,
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID",
            )
        if self._closed and start:
            raise Refused(
                Kind.UNAVAILABLE,
                "Server is stopping, scheduler for model has stopped accepting new inference requests",
            )
        if not start and key not in self._tracks:
            raise Refused(
                Kind.INVALID_ARGUMENT,
                f"inference request for sequence {key} to model '{self._model}' must specify the START flag on the"
                " first request of the sequence",
            )

    def _withhold(self, instance: int) -> None:
        """Stop assigning its free slots."""
        self._free = [place for place in self._free if place[1] != instance]
        heapify(self._free)

    def _open(self, lane: _Lane[T], now: float) -> None:
        for slot, track in enumerate(lane.slots):
            if track is None:
                self._fill(lane, slot, now)

    def _heirs(self) -> "set[_Track[T]]":
        """Sequences of the backlog that get the slots of those whose last request runs: they only wait their turn."""
        lanes = [] if self._batching.iterative else [lane for lane in self._lanes.values() if not lane.retiring]
        held = [track for lane in lanes for track in lane.slots if track is not None]
        freed = sum(track.closed and not track.waiting for track in held)
        return {track for track, _ in zip(self._backlog, range(freed), strict=False)}

    def _place(self, track: _Track[T]) -> None:
        if self._free:
            slot, instance = heappop(self._free)
            self._give(track, self._lanes[instance], slot)
        else:
            self._backlog[track] = None

    def _give(self, track: _Track[T], lane: _Lane[T], slot: int) -> None:
        track.lane, track.slot, lane.slots[slot] = lane, slot, track

    def _fill(self, lane: _Lane[T], slot: int, now: float) -> None:
        """A slot is free: it goes to the sequence that has waited longest."""
        lane.slots[slot] = None
        if lane.retiring:
            self._leave(lane)
        elif self._backlog and not lane.away:
            track = self._backlog.popitem(last=False)[0]
            self._give(track, lane, slot)
            self._feed(track, now)
        elif not lane.away:
            heappush(self._free, (slot, lane.instance))

    def _leave(self, lane: _Lane[T]) -> None:
        if not any(lane.slots):
            del self._lanes[lane.instance]

    def _feed(self, track: _Track[T], now: float) -> None:
        """Oldest: the next request goes to the dynamic batcher when the previous one has run."""
        batcher = track.lane.batcher if track.lane is not None else None
        if batcher is not None and track.current is None and track.waiting:
            entry = track.current = track.waiting.popleft()
            batcher.offer(entry.item, rows=1, shape=entry.shape, level=0, timeout_s=0.0, now=now)

    def _unbatch(self, track: _Track[T]) -> None:
        assert track.lane is not None
        assert track.lane.batcher is not None
        assert track.current is not None
        track.lane.batcher.cancel(track.current.item)
        track.current = None

    def _direct(self, lane: _Lane[T], now: float) -> Run[T] | WaitUntil | Idle:
        fronts = [track.waiting[0] for track in lane.slots if track is not None and track.waiting]
        if not fronts:
            return Idle()
        oldest = min(fronts, key=lambda entry: entry.since)
        share, delay_s = self._batching.minimum_slot_utilization, self._batching.delay_s
        if len(fronts) < share * max(1, self._max_batch) and now < oldest.since + delay_s:
            return WaitUntil(oldest.since + delay_s)
        chosen = {entry.track.slot: entry for entry in fronts if entry.shape == oldest.shape}
        rows = tuple(self._taken(chosen[slot]) if slot in chosen else Row(slot) for slot in range(max(chosen) + 1))
        lane.run = Run(lane.instance, rows)
        return lane.run

    def _taken(self, entry: _Entry[T]) -> Row[T]:
        entry.track.current = entry.track.waiting.popleft()
        del self._entries[entry.item]
        return self._row(entry)

    def _row(self, entry: _Entry[T]) -> Row[T]:
        return Row(entry.track.slot, entry.item, entry.life, entry.start, entry.end)

    def _go_on(self, track: _Track[T], now: float) -> None:
        """After a request has run or was removed: continue with the next one, become idle, or end."""
        if track.current is not None:
            return
        if track.waiting:
            self._feed(track, now)
        elif not track.closed:
            self._quiet[track] = now
        elif track.lane is None:
            self._backlog.pop(track)
        else:
            self._fill(track.lane, track.slot, now)

    def _shut(self, track: _Track[T]) -> None:
        track.closed = True
        if track.key is not None and self._tracks.get(track.key) is track:
            del self._tracks[track.key]

    def _forget(self, track: _Track[T]) -> list[T]:
        """Remove all its queued requests and close it."""
        gone = [entry.item for entry in track.waiting]
        for item in gone:
            del self._entries[item]
        track.waiting.clear()
        self._quiet.pop(track, None)
        self._shut(track)
        return gone
