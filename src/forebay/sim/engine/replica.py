"""One replica: continuous batching with chunked prefill on a prefix cache, as vLLM's V1 scheduler does it.

Every step computes one token for each sequence that decodes, and fills the rest of its budget with prompts, first
come, first served. While a step only decodes, the next ones are like it but for a context that has grown: until
something ends or comes, any number of them are one *run*, whose length has a closed form.

Of vLLM it keeps: decodes go first; a prompt is begun when all of it has room; of the prompts begun only the last one
is unread; who was begun last makes room for the others and starts over. It leaves out speculative decoding,
priorities and what the answers themselves leave in the prefix cache.
"""

import math
from collections import OrderedDict
from collections.abc import Container, Sequence
from heapq import heappop, heappush
from typing import Final

from forebay.sim.engine.hardware import Hardware
from forebay.sim.engine.pool import KvPool
from forebay.sim.engine.values import Happened, Job, JobTooLarge, Kind

SEQUENCES_MAX: Final = 256
"""That run at once; vLLM's `max_num_seqs`."""
STEP_TOKENS_MAX: Final = 8192
"""That a step computes; vLLM's `max_num_batched_tokens`."""
BLOCK_TOKENS: Final = 512


class _Sequence:
    """A job on its way. While it decodes, `ends` is the decoding step that makes its last token; else it is -1."""

    __slots__ = ("blocks", "cached", "ends", "held", "job", "made", "number", "read", "target")

    def __init__(self, job: Job, blocks: tuple[int, ...]) -> None:
        self.job = job
        self.blocks = blocks
        self.held: list[int] = []
        """The blocks that it pins."""
        self.cached = -1
        self.made = 0
        """Tokens of the answer when it was last begun."""
        self.target = job.prompt_tokens
        """Tokens that have to be read before the next one is made: of the prompt, and those made before a restart."""
        self.read = 0
        self.ends = -1
        self.number = 0


class Replica:
    """A pure state machine: `now` is in seconds and never goes back; events are told by `advance`, in their order.

    A step begins as soon as the one before has ended, or with the first job. What is offered at that very moment
    comes too late for it. Durations are those of the hardware, divided by `speed`. What it says of itself is as of
    the last call with a time.
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
            raise ValueError(f"{sequences_max} sequences need a token each in a step of {step_tokens_max}")
        self._step = hardware.step
        self._sequences_max = sequences_max
        self._step_tokens_max = step_tokens_max
        self._each_token = each_token
        self._speed = speed
        self._scale = 1.0 / speed
        self._pool = KvPool(hardware.kv_tokens if kv_tokens is None else kv_tokens, block_tokens)

        self._waiting: OrderedDict[int, _Sequence] = OrderedDict()
        self._running: dict[int, _Sequence] = {}
        """In the order in which they were begun."""
        self._ending: list[tuple[int, int, _Sequence]] = []
        """A heap of what decodes, with entries of what has been taken out; see `_next_ending`."""
        self._partial: _Sequence | None = None
        """The last one begun, while some of its prompt has to wait for the next step."""
        self._ready: list[_Sequence] = []
        """Whose prompts are read with this step."""
        self._decoding = 0
        self._context = 0
        """Tokens of all that decodes, with the one that each makes its next one from."""
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
        self._out: list[Happened] = []

        self.busy_s = 0.0
        """Time in steps that have ended."""
        self.preemptions = 0
        self.prefilled_tokens = 0
        """Of prompts, and of answers that had to be read again."""
        self.hit_tokens = 0
        """Of prompts, found in the cache when they were first begun."""
        self.waiting_tokens = 0
        """Still to be read for all that was offered, as far as it is known: a hit shows when a prompt is begun."""

    # --- what can be asked

    @property
    def next_at(self) -> float:
        """When `advance` may have something to tell; infinity: not before something is offered."""
        if self._out:
            return self._out[0].at
        return self._ends if self._hung_at == math.inf else math.inf

    @property
    def running(self) -> int:
        """Jobs that have been begun."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs that have not, or have to start over."""
        return len(self._waiting)

    @property
    def kv_used_tokens(self) -> int:
        """In the KV cache, of what runs; what several share counts once."""
        return self._pool.used_tokens()

    @property
    def kv_total_tokens(self) -> int:
        """That the KV cache holds."""
        return self._pool.total_tokens

    @property
    def cached(self) -> Container[int]:
        """The blocks that its cache holds now."""
        return self._pool

    def first_token_s(self, prompt_tokens: int, blocks: Sequence[int], now: float) -> float:
        """About how long a prompt that came now would need to its first token, if all that waits has room in turn."""
        return self._left_s(now) + self._reading_s([*self._unread(), self._unread_of(prompt_tokens, blocks)])

    def read_s(self, prompt_tokens: int, blocks: Sequence[int]) -> float:
        """How much of that is the reading of the prompt itself, without what the cache will hold by then."""
        return self._reading_s([self._unread_of(prompt_tokens, blocks)])

    def token_s(self) -> float:
        """The time of a step if one more request ran."""
        decoding = self._decoding + 1
        return self._step.step_s(decoding, 0.0, self._context, decoding) * self._scale

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Blocks that the cache has stored, and removed, since the last call; None: no change. For one `Journal`."""
        return self._pool.news()

    # --- what can be done

    def offer(self, job: Job, now: float) -> None:
        """A job arrives. JobTooLarge if it never fits; ValueError if it has no tokens, or an id that is under way."""
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
            raise ValueError(f"job {job.id} is under way already")
        blocks, full = job.blocks, job.prompt_tokens // self._pool.block_tokens
        self._waiting[job.id] = _Sequence(job, blocks if len(blocks) <= full else blocks[:full])
        self.waiting_tokens += job.prompt_tokens
        if not self._steps:
            if self._hung_at == math.inf:
                self._begin(now)
        elif len(self._waiting) == 1 and len(self._running) < self._sequences_max:
            self._interrupt(now)

    def cancel(self, id: int, now: float) -> bool:
        """Forget a job; False if there is none. The step under way takes its time nevertheless."""
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

    def advance(self, now: float) -> list[Happened]:
        """All that has happened since the last call, up to and including `now`."""
        self._run_to(now)
        self._catch_up(now)
        if not self._out:
            return []
        out, self._out = self._out, []
        return out

    def hang(self, now: float) -> None:
        """The engine stalls: from now on it does nothing, but jobs can be offered and cancelled."""
        self._run_to(now)
        self._hung_at = min(self._hung_at, now)

    def resume(self, now: float) -> None:
        """It goes on where it was."""
        if self._hung_at == math.inf:
            return
        stood_still_s, self._hung_at = now - self._hung_at, math.inf
        if self._steps:
            self._start += stood_still_s
            self._ends = self._end_of(self._steps)
        else:
            self._begin(now)

    def slow(self, factor: float, now: float) -> None:
        """From the next step on, steps take `factor` times as long as they should; 1 is as it should be."""
        self._run_to(now)
        self._interrupt(now)
        self._scale = factor / self._speed

    # --- what is to be expected: pairs of tokens to be read, and of those before them

    def _left_s(self, now: float) -> float:
        """Of the step under way."""
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
        """What others wait for with the same beginning is in the cache when this one's turn comes."""
        depth = self._pool.reach(blocks)[0]
        reading = [*self._waiting.values(), *self._ready]
        for each in reading if self._partial is None else [*reading, self._partial]:
            if depth < len(each.blocks):
                depth = max(depth, _alike(each.blocks, blocks))
        hit = min(depth * self._pool.block_tokens, prompt_tokens - 1)
        return prompt_tokens - hit, hit

    def _reading_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """In steps that are as full as they can be, beside what decodes now."""
        decoding = self._decoding
        tokens = sum([new for new, _ in prompts])
        square = sum([new * (before + new / 2) for new, before in prompts])
        steps = math.ceil(tokens / max(1, self._step_tokens_max - decoding))
        each_s = self._step.step_s(tokens / steps + decoding, square / steps, self._context, decoding)
        return steps * each_s * self._scale

    # --- the run

    def _run_to(self, now: float) -> None:
        """End the runs that have ended, and begin those that follow."""
        now = min(now, self._hung_at)
        while self._ends <= now:
            at = self._ends
            self._finish(at)
            self._begin(at)

    def _end_of(self, steps: int) -> float:
        return self._start + steps * self._first_s + self._more_s * (steps * (steps - 1) / 2)

    def _catch_up(self, now: float) -> None:
        """Account for the steps of the run that have ended: all but the last, at most."""
        last = self._steps - 1
        if last <= self._settled:
            return
        past_s = min(now, self._hung_at) - self._start
        linear_s = self._first_s - self._more_s / 2
        done = int(2 * past_s / (linear_s + math.sqrt(linear_s * linear_s + 2 * self._more_s * past_s)))
        self._settle(max(min(done, last), self._settled))

    def _interrupt(self, now: float) -> None:
        """Let the run end with the step under way."""
        self._catch_up(now)
        if self._steps > self._settled + 1:
            self._steps = self._settled + 1
            self._ends = self._end_of(self._steps)

    def _settle(self, steps: int) -> None:
        """Account for the run's steps up to this one. The tokens of the step after it have their room already."""
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
        """The run ends: what has come of it."""
        self._settle(self._steps)
        out = self._out
        clock = self._clock
        if self._each_token:
            for id, sequence in self._running.items():
                if sequence.ends >= 0:
                    made = sequence.job.output_tokens - (sequence.ends - clock)
                    out.append(Happened(at, id, Kind.TOKEN, made, sequence.cached))
        while self._next_ending() == clock:
            _, _, sequence = heappop(self._ending)
            self._stop_decoding(sequence)
            self._end(sequence, at)
        for sequence in self._ready:
            job = sequence.job
            made = sequence.made = sequence.made + 1
            if made == 1 or self._each_token:
                out.append(Happened(at, job.id, Kind.FIRST if made == 1 else Kind.TOKEN, made, sequence.cached))
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
        self._out.append(Happened(at, job.id, Kind.DONE, job.output_tokens, sequence.cached))

    # --- the step

    def _begin(self, at: float) -> None:
        """Begin a run: who is in its steps, how long they take, and how many of them are alike."""
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
        """Begin the first job that waits; None if there is no room for it."""
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
        hit = sequence.read = min(depth * pool.block_tokens, target - 1)  # the last one is computed
        self.waiting_tokens -= hit
        if sequence.cached < 0:
            sequence.cached = hit
            self.hit_tokens += hit
        self._number += 1
        sequence.number = self._number
        return sequence

    def _read(self, sequence: _Sequence, left: int) -> int:
        """Read of a prompt what the step has left for it; how much is left then."""
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
        """Who was begun last makes room, and starts over before all that wait.

        It needs more than what it leaves: so nobody is begun in its place in the same step, as vLLM has it too.
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
        """It leaves with its prompt half read."""
        self._partial = None
        self.waiting_tokens -= sequence.target - sequence.read
        self._release(sequence, sequence.target)

    def _stop_decoding(self, sequence: _Sequence) -> int:
        """It leaves those that decode; the tokens of its prompt and, so far, its answer."""
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
