"""One replica: continuous batching with chunked prefill and a prefix cache, as in vLLM's V1 scheduler.

Every step computes one token for each decoding sequence and fills the rest of its budget with prompts, first come,
first served. While steps only decode, they differ only in their growing context: until something ends or arrives, any
number of them form one *run*, whose duration has a closed form.

Modelled after vLLM: decodes go first; a prompt is started when all of it fits; of the started prompts only the last
one is partially prefilled; the last started one is preempted first and starts over. Not modelled: speculative
decoding, priorities, and caching of generated tokens.
"""

import math
from collections import OrderedDict
from collections.abc import Container, Sequence
from heapq import heappop, heappush
from typing import Final

from forebay.sim.engine.hardware import Hardware
from forebay.sim.engine.pool import KvPool
from forebay.sim.engine.values import EngineEvent, Job, JobTooLarge, Kind

SEQUENCES_MAX: Final = 256
"""Most concurrent sequences; vLLM's `max_num_seqs`."""
STEP_TOKENS_MAX: Final = 8192
"""Most tokens per step; vLLM's `max_num_batched_tokens`."""
BLOCK_TOKENS: Final = 512


class _Sequence:
    """A job in progress. While it decodes, `ends` is the decoding step that produces its last token; else -1."""

    __slots__ = ("blocks", "cached", "ends", "held", "job", "made", "number", "read", "target")

    def __init__(self, job: Job, blocks: tuple[int, ...]) -> None:
        self.job = job
        self.blocks = blocks
        self.held: list[int] = []
        """The blocks that it pins."""
        self.cached = -1
        self.made = 0
        """Response tokens when it was last started."""
        self.target = job.prompt_tokens
        """Tokens to prefill before the next one is generated: the prompt, and tokens generated before a
        preemption."""
        self.read = 0
        self.ends = -1
        self.number = 0


class Replica:
    """A pure state machine. `now` is in seconds and monotonic; `advance` returns events in order.

    A step begins when the previous one ends, or with the first job. Jobs offered at that very moment join the next
    step. Durations are those of the hardware, divided by `speed`. Attributes are as of the last call with a time.
    """

    __slots__ = (
        "_clock", "_context", "_decoding", "_each_token", "_ending", "_ends", "_first_s", "_hung_at", "_more_s",
        "_number", "_out", "_partial", "_pool", "_ready", "_running", "_scale", "_sequences_max", "_settled",
        "_speed", "_square", "_start", "_step", "_step_tokens_max", "_steps", "_waiting", "busy_s", "hit_tokens",
        "preemptions", "prefilled_tokens", "waiting_tokens",
    )  # fmt: skip

    def __init__(
        self,
        hardware: Hardware,
        *,
        block_tokens: int = BLOCK_TOKENS,
        sequences_max: int = SEQUENCES_MAX,
        step_tokens_max: int = STEP_TOKENS_MAX,
        kv_tokens: int | None = None,
        each_token: bool = False,
        speed: float = 1.0,
    ) -> None:
        if not 1 <= sequences_max <= step_tokens_max:
            raise ValueError(
                f"{sequences_max} sequences need at least one token each, more than the step's {step_tokens_max}"
            )
        self._step = hardware.step
        self._sequences_max = sequences_max
        self._step_tokens_max = step_tokens_max
        self._each_token = each_token
        self._speed = speed
        self._scale = 1.0 / speed
        self._pool = KvPool(hardware.kv_tokens if kv_tokens is None else kv_tokens, block_tokens)

        self._waiting: OrderedDict[int, _Sequence] = OrderedDict()
        self._running: dict[int, _Sequence] = {}
        """In the order in which they were started."""
        self._ending: list[tuple[int, int, _Sequence]] = []
        """A heap of decoding sequences, including removed ones; see `_next_ending`."""
        self._partial: _Sequence | None = None
        """The last started one, while part of its prompt is left for the next step."""
        self._ready: list[_Sequence] = []
        """Sequences whose prefill ends with this step."""
        self._decoding = 0
        self._context = 0
        """Tokens of all decoding sequences, including the input token of each."""
        self._clock = 0
        """Decoding steps so far."""
        self._number = 0

        # The run: step m of it ends at _start + m·_first_s + _more_s·m(m-1)/2; _settled of them are accounted for.
        self._start = 0.0
        self._first_s = 0.0
        self._more_s = 0.0
        self._steps = 0
        self._settled = 0
        self._ends = math.inf
        self._square = 0.0
        self._hung_at = math.inf
        self._out: list[EngineEvent] = []

        self.busy_s = 0.0
        """Time in completed steps."""
        self.preemptions = 0
        self.prefilled_tokens = 0
        """Prompt tokens, and response tokens recomputed after preemptions."""
        self.hit_tokens = 0
        """Prompt tokens found in the cache when first started."""
        self.waiting_tokens = 0
        """Tokens left to prefill for all offered jobs; cache hits are only subtracted when a prompt is started."""

    # --- what can be asked

    @property
    def next_at(self) -> float:
        """When `advance` may next return events; infinity: not before a job is offered."""
        if self._out:
            return self._out[0].at
        return self._ends if self._hung_at == math.inf else math.inf

    @property
    def running(self) -> int:
        """Started jobs."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Queued jobs, including preempted ones."""
        return len(self._waiting)

    @property
    def kv_used_tokens(self) -> int:
        """KV tokens of running jobs; shared ones count once."""
        return self._pool.used_tokens()

    @property
    def kv_total_tokens(self) -> int:
        """Capacity of the KV cache."""
        return self._pool.total_tokens

    @property
    def cached(self) -> Container[int]:
        """The currently cached blocks."""
        return self._pool

    def first_token_s(self, prompt_tokens: int, blocks: Sequence[int], now: float) -> float:
        """Estimated time to first token of a prompt that arrives now, if all queued prompts fit in turn."""
        return self._left_s(now) + self._reading_s([*self._unread(), self._unread_of(prompt_tokens, blocks)])

    def read_s(self, prompt_tokens: int, blocks: Sequence[int]) -> float:
        """The part of it that is the prefill of the prompt itself, without what will be cached by then."""
        return self._reading_s([self._unread_of(prompt_tokens, blocks)])

    def token_s(self) -> float:
        """The time of a step if one more request ran."""
        decoding = self._decoding + 1
        return self._step.step_s(decoding, 0.0, self._context, decoding) * self._scale

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Blocks stored and removed since the last call; None: no change. For one `Journal`."""
        return self._pool.news()

    # --- what can be done

    def offer(self, job: Job, now: float) -> None:
        """A job arrives. Raises JobTooLarge if it never fits; ValueError if it has no tokens, or a duplicate id."""
        total = self._pool.total_tokens
        if job.prompt_tokens < 1 or job.output_tokens < 1:
            raise ValueError(
                f"job {job.id} has {job.prompt_tokens} + {job.output_tokens} tokens; one of each is needed"
            )
        if job.prompt_tokens + job.output_tokens - 1 > total:
            text = f"job {job.id} has {job.prompt_tokens} + {job.output_tokens} tokens; the KV cache holds {total}"
            raise JobTooLarge(text)
        self._run_to(now)
        if job.id in self._running or job.id in self._waiting:
            raise ValueError(f"job {job.id} is already in progress")
        blocks, full = job.blocks, job.prompt_tokens // self._pool.block_tokens
        self._waiting[job.id] = _Sequence(job, blocks if len(blocks) <= full else blocks[:full])
        self.waiting_tokens += job.prompt_tokens
        if not self._steps:
            if self._hung_at == math.inf:
                self._begin(now)
        elif len(self._waiting) == 1 and len(self._running) < self._sequences_max:
            self._interrupt(now)

    def cancel(self, id: int, now: float) -> bool:
        """Cancel a job; False if there is none. The current step keeps its duration."""
        self._run_to(now)
        sequence = self._waiting.get(id)
        if sequence is not None:
            was_first = next(iter(self._waiting)) == id
            del self._waiting[id]
            self.waiting_tokens -= sequence.target
            if was_first:
                self._interrupt(now)
            return True
        if id not in self._running:
            return False
        self._interrupt(now)
        sequence = self._running.pop(id)
        if sequence.ends >= 0:
            self._release(sequence, self._stop_decoding(sequence))
        elif sequence is self._partial:
            self._stop_reading(sequence)
        else:
            self._ready.remove(sequence)
            self._release(sequence, sequence.target)
        return True

    def advance(self, now: float) -> list[EngineEvent]:
        """Events since the last call, up to and including `now`."""
        self._run_to(now)
        self._catch_up(now)
        if not self._out:
            return []
        out, self._out = self._out, []
        return out

    def hang(self, now: float) -> None:
        """The engine hangs: it makes no progress, but jobs can be offered and cancelled."""
        self._run_to(now)
        self._hung_at = min(self._hung_at, now)

    def resume(self, now: float) -> None:
        """Continue after a hang."""
        if self._hung_at == math.inf:
            return
        stood_still_s, self._hung_at = now - self._hung_at, math.inf
        if self._steps:
            self._start += stood_still_s
            self._ends = self._end_of(self._steps)
        else:
            self._begin(now)

    def slow(self, factor: float, now: float) -> None:
        """From the next step on, steps take `factor` times as long; 1 is normal."""
        self._run_to(now)
        self._interrupt(now)
        self._scale = factor / self._speed

    # --- what is to be expected: pairs of tokens to be read, and of those before them

    def _left_s(self, now: float) -> float:
        """Remaining time of the current step."""
        self._run_to(now)
        self._catch_up(now)
        return max(0.0, self._end_of(self._settled + 1) - now) if self._steps else 0.0

    def _unread(self) -> list[tuple[int, int]]:
        size, reach = self._pool.block_tokens, self._pool.reach
        hits = [(each.target, min(reach(each.blocks)[0] * size, each.target - 1)) for each in self._waiting.values()]
        if self._partial is not None:
            hits.append((self._partial.target, self._partial.read))
        return [(target - hit, hit) for target, hit in hits]

    def _unread_of(self, prompt_tokens: int, blocks: Sequence[int]) -> tuple[int, int]:
        """The part of a prompt that must be prefilled, given that queued prompts with the same prefix come first."""
        depth = self._pool.reach(blocks)[0]
        reading = [*self._waiting.values(), *self._ready]
        for each in reading if self._partial is None else [*reading, self._partial]:
            if depth < len(each.blocks):
                depth = max(depth, _alike(each.blocks, blocks))
        hit = min(depth * self._pool.block_tokens, prompt_tokens - 1)
        return prompt_tokens - hit, hit

    def _reading_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Prefill time in steps that are as full as possible, beside current decodes."""
        decoding = self._decoding
        tokens = sum([new for new, _ in prompts])
        square = sum([new * (before + new / 2) for new, before in prompts])
        steps = math.ceil(tokens / max(1, self._step_tokens_max - decoding))
        each_s = self._step.step_s(tokens / steps + decoding, square / steps, self._context, decoding)
        return steps * each_s * self._scale

    # --- the run

    def _run_to(self, now: float) -> None:
        """Finish the runs that have ended, and start those that follow."""
        now = min(now, self._hung_at)
        while self._ends <= now:
            at = self._ends
            self._finish(at)
            self._begin(at)

    def _end_of(self, steps: int) -> float:
        return self._start + steps * self._first_s + self._more_s * (steps * (steps - 1) / 2)

    def _catch_up(self, now: float) -> None:
        """Account for the completed steps of the run, except the last."""
        last = self._steps - 1
        if last <= self._settled:
            return
        past_s = min(now, self._hung_at) - self._start
        linear_s = self._first_s - self._more_s / 2
        done = int(2 * past_s / (linear_s + math.sqrt(linear_s * linear_s + 2 * self._more_s * past_s)))
        self._settle(max(min(done, last), self._settled))

    def _interrupt(self, now: float) -> None:
        """Let the run end with the current step."""
        self._catch_up(now)
        if self._steps > self._settled + 1:
            self._steps = self._settled + 1
            self._ends = self._end_of(self._steps)

    def _settle(self, steps: int) -> None:
        """Account for the run's steps up to this one. The next step's tokens are already allocated."""
        more = steps - self._settled
        if not more:
            return
        decoding = self._decoding
        self.busy_s += self._end_of(steps) - self._end_of(self._settled)
        self._settled = steps
        self._clock += more
        self._context += more * decoding
        grown = more if steps < self._steps else more - 1
        if grown:
            self._pool.take(grown * decoding)

    def _finish(self, at: float) -> None:
        """The run ends: emit its events."""
        self._settle(self._steps)
        out = self._out
        clock = self._clock
        if self._each_token:
            for id, sequence in self._running.items():
                if sequence.ends >= 0:
                    made = sequence.job.output_tokens - (sequence.ends - clock)
                    out.append(EngineEvent(at, id, Kind.TOKEN, made, sequence.cached))
        while self._next_ending() == clock:
            _, _, sequence = heappop(self._ending)
            self._stop_decoding(sequence)
            self._end(sequence, at)
        for sequence in self._ready:
            job = sequence.job
            made = sequence.made = sequence.made + 1
            if made == 1 or self._each_token:
                out.append(EngineEvent(at, job.id, Kind.FIRST if made == 1 else Kind.TOKEN, made, sequence.cached))
            if made == job.output_tokens:
                self._end(sequence, at)
                continue
            sequence.ends = clock + job.output_tokens - made
            self._decoding += 1
            self._context += sequence.target + 1
            heappush(self._ending, (sequence.ends, sequence.number, sequence))
        self._ready.clear()

    def _end(self, sequence: _Sequence, at: float) -> None:
        job = sequence.job
        del self._running[job.id]
        self._release(sequence, job.prompt_tokens + job.output_tokens - 1)
        self._out.append(EngineEvent(at, job.id, Kind.DONE, job.output_tokens, sequence.cached))

    # --- the step

    def _begin(self, at: float) -> None:
        """Start a run: the sequences in its steps, their duration, and their number."""
        pool = self._pool
        while self._decoding > pool.room():
            self._preempt()
        decoding = self._decoding
        if decoding:
            pool.take(decoding)
        self._square = 0.0
        left = self._step_tokens_max - decoding
        if self._partial is not None:
            left = self._read(self._partial, left)
        while left and self._waiting and len(self._running) < self._sequences_max:
            sequence = self._admit()
            if sequence is None:
                break
            left = self._read(sequence, left)
        new = self._step_tokens_max - left
        self._settled = 0
        if not new:
            self._steps = 0
            self._ends = math.inf
            return
        self._steps = 1
        self._more_s = 0.0
        if new == decoding and not self._each_token:
            self._steps = min(self._next_ending() - self._clock, 1 + pool.room() // decoding)
            self._more_s = self._step.context_s * decoding * self._scale
        self._start = at
        self._first_s = self._step.step_s(new, self._square, self._context, decoding) * self._scale
        self._ends = self._end_of(self._steps)

    def _admit(self) -> _Sequence | None:
        """Start the first queued job; None if it does not fit."""
        pool = self._pool
        sequence = next(iter(self._waiting.values()))
        blocks, target = sequence.blocks, sequence.target
        depth, pinned = pool.reach(blocks)
        if target - pinned * pool.block_tokens > pool.room():
            return None
        self._waiting.popitem(last=False)
        self._running[sequence.job.id] = sequence
        held = sequence.held = list(blocks[:depth])
        pool.pin(held)
        pool.take(target - depth * pool.block_tokens)
        hit = sequence.read = min(depth * pool.block_tokens, target - 1)  # the last token is always computed
        self.waiting_tokens -= hit
        if sequence.cached < 0:
            sequence.cached = hit
            self.hit_tokens += hit
        self._number += 1
        sequence.number = self._number
        return sequence

    def _read(self, sequence: _Sequence, left: int) -> int:
        """Prefill as much of a prompt as fits in the step; returns the remaining budget."""
        before = sequence.read
        tokens = min(left, sequence.target - before)
        after = sequence.read = before + tokens
        self._square += tokens * (before + tokens / 2)
        self.prefilled_tokens += tokens
        self.waiting_tokens -= tokens
        pool = self._pool
        size = pool.block_tokens
        for block in sequence.blocks[before // size : after // size]:
            if pool.share(block):
                sequence.held.append(block)
        if after == sequence.target:
            self._ready.append(sequence)
            self._partial = None
        else:
            self._partial = sequence
        return left - tokens

    def _preempt(self) -> None:
        """Preempt the sequence started last, which goes to the front of the queue.

        It needs more room than it frees, so no job is started in its place in the same step, as in vLLM.
        """
        id, sequence = self._running.popitem()
        if sequence is self._partial:
            self._stop_reading(sequence)
        else:
            tokens = self._stop_decoding(sequence)
            sequence.made = tokens - sequence.job.prompt_tokens
            sequence.target = tokens
            self._release(sequence, tokens - 1)
        self._waiting[id] = sequence
        self._waiting.move_to_end(id, last=False)
        self.waiting_tokens += sequence.target
        self.preemptions += 1

    def _stop_reading(self, sequence: _Sequence) -> None:
        """Remove a partially prefilled sequence."""
        self._partial = None
        self.waiting_tokens -= sequence.target - sequence.read
        self._release(sequence, sequence.target)

    def _stop_decoding(self, sequence: _Sequence) -> int:
        """Stop decoding a sequence; returns the tokens of its prompt and response so far."""
        job = sequence.job
        tokens = job.prompt_tokens + job.output_tokens - (sequence.ends - self._clock)
        sequence.ends = -1
        sequence.number = 0
        self._decoding -= 1
        self._context -= tokens
        return tokens

    def _release(self, sequence: _Sequence, tokens: int) -> None:
        """Give back what it had: so many tokens, of which those of whole blocks stay for others."""
        pool = self._pool
        pool.own_tokens -= tokens - len(sequence.held) * pool.block_tokens
        pool.unpin(sequence.held)
        sequence.held = []

    def _next_ending(self) -> int:
        """The decoding step with which the next sequence is done; -1 if none decodes."""
        ending = self._ending
        while ending and ending[0][1] != ending[0][2].number:
            heappop(ending)
        return ending[0][0] if ending else -1


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many blocks from the first on are the same."""
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        depth += 1
    return depth
