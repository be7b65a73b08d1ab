"""Replicas in memory: what each does next with a request is for the test to say, byte by byte."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
from tests.gateway.machine.api_formats import MESSAGES, NOISE, RESPONSES, Voice
from tests.gateway.machine.loop import Pipe, VirtualLoop

from forebay.core.model import BlockNews, LoadReport, Replica, ReplicaState
from forebay.core.prefix.blocks import blocks
from forebay.wire.apis.request_fields import prompt_text

NEW, HALF, STREAM, SAID = "new", "half", "stream", "said"
"""Nothing was answered yet; it stops in the middle of something; events come; only the trailers are to come."""
REPORTS = (
    "honest", "honest", "honest", "busy", "full", "stalled", "mute", "stranger", "garbage", "unlimited", "single",
    "unsure of its cache", "forgetful", "lying about its cache",
    ReplicaState.WARMING, ReplicaState.DRAINING, ReplicaState.DEGRADED,
)  # fmt: skip
"""What a replica may say of itself; the states say only that they are another one."""


def error(code: str) -> bytes:
    return msgspec.json.encode({"error": {"message": "m", "type": "t", "param": None, "code": code}})


class Job:
    """A request at a replica. Methods named in `STEPS` are what may happen next."""

    def __init__(self, node: "Node", pipe: Pipe, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        assert int(fields[b"content-length"]) == len(body)
        more = fields.get(b"x-forebay-continue")
        said = body[len(body) - int(more.split(b",")[2]) :].decode() if more else ""
        body = body[: len(body) - len(said)]
        self.node = node
        self.pipe = pipe
        self.number = node.next_number()
        self.id = fields[b"x-request-id"].decode()
        self.path = head.split(b" ", 2)[1]
        self.model = msgspec.json.decode(body)["model"]
        self.phase = NEW
        self.told: tuple[int, int, int] | None = None
        self.heard = True
        """Whether the gateway has read it at once; it may have been too late."""
        self.spoke = False
        """Whether the gateway has read an event of this answer."""
        self.continues = more is not None
        self._voice = Voice(self.path, self.id, self.model, said, more)
        if self.path in (MESSAGES, RESPONSES) or self.path.endswith(b"completions"):
            node.reads(blocks(prompt_text(body), self.model))

    @property
    def words(self) -> int:
        """How much the whole answer has said, with what was said elsewhere."""
        return self._voice.words

    @property
    def gone(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.node.jobs.get(self.pipe) is not self

    def do(self, *script: "Step") -> None:
        """Do these one after the other, as far as that is possible now."""
        for step in script:
            if self.gone or (step is not Job.complete and step not in STEPS[self.phase]):
                return
            step(self)

    def send(self, data: bytes) -> None:
        self.pipe.deliver(data)

    def _ends(self, tell: bool) -> bytes:
        """Headers or trailers that say what was used, if it is said."""
        as_a_head = self.continues and self.phase == NEW  # in which nobody looks for them then
        if tell and not as_a_head:
            self.heard = self.pipe.reading and not self.pipe.closing
            self.told = (11, self.words + 1, 4)
        return b"x-forebay-usage: 11,%d,4\r\n" % (self.words + 1) if tell else b""

    def _over(self) -> None:
        self.node.jobs.pop(self.pipe, None)

    def _answer(self, status: int, body: bytes, more: bytes = b"") -> None:
        self._over()
        self.send(
            b"HTTP/1.1 %d x\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
            % (status, more, len(body), body)
        )

    # --- nothing was answered yet

    def whole(self) -> None:
        self._answer(200, b'{"object":"x"}', self._ends(True))

    def whole_without_usage(self) -> None:
        self._answer(200, b'{"object":"x"}', b"x-forebay-usage: many\r\nconnection: close\r\n")

    def too_large(self) -> None:
        self._answer(200, b'"%b"' % (b"x" * 2000), self._ends(True))

    def half(self) -> None:
        usage = self._ends(True)
        self.phase = HALF
        self.send(b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\n%bcontent-length: 10\r\n\r\n12345" % usage)

    def half_a_head(self) -> None:
        self.phase = HALF
        self.send(b"HTTP/1.1 503 x\r\nx-forebay-retryable: 1\r\ncontent-length: 5\r\n\r\n")

    def busy(self) -> None:
        self._answer(503, error("overloaded"), b"x-forebay-retryable: 1\r\n")

    def loses_its_engine(self) -> None:
        self._answer(503, error("engine_failed"), b"x-forebay-retryable: 1\r\n")

    def fails_on_it(self) -> None:
        self._answer(503, error("request_failed"), b"x-forebay-retryable: 1\r\n")

    def mumbles(self) -> None:
        self._answer(503, b"<html>", b"x-forebay-retryable: 1\r\n")

    def blames_the_client(self) -> None:
        self._answer(400, error("invalid_request"))

    def does_not_support_it(self) -> None:
        self._answer(400, error("unsupported_parameter"))

    def cannot_go_on(self) -> None:
        self._answer(409, error("not_resumable"))

    def fails(self) -> None:
        self._answer(500, error("internal_error"))

    def nonsense(self) -> None:
        self._over()
        self.send(b"\x00\x01 what?\r\n\r\n")

    def begin(self) -> None:
        self.phase = STREAM
        head = b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        opening = self._voice.opening()
        self.send(head + self._chunk(opening) if opening else head)

    # --- events come

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    def _event(self) -> bytes:
        self.spoke = self.pipe.reading
        return self._voice.word()

    def say(self) -> None:
        self.send(self._chunk(self._event()))

    def say_much(self) -> None:
        self.send(b"".join(self._chunk(self._event()) for _ in range(9)))

    def say_half_an_event(self) -> None:
        self.send(self._chunk(self._voice.half_a_word()))
        self.phase = HALF

    def say_what_nobody_understands(self) -> None:
        self.send(self._chunk(NOISE))

    def last_words(self) -> None:
        self.phase = SAID
        self.send(self._chunk(self._voice.finish()) + self._chunk(self._voice.end()))

    def finish_only(self) -> None:
        self.phase = HALF
        self.send(self._chunk(self._voice.finish()))

    def breaks_off(self) -> None:
        self._trail(b"x-forebay-error: engine_failed\r\n%b" % self._ends(True))

    def breaks_off_for_good(self) -> None:
        self._trail(b"x-forebay-error: internal_error\r\n")

    def breaks_off_unexplained(self) -> None:
        self._trail(b"x-forebay-error: who_knows\r\n")

    def says_so_and_stops(self) -> None:
        self._over()
        self.send(self._chunk(b"data: %b\n\n" % error("engine_stalled")))
        self.pipe.cut()

    def bad_framing(self) -> None:
        self._over()
        self.send(b"zz\r\n")

    def _trail(self, trailers: bytes) -> None:
        self._over()
        self.send(b"0\r\n%b\r\n" % trailers)

    # --- the end

    def finish(self) -> None:
        self._trail(self._ends(True))

    def finish_untold(self) -> None:
        self._trail(b"")

    def lose(self) -> None:
        self._over()
        self.pipe.cut()

    def complete(self) -> None:
        """Go on to a good end."""
        if self.phase == NEW and self.path not in (MESSAGES, RESPONSES) and not self.continues:
            self.whole()
        elif self.phase == NEW:
            self.begin()
        elif self.phase == STREAM:
            self.last_words()
        elif self.phase == SAID:
            self.finish()
        else:
            self.lose()


Step = Callable[[Job], None]
STEPS: dict[str, tuple[Step, ...]] = {
    NEW: (
        Job.begin, Job.begin, Job.begin, Job.whole, Job.whole, Job.whole_without_usage, Job.too_large, Job.half,
        Job.half_a_head, Job.busy, Job.busy, Job.loses_its_engine, Job.fails_on_it, Job.mumbles,
        Job.blames_the_client, Job.does_not_support_it,
        Job.cannot_go_on, Job.fails, Job.nonsense, Job.lose, Job.lose,
    ),
    HALF: (Job.lose,),
    STREAM: (
        Job.say, Job.say, Job.say_much, Job.last_words, Job.last_words, Job.finish_only, Job.say_half_an_event,
        Job.say_what_nobody_understands,
        Job.breaks_off, Job.breaks_off_for_good, Job.breaks_off_unexplained, Job.says_so_and_stops, Job.bad_framing,
        Job.finish_untold, Job.lose, Job.lose,
    ),
    SAID: (Job.finish, Job.finish, Job.finish_untold, Job.breaks_off, Job.lose),
}  # fmt: skip


SCRIPTS: tuple[tuple[Step, ...], ...] = (
    (Job.begin, Job.say),
    (Job.begin, Job.say, Job.lose),
    (Job.begin, Job.say, Job.breaks_off),
    (Job.begin, Job.say_much, Job.lose),
    (Job.begin, Job.say_half_an_event, Job.lose),
    (Job.begin, Job.finish_only, Job.lose),
    (Job.begin, Job.lose),
    (Job.begin, Job.say, Job.last_words),
    (Job.begin, Job.say, Job.last_words, Job.finish),
    (Job.half, Job.lose),
    (Job.half_a_head, Job.lose),
    (Job.busy,),
    (Job.loses_its_engine,),
    (Job.fails_on_it,),
    (Job.does_not_support_it,),
    (Job.lose,),
    (Job.whole,),
)
"""What often happens one after the other."""
REFLEXES: tuple[Step | None, ...] = (
    None,
    None,
    None,
    Job.begin,
    Job.busy,
    Job.loses_its_engine,
    Job.does_not_support_it,
    Job.lose,
    Job.complete,
)
"""What a replica does with every request at once."""


class Node:
    """A replica: a `Host`."""

    def __init__(
        self, loop: VirtualLoop, replica: Replica, model: str, capacity: int, number: "Callable[[], int]"
    ) -> None:
        self._loop = loop
        self.next_number = number
        self._pipes: dict[Pipe, None] = {}
        self.replica = replica
        self.model = model
        self.capacity = capacity
        self.reach = "open"
        self.mode: str = "honest"
        self.reflex: Step | None = None
        self.jobs: dict[Pipe, Job] = {}
        self.seen: list[Job] = []
        self.held: dict[int, None] = {}
        """The blocks in its prefix cache, in the order in which they came there."""
        self.forgot = 0
        self.lied = False

    def accepted(self, pipe: Pipe) -> None:
        self._pipes[pipe] = None

    def closed(self, pipe: Pipe) -> None:
        self._pipes.pop(pipe, None)
        self.jobs.pop(pipe, None)

    def received(self, pipe: Pipe, data: bytes) -> None:
        if data.startswith(b"GET /load"):
            if self.mode != "mute":
                self._loop.call_soon(self._report, pipe, data)
            return
        assert pipe not in self.jobs, "a request on a connection that is not free"
        job = self.jobs[pipe] = Job(self, pipe, data)
        assert job.model == self.model
        self.seen.append(job)
        if self.reflex is not None:
            self._loop.call_soon(job.do, self.reflex)

    def crash(self) -> None:
        """Every connection is lost, and there are no new ones."""
        self.reach = "refused"
        for pipe in list(self._pipes):
            self.closed(pipe)
            pipe.cut()

    def reads(self, prompt: tuple[int, ...]) -> None:
        """A prompt comes into its prefix cache."""
        self.held.update(dict.fromkeys(prompt))

    @property
    def change(self) -> int:
        """Number of the last change of its prefix cache."""
        return 1 + self.forgot + len(self.held)

    def _news(self, since: int) -> BlockNews:
        if self.mode == "forgetful":
            self.forgot += len(self.held) + 1
            self.held.clear()
        elif self.mode == "lying about its cache":
            self.lied = True
            return BlockNews(self.change, since == 0, estimated=False, stored=(-1,))
        known = since - 1 - self.forgot
        reset = known < 0 or since == 0
        stored = tuple(self.held)[0 if reset else known :]
        return BlockNews(self.change, reset, self.mode == "unsure of its cache", stored)

    def _report(self, pipe: Pipe, request: bytes) -> None:
        report = self.report()
        since = request.partition(b"blocks_since=")[2].partition(b" ")[0]
        if since:
            report = replace(report, blocks=self._news(int(since)))
        self.lied |= bool(since) and self.mode == "garbage"
        body = b"[]" if self.mode == "garbage" else msgspec.json.encode(report)
        pipe.deliver(b"HTTP/1.1 200 x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def report(self) -> LoadReport:
        """What it says of itself."""
        who, mode, running = self.replica, self.mode, len(self.jobs)
        true = LoadReport(
            who.id, who.generation, self.model, who.revision, ReplicaState.READY, in_flight=running, running=running,
            waiting=running, capacity=self.capacity, kv_total_tokens=4000, kv_used_tokens=10 * running,
        )  # fmt: skip
        changes: dict[str, dict[str, object]] = {
            "busy": {"in_flight": running + 2},
            "full": {"in_flight": 1000},
            "stalled": {"stalled_s": 5.0},
            "stranger": {"generation": who.generation + 7},
            "unlimited": {"capacity": 0},
            "single": {"capacity": 1},
        }
        if mode in list(ReplicaState):
            return replace(true, state=ReplicaState(mode))
        return replace(true, **changes.get(mode, {}))  # type: ignore[arg-type]
