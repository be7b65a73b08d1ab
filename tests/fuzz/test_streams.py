"""Streams and expositions: any bytes, cut anywhere, hand on what came, and never more memory than stated."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.fuzz.corpus import cuts, mutated, pieces, survives

from forebay.obs.metrics import Metrics
from forebay.wire.frames import HEADER_BYTES, FrameReader, FrameTooLarge, frame
from forebay.wire.openai_answer import ChatAnswer, CompletionAnswer, Head, Usage
from forebay.wire.prometheus import check, together
from forebay.wire.transcript import HELD_BYTES_MAX, Transcript, ended, last_data

HEAD = Head("chatcmpl-1", 7, "chat", "r-1")


def answer(voice: ChatAnswer | CompletionAnswer, words: str) -> bytes:
    """A whole stream."""
    events = [voice.opening(0), *(voice.delta(0, word) for word in words), voice.finish(0, "stop")]
    return b"".join([*events, voice.end(Usage(1, len(words)))])


STREAMS = (
    answer(ChatAnswer(HEAD, stream=True), "hello"),
    answer(ChatAnswer(HEAD, stream=True, include_usage=True), 'é"\n𝄞'),
    answer(CompletionAnswer(HEAD, stream=True), "a long word that is cut to letters"),
    b": comment\n\nevent: x\ndata: 1\ndata: 2\n\n",
    b"data: 1\r\n\r\n",
)
EVENTS = (
    b"\n\n",
    b"\r\n\r\n",
    b"data: ",
    b"data: [DONE]\n\n",
    b'"content":"',
    b'{"id":"x","created":1,"choices":[]}',
)


def told(parts: list[bytes]) -> tuple[bytes, Transcript]:
    """What was handed on, and who remembers it."""
    transcript = Transcript()
    return b"".join([transcript.feed(part) for part in parts]), transcript


@given(mutated(STREAMS, EVENTS) | st.binary(max_size=300), cuts)
def test_any_stream_is_handed_on_as_it_came_for_every_split(data: bytes, at: list[int]) -> None:
    out, transcript = told(pieces(data, at))
    assert out + transcript.held == data
    assert len(transcript.held) <= HELD_BYTES_MAX
    assert not transcript.open
    assert isinstance(ended(last_data(transcript.last)), bool)
    transcript.state()
    assert transcript.bytes_held <= len(data)


@given(mutated(STREAMS[:3], EVENTS), cuts)
def test_any_stream_said_the_same_for_every_split(data: bytes, at: list[int]) -> None:
    _, whole = told([data])
    out, cut = told(pieces(data, at))
    if out == data[: len(data) - len(whole.held)]:
        assert cut.state() == whole.state()


FRAMES = tuple(frame(payload) for payload in (b"", b"x", b"hello" * 20))
FRAME_BYTES_MAX = 1000


@given(mutated(FRAMES, (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00")) | st.binary(max_size=100), cuts)
def test_any_frames_are_the_same_for_every_split_and_within_bounds(data: bytes, at: list[int]) -> None:
    def read(parts: list[bytes]) -> tuple[list[bytes], bool]:
        reader, found = FrameReader(FRAME_BYTES_MAX), []
        for part in parts:
            try:
                found += reader.feed(part)
            except FrameTooLarge:
                return found, False
        return found, True

    (whole, fine), (cut, cut_fine) = read([data]), read(pieces(data, at))
    assert cut_fine == fine
    assert cut[: len(whole)] == whole
    if fine:
        assert cut == whole
        assert data.startswith(b"".join(map(frame, whole)))
    assert all(len(payload) <= FRAME_BYTES_MAX for payload in cut)
    assert HEADER_BYTES == 4


def exposition() -> bytes:
    """What a gateway process says."""
    metrics = Metrics()
    metrics.counter("requests_total", 'odd "model"\\', "ok").inc(3)
    metrics.gauge("open_connections").set(2)
    metrics.histogram("ttft_seconds", "chat").observe(0.2)
    return metrics.render()


EXPOSITIONS = (exposition(), b'# HELP x words\n# TYPE x counter\nx_total{a="b"} 1 1600000000\n', b"y 1e3\n")
METRICS = (b"NaN", b"+Inf", b'{a="', b"}", b"# TYPE y histogram\n", b"# EOF\n", b"\\", b'y{le="1"} 2\n', b",", b"=")


@given(st.lists(mutated(EXPOSITIONS, METRICS), min_size=1, max_size=2))
def test_any_expositions_are_put_together_or_refused(texts: list[bytes]) -> None:
    decoded = [text.decode(errors="replace") for text in texts]
    whole = survives(partial(put_together, decoded), b"", ValueError)
    if whole is not None:
        assert list(text_string_to_metric_families(whole.decode())) is not None


def put_together(texts: list[str], _: bytes) -> bytes:
    for text in texts:
        check(text)
    return together(dict(zip("ab", texts, strict=False)), "gateway").encode()
