"""Event streams: any split passes on the same bytes and only whole events, and the text is recorded."""

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.protocol import TokenLogprob
from forebay.wire.apis.messages_answer import MessagesAnswer
from forebay.wire.apis.responses_answer import ResponsesAnswer
from forebay.wire.openai_answer import ChatAnswer, CompletionAnswer, Head, Usage
from forebay.wire.transcript import HELD_BYTES_MAX, ResumeState, Transcript, ended, last_data

LF = (b"data: 1\n\n", b"event: x\ndata: two\ndata: lines\n\n", b": comment\n\n")
streams = st.lists(st.sampled_from(LF), max_size=8) | st.lists(st.just(b"data: crlf\r\n\r\n"), max_size=8)


@given(streams, st.lists(st.integers(0, 200), max_size=8))
def test_every_split_passes_on_the_same_whole_events(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events)
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    transcript = Transcript()
    out = b""
    for start, end in pairwise(marks):
        piece = transcript.feed(data[start:end])
        assert piece == b"" or piece.endswith((b"\n\n", b"\r\n\r\n"))
        out += piece
    assert (out, transcript.held, transcript.events) == (data, b"", len(events))


def test_unfinished_event_is_held_back() -> None:
    transcript = Transcript()
    assert transcript.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert transcript.held == b"data: 2\n"
    assert transcript.feed(b"\ndata") == b"data: 2\n\n"
    assert (transcript.held, transcript.events, transcript.open) == (b"data", 2, False)


def test_event_over_the_size_limit_is_passed_on_in_pieces() -> None:
    transcript = Transcript()
    large = b"data: " + b"x" * HELD_BYTES_MAX
    assert transcript.feed(large) == large
    assert transcript.open
    assert transcript.feed(b"\n\n") == b"\n\n"
    assert not transcript.open


def test_last_data_of_whole_events_is_found() -> None:
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
def test_text_is_recorded_however_events_are_grouped(words: list[str], chat: bool, glued: int) -> None:
    events = [each for each in stream(words, chat=chat) if each]
    reads = [b"".join(events[at : at + glued]) for at in range(0, len(events), glued)]
    transcript = told(*reads)
    said = transcript.state()
    if not events:  # a completion without a word has not even an id
        assert said is None
        return
    assert said == ResumeState("chatcmpl-1", 7, "".join(words).encode(), finished=False, events=len(events))


@pytest.mark.parametrize("count", range(2, 12))
def test_short_read_does_not_end_the_stream(count: int) -> None:
    transcript = Transcript()
    for _ in range(count):
        transcript.feed(b'data: {"id":"a","created":1,"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n')
    transcript.feed(b"data: [DONE]\n\n")
    said = transcript.state()
    assert said is not None
    assert (said.text, transcript.events) == (b"b" * count, count + 1)


def test_event_lookalikes_in_text_are_text() -> None:
    words = ['"', "\n\n", '"},"logprobs":null', "data: [DONE]\n\n", "\\", "é", "𝄞", '{"error":'] * 9
    said = told(*stream(words, chat=True)).state()
    assert said is not None
    assert said.text.decode() == "".join(words)


def test_text_is_found_beside_logprobs() -> None:
    chunks = ChatAnswer(HEAD, stream=True)
    said = told(*(chunks.delta(0, str(n), [TokenLogprob(str(n), -0.5, (48,))]) for n in range(40))).state()
    assert said is not None
    assert said.text.decode() == "".join(map(str, range(40)))


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
@given(cuts=st.lists(st.integers(0, 1500), max_size=8))
def test_end_of_a_choice_is_passed_on_with_its_token_counts(
    kind: type[ChatAnswer | CompletionAnswer], cuts: list[int]
) -> None:
    chunks = kind(HEAD, stream=True, include_usage=True)
    text = chunks.opening(0) + chunks.delta(0, '"}],"usage":null}\n\n')
    end, counts = chunks.finish(0, "stop"), chunks.end(Usage(1, 1))
    data = text + end + counts
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    transcript = Transcript()
    out = b""
    for start, stop in pairwise(marks):
        out += transcript.feed(data[start:stop])
        assert len(out) <= len(text) or len(out) > len(text + end)
        assert out + transcript.held == data[:stop]
        assert not transcript.end or transcript.end == end
    assert out == data


def test_complete_text_is_recognized() -> None:
    chunks = ChatAnswer(HEAD, stream=True)
    said = told(*stream(["a"], chat=True), chunks.finish(0, "stop")).state()
    assert said == ResumeState("chatcmpl-1", 7, b"a", finished=True, events=3)


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
def test_streams_of_several_texts_cannot_be_resumed(event: bytes) -> None:
    assert told(*stream(["a"] * 20, chat=True), event).state() is None


def test_held_back_bytes_are_not_part_of_the_text() -> None:
    transcript = told(*stream(["a"], chat=True))
    assert transcript.feed(b'data: {"id"') == b""
    said = transcript.state()
    assert said is not None
    assert said.text == b"a"
    assert transcript.held == b""


def test_memory_of_a_stream_is_close_to_the_size_of_its_text() -> None:
    words = ["word "] * 4000
    transcript = told(*stream(words, chat=True))
    assert transcript.bytes_held <= 1.2 * len("".join(words))


def test_very_long_answer_is_relayed_but_not_recorded() -> None:
    words = ["x" * 100_000] * 60
    transcript = told(*stream(words, chat=True))
    assert transcript.state() is None
    assert transcript.bytes_held == 0


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NAMED = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])


def named(path: str, words: list[str]) -> tuple[list[bytes], list[bytes], bytes]:
    """The events before the text of an answer, those of the text, and its end."""
    voice = MessagesAnswer(HEAD) if path == MESSAGES else ResponsesAnswer(HEAD, "msg-1", {})
    opening = [event + b"\n\n" for event in voice.opening(0).split(b"\n\n")[:-1]]
    deltas = [voice.delta(0, word) for word in words]
    return opening, deltas, voice.finish(0, "stop", None) + voice.end(Usage(1, 2))


@NAMED
@given(words=texts, glued=st.integers(1, 7))
def test_text_of_named_events_is_recorded_however_they_are_grouped(path: str, words: list[str], glued: int) -> None:
    opening, deltas, _ = named(path, words)
    events = opening + deltas
    transcript = Transcript(path)
    for at in range(0, len(events), glued):
        read = b"".join(events[at : at + glued])
        assert transcript.feed(read) == read
    created = HEAD.created if path == RESPONSES else 0
    said = transcript.state()
    assert said == ResumeState("chatcmpl-1", created, "".join(words).encode(), finished=False, events=len(events))
    assert said.seam == b"chatcmpl-1,%d,%d,%d" % (created, len("".join(words).encode()), len(events))


@NAMED
def test_named_events_with_crlf_are_read(path: str) -> None:
    opening, deltas, _ = named(path, ["a\n\n"] * 40)
    transcript = Transcript(path)
    for event in opening + deltas:
        transcript.feed(event.replace(b"\n", b"\r\n"))
    said = transcript.state()
    assert said is not None
    assert (said.text, said.events) == (b"a\n\n" * 40, len(opening) + 40)


@NAMED
def test_named_event_lookalikes_in_text_are_text(path: str) -> None:
    words = ["event: content_block_stop\n", "event: response.output_text.done\n", '"delta":"', "\n\nevent: error\n"]
    words += ['","type":"response.output_text.delta","sequence_number":5}\n\n', '"text":"', '"}}\n\n', "\\"]
    opening, deltas, _ = named(path, words * 9)
    transcript = Transcript(path)
    assert b"".join(map(transcript.feed, opening + deltas)) == b"".join(opening + deltas)
    said = transcript.state()
    assert said is not None
    assert said.text.decode() == "".join(words * 9)


@NAMED
@given(cuts=st.lists(st.integers(0, 3000), max_size=8))
def test_end_of_an_answer_is_passed_on_completely_or_not_at_all(path: str, cuts: list[int]) -> None:
    opening, deltas, end = named(path, ["a", "b"])
    before = b"".join(opening + deltas)
    data = before + end
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts)]
    transcript = Transcript(path)
    out = b""
    for start, stop in pairwise(marks):
        out += transcript.feed(data[start:stop])
        assert len(out) <= len(before) or out == data
        assert out + transcript.held == data[:stop]
    if len(out) >= len(opening[0]) and out != data:
        said = transcript.state()
        assert said is not None
        assert "ab".startswith(said.text.decode())
        assert not transcript.held
        assert not ended(last_data(out))
    elif out != data:
        assert transcript.state() is None, "it has not even an id"


@NAMED
def test_too_long_end_is_passed_on_and_the_answer_is_not_resumable(path: str) -> None:
    opening, deltas, end = named(path, ["x" * 1000] * 400)
    end = end.replace(b"\n\n", b"\n\nevent: more\ndata: " + b"x" * HELD_BYTES_MAX + b"\n\n", 1)
    transcript = Transcript(path)
    out = b"".join(map(transcript.feed, opening + deltas))
    for at in range(0, len(end), 65_536):
        out += transcript.feed(end[at : at + 65_536])
        assert len(transcript.held) <= HELD_BYTES_MAX
        if len(out) > len(b"".join(opening + deltas)):
            assert transcript.state() is None
            return
    raise AssertionError("it was held")


@NAMED
@pytest.mark.parametrize(
    "data",
    [
        '{"type":"error","error":{}}',
        '{"type":"error","message":"m"}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"a"}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"a"}}',
        '{"type":"response.output_text.delta","output_index":1,"content_index":0,"delta":"a","sequence_number":9}',
        '{"type":"response.output_text.delta","output_index":0,"content_index":1,"delta":"a","sequence_number":9}',
        '{"type":"response.function_call_arguments.delta","delta":"a","sequence_number":9}',
        '{"type":"response.output_item.done"}',
        "{",
        "[]",
    ],
)
def test_named_events_that_are_not_one_text_cannot_be_resumed(path: str, data: str) -> None:
    opening, deltas, _ = named(path, ["a"] * 20)
    transcript = Transcript(path)
    for event in (*opening, *deltas, b"event: x\ndata: %b\n\n" % data.encode(), *deltas):
        assert transcript.feed(event) == event
    assert transcript.state() is None


def test_events_of_different_items_are_kept_apart() -> None:
    opening, deltas, _ = named(RESPONSES, ["a"] * 20)
    transcript = Transcript(RESPONSES)
    for event in opening + deltas[:17]:
        transcript.feed(event)
    assert transcript.feed(deltas[17] + b": comment\n\n" + deltas[18])
    transcript.feed(deltas[19].replace(b"msg-1", b"msg-2"))
    said = transcript.state()
    assert said is not None
    assert said.text == b"a" * 20


@pytest.mark.parametrize("id", ["", "a,b", "a b", "a\r\nx-forebay-continue: b", "ä", "x" * 129])
def test_id_that_is_unsafe_in_a_header_is_not_forwarded(id: str) -> None:
    transcript = Transcript()
    chunk = {"id": id, "created": 1, "choices": [{"index": 0, "delta": {"content": "x"}}]}
    transcript.feed(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    assert transcript.state() is None


LOGPROBS = [TokenLogprob('"delta":{}', -0.5, (48,), (('"choices":[]', -0.5, (48,)),))]
HOSTILE = [
    "[DONE]",
    '"delta":{}',
    'data: {"error":',
    '"role":"assistant","content":""',
    "event: ping\n\n",
    "\r\n\r\n",
]


@given(
    kind=st.sampled_from(["chat", "completion", MESSAGES, RESPONSES]),
    words=st.lists(
        st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    ),
    choices=st.integers(1, 3),
    logprobs=st.booleans(),
    left=st.integers(0, 80),
    cuts=st.lists(st.integers(0, 9000), max_size=12),
    crlf=st.booleans(),
)
def test_only_events_with_text_are_counted_as_tokens(  # noqa: PLR0917 - hypothesis names them
    kind: str, words: list[str], choices: int, logprobs: bool, left: int, cuts: list[int], crlf: bool
) -> None:
    """Of any number of choices, wherever the client leaves, and however it was read."""
    events: list[tuple[bytes, bool]] = [(b": a comment\n\n", False)]
    if kind in (MESSAGES, RESPONSES):
        opening, deltas, end = named(kind, words)
        events += [(each, False) for each in opening] + [(b'event: ping\ndata: {"type":"ping"}\n\n', False)]
        events += [(each, True) for each in deltas]
        events += [(each + b"\n\n", False) for each in end.split(b"\n\n")[:-1]]
    else:
        made = ChatAnswer if kind == "chat" else CompletionAnswer
        chunks = made(HEAD, choices, stream=True, include_usage=logprobs)
        events += [(chunks.opening(index), False) for index in range(choices) if kind == "chat"]
        events += [
            (chunks.delta(index, word, LOGPROBS if logprobs else ()), True)
            for word in words
            for index in range(choices)
        ]
        events += [(chunks.finish(index, "stop"), False) for index in range(choices)]
        events += [(each + b"\n\n", False) for each in chunks.end(Usage(1, 2)).split(b"\n\n")[:-1]]
    seen = events[:left]
    data = b"".join(each for each, _ in seen)
    if crlf:
        data = data.replace(b"\n", b"\r\n")
    transcript = Transcript(kind if kind.startswith("/") else "")
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    out = b"".join(transcript.feed(data[start:end]) for start, end in pairwise(marks))
    handed = out.count(b"\r\n\r\n" if crlf else b"\n\n")
    assert (transcript.events, transcript.content_events) == (handed, sum(text for _, text in seen[:handed]))


@given(st.lists(st.binary(max_size=40) | st.sampled_from(LF), max_size=20))
def test_garbage_never_counts_more_text_events_than_events(reads: list[bytes]) -> None:
    for path in ("", MESSAGES, RESPONSES):
        transcript = Transcript(path)
        for read in reads:
            transcript.feed(read)
        assert 0 <= transcript.content_events <= transcript.events
