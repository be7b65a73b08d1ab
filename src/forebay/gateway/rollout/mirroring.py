"""Mirrored requests: copies for the canary whose responses are only compared and counted.

A copy is sent after the original. Nothing waits for it, no load or account includes it, and it is cancelled as soon
as a real request needs its slot.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from forebay.core.deploy.answers import degenerate, refuses
from forebay.core.deploy.samples import PAIR_CHARS_MAX, Pair, Sample
from forebay.core.deploy.scoring import alike
from forebay.core.errors import OK, Code
from forebay.core.model import Split
from forebay.core.resilience import Outcome, State, outcome_of
from forebay.core.rollout.sides import side_of
from forebay.core.rollout.values import Arm, stratum_of
from forebay.gateway.account import UNREPORTED, usage
from forebay.gateway.requests.relay import OBJECT_ENDS
from forebay.gateway.tensor.answers import CODES, code_in, code_of, is_retryable
from forebay.net.client import CallError, Header
from forebay.net.replica_protocol import ERROR, USAGE
from forebay.obs.clock import wall_s
from forebay.wire.apis import texts
from forebay.wire.apis.vectors import Vectors, embedded
from forebay.wire.transcript import Transcript, ended, last_data

if TYPE_CHECKING:
    from forebay.gateway.link import Link
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

EMBEDDINGS: Final = "/v1/embeddings"
COPIED: Final = frozenset({"/v1/chat/completions", "/v1/completions", EMBEDDINGS})
"""Paths of requests without side effects."""
MIRRORS_MAX: Final = 8
"""Maximum in flight at one replica."""
MIRROR_S_MAX: Final = 120.0
"""Timeout: no client waits, and a slower response says little and holds a slot."""
ANSWER_BYTES_MAX: Final = 1024 * 1024
"""Of a longer response only the outcome is reported."""
VECTORS_BYTES_MAX: Final = 256 * 1024
"""The same for responses with vectors: this much is parsed in half a millisecond."""


class Mirror:
    """One copy in flight, the sink of its response."""

    __slots__ = (
        "_body",
        "_call",
        "_canary",
        "_counters",
        "_early",
        "_link",
        "_path",
        "_question",
        "_rejected",
        "_rollout",
        "_scheduler",
        "_size",
        "_stable",
        "_status",
        "_stratum",
        "_timer",
        "_transcript",
        "_usage",
    )  # fmt: skip

    def __init__(self, scheduler: "Scheduler", relay: "Relay", link: "Link", split: Split) -> None:
        served = relay.served
        self._scheduler = scheduler
        self._link = link
        self._rollout = split.rollout
        self._early = wall_s() < split.counts_from
        self._stratum = stratum_of(int(served.lengths.tokens(relay.prompt_bytes)))
        self._counters = served.account.mirrored
        self._path = relay.path
        self._question = relay.request
        self._status = 0
        self._size = 0
        self._body: list[bytes] = []
        self._transcript: Transcript | None = None
        self._rejected = False
        self._usage = UNREPORTED
        self._stable: str | Vectors | None = None
        self._canary: str | Vectors | None = None
        link.mirrors[self] = None
        self._timer = asyncio.get_running_loop().call_later(MIRROR_S_MAX, self._stop, "late")
        self._call = link.pool.call(relay.request, self)

    def cancel(self) -> None:
        """Cancel it: a real request needs its slot, or the gateway stops."""
        self._stop("gave_way")

    def stable_said(self, answer: str | Vectors) -> Pair | None:
        """The original succeeded. Returns both answers if the copy's is there too."""
        self._stable = answer
        return self._pair()

    # --- sink of the response

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        self._rejected = is_retryable(status, headers)
        for name, value in headers:
            if name == USAGE:
                self._usage = usage(value)
            elif name == b"content-type" and value.startswith(b"text/event-stream"):
                self._transcript = Transcript(self._path)

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._transcript is not None:
            self._transcript.feed(data)
        elif self._size <= ANSWER_BYTES_MAX:
            self._body.append(data)

    def on_end(self, trailers: list[Header]) -> None:
        error = ""
        for name, value in trailers:
            if name == USAGE:
                self._usage = usage(value)
            elif name == ERROR:
                error = value.decode("latin-1")
        if error:
            self._ended(error if error in CODES else Code.STREAM_INTERRUPTED.value)
        elif self._transcript is not None:
            transcript = self._transcript
            whole = ended(last_data(transcript.held or transcript.last))
            self._ended(OK if whole else Code.STREAM_INTERRUPTED.value)
        else:
            body = b"".join(self._body)
            if self._status >= 400:
                self._ended(code_in(body, code_of(self._status)))
            elif self._size <= ANSWER_BYTES_MAX and not body.endswith(OBJECT_ENDS):
                self._ended(Code.REPLICA_LOST.value)
            else:
                self._ended(OK)

    def on_error(self, error: CallError) -> None:
        self._ended(Code.REPLICA_LOST.value)

    # --- internal

    def _stop(self, outcome: str) -> None:
        self._call.cancel()
        self._leave(outcome)

    def _leave(self, outcome: str) -> None:
        self._timer.cancel()
        self._link.mirrors.pop(self, None)
        self._counters(outcome).inc()

    def _ended(self, code: str) -> None:
        if self._rejected and (code == OK or outcome_of(Code(code)) is not Outcome.FAILED):
            self._leave("no_room")
            return
        if code != OK and self._link.retired:  # it was cancelled
            self._leave("gave_way")
            return
        self._leave("ok" if code == OK else "failed")
        answer = self._answer() if code == OK else None
        text = answer if isinstance(answer, str) else None
        sample = Sample(
            self._rollout, Arm.CANARY, wall_s(), code, self._stratum, output_tokens=self._usage[1],
            refused=None if text is None else refuses(text), degenerate=None if text is None else degenerate(text),
            early=self._early,
        )  # fmt: skip
        self._canary = answer
        self._scheduler.observations.note(sample, self._pair())

    def _answer(self) -> str | Vectors | None:
        if self._transcript is not None:
            what = self._transcript.state()
            return what.text.decode() if what is not None else None
        return answer_in(self._path, self._body) if self._size <= ANSWER_BYTES_MAX else None

    def _pair(self) -> Pair | None:
        stable, canary = self._stable, self._canary
        if self._early:
            return None
        if isinstance(stable, list) and isinstance(canary, list):
            return Pair(self._rollout, self._stratum, "", "", "", alike=alike(stable, canary)) if stable else None
        if not (isinstance(stable, str) and isinstance(canary, str)):
            return None
        question = texts.prompt(self._question.partition(b"\r\n\r\n")[2])
        longest = max(len(stable), len(canary), len(question.schema))
        schema = question.schema if longest <= PAIR_CHARS_MAX else ""  # a truncated text matches no schema
        asked, stable, canary = (text[:PAIR_CHARS_MAX] for text in (question.text, stable, canary))
        return Pair(self._rollout, self._stratum, asked, stable, canary, schema)


def answer_in(path: str, body: list[bytes]) -> str | Vectors | None:
    """The content of a complete response: its text, or its vectors (none if it is malformed); None: unknown."""
    whole = b"".join(body)
    if path != EMBEDDINGS:
        return texts.response_text(whole)
    return embedded(whole) if len(whole) <= VECTORS_BYTES_MAX else None


def begin_mirror(scheduler: "Scheduler", relay: "Relay", split: Split) -> Mirror | None:
    """Send a copy of a request to the canary, if it is sampled for that and there is room."""
    served = relay.served
    drawn = f"mirror {relay.request_id.decode('latin-1')}"
    if relay.path not in COPIED or side_of(drawn, split.rollout, split.mirrored) is not Arm.CANARY:
        return None
    able = [x for x in served.links if x.revision == split.canary and x.live and x.breaker.state is State.CLOSED]
    able = [x for x in able if len(x.mirrors) < min(MIRRORS_MAX, x.places - x.load)]
    if not able:
        served.account.mirrored("no_room").inc()
        return None
    return Mirror(scheduler, relay, min(able, key=lambda x: (x.load + len(x.mirrors), x.id)), split)
