"""Streams of events: any split hands on the same bytes and only whole events, and the text is remembered."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.protocol import TokenLogprob
from forebay.wire.openai_answer import ChatAnswer, CompletionAnswer, Head
from forebay.wire.transcript import HELD_BYTES_MAX, Said, Transcript, last_data

LF = (b"data: 1\n\n", b"event: x\ndata: two\ndata: lines\n\n", b": comment\n\n")
streams = st.lists(st.sampled_from(LF), max_size=8) | st.lists(st.just(b"data: crlf\r\n\r\n"), max_size=8)


@given(streams, st.lists(st.integers(0, 200), max_size=8))
def test_every_split_hands_on_the_same_whole_events(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events)
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    transcript = Transcript()
    out = b""
    for start, end in pairwise(marks):
        piece = transcript.feed(data[start:end])
        assert piece == b"" or piece.endswith((b"\n\n", b"\r\n\r\n"))
        out += piece
    assert (out, transcript.held, transcript.events) == (data, b"", len(events))


def test_an_unfinished_event_is_held() -> None:
    transcript = Transcript()
    assert transcript.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert transcript.held == b"data: 2\n"
    assert transcript.feed(b"\ndata") == b"data: 2\n\n"
    assert (transcript.held, transcript.events, transcript.open) == (b"data", 2, False)


def test_an_endless_event_is_passed_on_in_pieces() -> None:
    transcript = Transcript()
    large = b"data: " + b"x" * HELD_BYTES_MAX
    assert transcript.feed(large) == large
    assert transcript.open
    assert transcript.feed(b"\n\n") == b"\n\n"
    assert not transcript.open


def test_the_last_data_of_whole_events_is_found() -> None:
    assert last_data(b'data: 1\n\ndata: {"error":1}\n\n') == b'{"error":1}'
    assert last_data(b"data:x\r\n\r\n") == b"x"
    assert last_data(b"") == b""


HEAD = Head("chatcmpl-1", 7, "chat", "r-1")
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), max_size=60)


def stream(words: list[str], *, chat: bool) -> Iterator[bytes]:
    """The events of an answer up to its last word."""
    chunks = (ChatAnswer if chat else CompletionAnswer)(HEAD, stream=True, include_usage=True)
    yield chunks.opening(0)
    for word in words:
        yield chunks.delta(0, word)


def told(*events: bytes) -> Transcript:
    """A transcript of these."""
    transcript = Transcript()
    for event in events:
        assert transcript.feed(event) == event
    return transcript


@given(texts, st.booleans(), st.integers(1, 7))
def test_the_text_is_remembered_however_events_are_glued(words: list[str], chat: bool, glued: int) -> None:
    events = [each for each in stream(words, chat=chat) if each]
    reads = [b"".join(events[at : at + glued]) for at in range(0, len(events), glued)]
    transcript = told(*reads)
    said = transcript.said()
    if not events:  # a completion without a word has not even an id
        assert said is None
        return
    assert said == Said("chatcmpl-1", 7, "".join(words).encode(), finished=False)
    assert transcript.events == len(events)


def test_text_that_looks_like_events_is_text() -> None:
    words = ['"', "\n\n", '"},"logprobs":null', "data: [DONE]\n\n", "\\", "é", "𝄞", '{"error":'] * 9
    said = told(*stream(words, chat=True)).said()
    assert said is not None
    assert said.text.decode() == "".join(words)


def test_a_log_probability_beside_the_text_does_not_hide_it() -> None:
    chunks = ChatAnswer(HEAD, stream=True)
    said = told(*(chunks.delta(0, str(n), [TokenLogprob(str(n), -0.5, (48,))]) for n in range(40))).said()
    assert said is not None
    assert said.text.decode() == "".join(map(str, range(40)))


def test_a_text_that_is_complete_is_known_to_be() -> None:
    chunks = ChatAnswer(HEAD, stream=True)
    said = told(*stream(["a"], chat=True), chunks.finish(0, "stop")).said()
    assert said == Said("chatcmpl-1", 7, b"a", finished=True)


@pytest.mark.parametrize(
    "event",
    [
        b"data: {\n\n",
        b'data: {"id":"x"}\n\n',
        b'data: {"id":"x","created":1,"choices":[{"index":1,"delta":{"content":"a"}}]}\n\n',
        b'data: {"id":"x","created":1,"choices":[{"index":0,"delta":{"tool_calls":[{}]}}]}\n\n',
        b'data: {"id":"x","created":1,"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n',
        b"data: \xff\n\n",
    ],
)
def test_what_is_not_one_text_cannot_be_resumed(event: bytes) -> None:
    assert told(*stream(["a"] * 20, chat=True), event).said() is None


def test_what_was_held_back_was_not_said() -> None:
    transcript = told(*stream(["a"], chat=True))
    assert transcript.feed(b'data: {"id"') == b""
    said = transcript.said()
    assert said is not None
    assert said.text == b"a"
    assert transcript.held == b""


def test_the_memory_of_a_stream_is_little_more_than_its_text() -> None:
    words = ["word "] * 4000
    transcript = told(*stream(words, chat=True))
    assert transcript.bytes_held <= 1.2 * len("".join(words))


def test_a_very_long_answer_is_relayed_but_not_remembered() -> None:
    words = ["x" * 100_000] * 60
    transcript = told(*stream(words, chat=True))
    assert transcript.said() is None
    assert transcript.bytes_held == 0
