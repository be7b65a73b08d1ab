"""A lost stream of Messages or Responses goes on elsewhere; its client reads the bytes of an undisturbed one."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.gateway.rig import EVENT_STREAM, Worker, chat, cluster, failing, post
from tests.net.rig import peer, run, until

from forebay.net.server import Exchange, Handler
from forebay.wire.apis.messages_answer import MessagesAnswer
from forebay.wire.apis.responses_answer import ResponsesAnswer
from forebay.wire.openai_answer import Head, Usage

MESSAGES, RESPONSES = b"/v1/messages", b"/v1/responses"
WORDS = tuple(f" wörd{n}\n" for n in range(24))
ALL = 999
BOTH = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])


class Story:
    """Tells WORDS; `cuts`: the events after which it dies in the middle of the next one, one for each attempt."""

    def __init__(self, *cuts: int, how: str = "abort") -> None:
        self.cuts: Iterator[int] = itertools.chain(cuts, itertools.repeat(ALL))
        self.how = how
        self.seams: list[tuple[int, int]] = []
        """Words and events that the client had at the beginning of each attempt."""

    def __call__(self, exchange: Exchange) -> None:
        head, said, sent = Head("resp-first", 17, "chat", "r1"), "", 0
        seam = exchange.header(b"x-forebay-continue")
        if seam is not None:
            id, created, size, events = seam.decode().split(",")
            said, sent = exchange.body[len(exchange.body) - int(size) :].decode(), int(events)
            head = Head(id, int(created), "chat", "r1")
        begun = next(n for n in range(len(WORDS) + 1) if "".join(WORDS[:n]) == said)
        self.seams.append((begun, sent))
        rest = list(stream_events(exchange.target, head, begun, sent))
        end = next(self.cuts)
        exchange.start(200, [EVENT_STREAM])
        exchange.write(b"".join(rest[:end]))
        if end >= len(rest):
            exchange.end([(b"x-forebay-usage", b"7,24,")])
            return
        exchange.write(rest[end][:-9])
        if self.how == "abort":
            exchange.abort()
        else:
            exchange.end([(b"x-forebay-error", self.how.encode())])


def stream_events(path: bytes, head: Head, begun: int = 0, sent: int = 0) -> Iterator[bytes]:
    """The events of the answer from `begun` words and `sent` events on."""
    said = "".join(WORDS[:begun])
    voice = MessagesAnswer(head, sent) if path == MESSAGES else ResponsesAnswer(head, "msg-1", {}, said, sent)
    texts = voice.opening(0) + b"".join(voice.delta(0, word) for word in WORDS[begun:])
    for event in (texts + voice.finish(0, "stop", None) + voice.end(Usage(7, 24))).split(b"\n\n")[:-1]:
        yield event + b"\n\n"


def undisturbed(path: bytes) -> bytes:
    """The whole stream."""
    return b"".join(stream_events(path, Head("resp-first", 17, "chat", "r1")))


@BOTH
@pytest.mark.parametrize(
    ("cuts", "how"),
    [
        ((1,), "abort"),
        ((2,), "engine_failed"),
        ((3,), "abort"),
        ((4,), "abort"),
        ((23,), "engine_failed"),
        ((1, 1, 1, 1, 1, 2, 5), "abort"),
        ((26,), "abort"),
        ((27,), "abort"),
        ((28,), "engine_failed"),
        ((29,), "abort"),
        ((30,), "abort"),
        ((31,), "abort"),
    ],
)
def test_resumed_stream_equals_an_undisturbed_one_byte_for_byte(
    tmp_path: Path, path: bytes, cuts: tuple[int, ...], how: str
) -> None:
    story = Story(*cuts, how=how)

    async def main() -> None:
        workers = [Worker(story, f"chat-{n}") for n in range(4)]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            answer = await front.ask(post(chat(stream=True), path))
            assert answer.body == undisturbed(path)
            lost = len(story.seams) - 1
            assert lost == len([cut for cut in cuts if cut < len(list(stream_events(path, Head("", 0, "", ""))))])
            reason = "lost" if how == "abort" else how
            assert await front.metric(f'forebay_resumes_total{{model="chat",reason="{reason}"}}') == lost
            assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 1
            assert await front.metric('forebay_prompt_tokens_total{model="chat"}') == 7
            assert await front.metric('forebay_completion_tokens_total{model="chat"}') == 24

    run(main())


@BOTH
@pytest.mark.parametrize("other", [failing(409, "not_resumable"), failing(400, "invalid_request")])
def test_a_stream_that_cannot_be_resumed_ends_with_one_error_event_of_its_api(
    tmp_path: Path, path: bytes, other: Handler
) -> None:
    async def main() -> None:
        workers = [Worker(Story(*[9] * 50), "chat-0"), Worker(other, "chat-1")]
        async with cluster(tmp_path, *workers) as front, peer(front.port) as client:
            await until(lambda: all(worker.polls for worker in workers))
            client.send(post(chat(stream=True), path))
            data = await client.rest()
            assert not data.endswith(b"0\r\n\r\n")
            events = data.count(b"event: ")
            name, document = data[data.rindex(b"event: ") :].split(b"\n")[:2]
            said = msgspec.json.decode(document.removeprefix(b"data: "))
            assert (name, said["type"]) == (b"event: error", "error")
            if path == RESPONSES:
                assert (said["code"], said["sequence_number"]) == ("stream_interrupted", events - 1)
            else:
                assert said["error"]["code"] == "stream_interrupted"
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


@BOTH
def test_stream_lost_before_its_first_whole_event_is_restarted_on_another_replica(
    tmp_path: Path, path: bytes
) -> None:
    story = Story(0)

    async def main() -> None:
        workers = [Worker(story, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front, peer(front.port) as client:
            client.send(post(chat(stream=True), path))
            assert (await client.answer()).body == undisturbed(path)
        assert story.seams == [(0, 0), (0, 0)]

    run(main())
