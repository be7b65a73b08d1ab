"""A gateway before a replica that answers with anything: every client gets an end, and nothing stays on account."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.corpus import DEEP, json_bytes, mutated
from tests.gateway.rig import Worker, chat, cluster, post
from tests.net.memory import ANSWERS
from tests.net.rig import peer, run

from forebay.core.errors import Code
from forebay.net.server import Exchange
from forebay.wire.errors import error_event, error_object
from forebay.wire.openai_answer import ChatAnswer, Head, Usage

ERRORS = [error_object(Code.OVERLOADED), error_object(Code.ENGINE_FAILED), error_object(Code.INVALID_REQUEST)]
VOICE = ChatAnswer(Head("chatcmpl-1", 7, "chat", "r-1"), stream=True)
EVENTS = (
    VOICE.opening(0) + VOICE.delta(0, "he") + VOICE.delta(0, "llo"),
    VOICE.finish(0, "stop") + VOICE.end(Usage(1, 2)),
    error_event(Code.ENGINE_FAILED),
    b'data: {"id":"x","created":1,"choices":' + b"[" * DEEP + b"\n\n",
)
HEADS = tuple(
    b"HTTP/1.1 " + head + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    for head in (
        b"200 OK\r\ncontent-type: text/event-stream",
        b"200 OK\r\ncontent-type: application/json\r\nx-forebay-usage: 7,-3,2",
        b"503 Busy\r\nx-forebay-retryable: 1",
        b"500 Bad",
        b"429 Slow",
    )
)
ENDS = (b"0\r\n\r\n", b"0\r\nx-forebay-usage: 7,3,2\r\n\r\n", b"0\r\nx-forebay-error: engine_failed\r\n\r\n", b"",
        b"0\r\nx-forebay-error: \xff\r\nx-forebay-usage: ,,\r\n\r\n")  # fmt: skip
several = settings(max_examples=max(20, settings().max_examples // 4))
"""Each is a gateway of its own."""


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """The bytes of an answer, with a sound frame or without."""
    if draw(st.booleans()):
        return draw(mutated(ANSWERS))
    body = draw(mutated(EVENTS) | json_bytes(ERRORS, [code.value for code in Code]))
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return draw(st.sampled_from(HEADS)) + chunk + draw(st.sampled_from(ENDS))


@several
@given(st.lists(st.tuples(answers(), st.booleans()), min_size=1, max_size=4))
def test_any_answer_of_a_replica_ends_its_request(said: list[tuple[bytes, bool]]) -> None:
    left = [data for data, _ in said]

    def answer(exchange: Exchange) -> None:
        data = left.pop(0) if left else b"HTTP/1.1 500 Bad\r\ncontent-length: 0\r\n\r\n"
        exchange._line.send(data)
        exchange.abort()

    async def scenario(folder: Path) -> None:
        async with cluster(folder, Worker(answer=answer), retries_max=1, load_poll_s=0.01) as front:
            for _, stream in said:
                async with peer(front.port) as client:
                    client.send(post(chat(stream=stream), b"/v1/chat/completions", b"x-forebay-deadline-ms: 200"))
                    client.send(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                    assert (await client.rest()).startswith(b"HTTP/1.1 ")
            for name in ("in_flight", "queue_depth"):
                assert await front.metric(f'forebay_{name}{{model="chat"}}') == 0

    with tempfile.TemporaryDirectory() as folder:
        run(scenario(Path(folder)))
