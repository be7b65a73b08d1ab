"""A naive replica: every step is simulated, and everything is recalculated."""

import math
from dataclasses import dataclass, field

from forebay.sim.engine import EngineEvent, Hardware, Job, Kind


@dataclass(eq=False)
class Row:
    """A job under way."""

    job: Job
    blocks: tuple[int, ...]
    made: int = 0
    read: int = 0
    target: int = 0
    cached: int = -1
    held: list[int] = field(default_factory=list)
    in_step: bool = False

    @property
    def decodes(self) -> bool:
        return self.read == self.target > 0 and not self.in_step

    @property
    def kv_tokens(self) -> int:
        """Before the next step: all but the newest token; all of a prompt from the start."""
        return self.job.prompt_tokens + self.made - 1 if self.decodes else self.target


class PlainReplica:
    """What vLLM's scheduler would do, in lists."""

    def __init__(
        self, hardware: Hardware, *, block_tokens: int, sequences_max: int, step_tokens_max: int, kv_tokens: int
    ) -> None:
        self.step_time = hardware.step
        self.size = block_tokens
        self.sequences_max = sequences_max
        self.step_tokens_max = step_tokens_max
        self.kv_tokens = kv_tokens
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.idle: list[int] = []
        self.growing: list[Row] = []
        self.ready: list[Row] = []
        self.ends = math.inf
        self.factor = 1.0
        self.hung_at = math.inf
        self.stepping = False
        self.preemptions = 0
        self.out: list[EngineEvent] = []

    def pinned(self) -> set[int]:
        return {block for row in self.running for block in row.held}

    def used(self) -> int:
        """With what the step under way adds."""
        own = sum(row.kv_tokens - len(row.held) * self.size for row in self.running)
        return own + len(self.pinned()) * self.size + len(self.growing)

    def run_to(self, now: float) -> None:
        while self.stepping and self.ends <= min(now, self.hung_at):
            self.finish()
            self.begin(self.ends)

    def offer(self, job: Job, now: float) -> None:
        self.run_to(now)
        self.waiting.append(Row(job, job.blocks[: job.prompt_tokens // self.size]))
        if not self.stepping and self.hung_at == math.inf:
            self.begin(now)

    def cancel(self, id: int, now: float) -> bool:
        self.run_to(now)
        for rows in (self.waiting, self.running):
            for row in rows:
                if row.job.id == id:
                    rows.remove(row)
                    self.free(row)
                    self.growing = [other for other in self.growing if other is not row]
                    self.ready = [other for other in self.ready if other is not row]
                    return True
        return False

    def hang(self, now: float) -> None:
        self.run_to(now)
        self.hung_at = min(now, self.hung_at)

    def resume(self, now: float) -> None:
        if self.hung_at < math.inf:
            self.ends += now - self.hung_at
            self.hung_at = math.inf
            if not self.stepping:
                self.begin(now)

    def slow(self, factor: float, now: float) -> None:
        self.run_to(now)
        self.factor = factor

    def free(self, row: Row) -> None:
        """It runs no more."""
        pinned = self.pinned()
        for block in reversed(row.held):
            if block not in pinned:
                self.idle.append(block)
        row.held = []

    def evict(self) -> None:
        while self.used() + len(self.idle) * self.size > self.kv_tokens:
            del self.idle[0]

    def begin(self, now: float) -> None:
        decoding = [row for row in self.running if row.decodes]
        preempted = False
        while self.used() + len(decoding) > self.kv_tokens:
            row = self.running.pop()
            decoding = [other for other in decoding if other is not row]
            self.free(row)
            row.read = row.target = 0
            self.waiting.insert(0, row)
            self.preemptions += 1
            preempted = True
        context = sum(row.job.prompt_tokens + row.made for row in decoding)
        self.growing = decoding
        self.evict()
        left = self.step_tokens_max - len(decoding)
        square = 0.0
        for row in self.running:
            if row.read < row.target:
                left, square = self.read(row, left, square)
        while left and not preempted and self.waiting and len(self.running) < self.sequences_max:
            if not self.admit(self.waiting[0]):
                break
            left, square = self.read(self.running[-1], left, square)
        new = self.step_tokens_max - left
        self.stepping = new > 0
        if new:
            self.ends = now + self.step_time.step_s(new, square, context, len(decoding)) * self.factor

    def admit(self, row: Row) -> bool:
        pinned = self.pinned()
        target = row.job.prompt_tokens + row.made
        hit: list[int] = []
        for block in row.blocks:
            if block not in pinned and block not in self.idle:
                break
            hit.append(block)
        if self.used() + target - sum(block in pinned for block in hit) * self.size > self.kv_tokens:
            return False
        del self.waiting[0]
        self.running.append(row)
        self.idle = [block for block in self.idle if block not in hit]
        row.held, row.target = hit, target
        row.read = min(len(hit) * self.size, target - 1)
        if row.cached < 0:
            row.cached = row.read
        self.evict()
        return True

    def read(self, row: Row, left: int, square: float) -> tuple[int, float]:
        tokens = min(left, row.target - row.read)
        square += tokens * (row.read + tokens / 2)
        row.read += tokens
        for block in row.blocks[len(row.held) : row.read // self.size]:
            row.held.append(block)
        if row.read == row.target:
            row.in_step = True
            self.ready.append(row)
        return left - tokens, square

    def finish(self) -> None:
        at, grown, self.growing = self.ends, self.growing, []
        for row in grown:
            row.made += 1
            self.tell(at, row, Kind.TOKEN)
        over = [row for row in grown if row.made == row.job.output_tokens]
        for row in over:
            self.end(at, row)
        ready, self.ready = self.ready, []
        for row in ready:
            row.made += 1
            row.in_step = False
            self.tell(at, row, Kind.FIRST if row.made == 1 else Kind.TOKEN)
            if row.made == row.job.output_tokens:
                self.end(at, row)

    def end(self, at: float, row: Row) -> None:
        self.running.remove(row)
        self.free(row)
        self.tell(at, row, Kind.DONE)

    def tell(self, at: float, row: Row, kind: Kind) -> None:
        self.out.append(EngineEvent(at, row.job.id, kind, row.made, row.cached))
