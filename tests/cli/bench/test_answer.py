"""Response parsing: independent of how bytes are split, and robust against misbehaving servers."""

import json
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.bench.answer import EVENT_BYTES_MAX, Answer, error_code


def event(document: object) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def text(content: str) -> bytes:
    return event({"choices": [{"delta": {"content": content}}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5}})
ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
DONE = b"data: [DONE]\n\n"


class Heard:
    """Feeds an answer and notes how it ended; the clock counts 1, 2, 3, …"""

    def __init__(self, streaming: bool = True, status: int = 200) -> None:
        self.ends: list[str | None] = []
        ticks = count(1)
        self.answer = Answer(streaming, lambda: float(next(ticks)), self.ends.append)
        self.answer.on_head(status, [])

    def feed(self, *parts: bytes) -> "Heard":
        for part in parts:
            self.answer.on_body(part)
        return self

    def end(self) -> "Heard":
        self.answer.on_end([])
        return self


@given(st.lists(st.integers(0, 400), max_size=12), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_stream_parsing_is_independent_of_byte_splits(cuts: list[int], separator: bytes) -> None:
    stream = (ROLE + text("a") + text("b€") + text("c") + USAGE + DONE).replace(b"\n\n", separator)
    edges = [0, *sorted(min(c, len(stream)) for c in cuts), len(stream)]
    heard = Heard().feed(*(stream[a:b] for a, b in pairwise(edges))).end()

    assert heard.ends == [None]
    assert heard.answer.pieces == 3
    assert (heard.answer.prompt_tokens, heard.answer.output_tokens) == (11, 5)


def test_first_token_is_the_first_text_not_the_first_event() -> None:
    heard = Heard().feed(ROLE)
    assert heard.answer.first_s is None

    heard.feed(text("a"))
    first = heard.answer.first_s
    heard.feed(text("b"), DONE).end()

    assert first is not None
    assert heard.answer.first_s == first
    assert heard.answer.last_s is not None
    assert heard.answer.last_s > first


def test_completions_text_is_counted() -> None:
    assert Heard().feed(event({"choices": [{"text": "x"}]})).answer.pieces == 1


def test_stream_without_done_event_is_incomplete() -> None:
    assert Heard().feed(text("a")).end().ends == ["stream_incomplete"]


def test_an_error_event_fails_the_request_once() -> None:
    heard = Heard().feed(text("a"), event({"error": {"message": "gone", "code": "stream_interrupted"}}), DONE).end()

    assert heard.ends == ["stream_interrupted in stream"]


@pytest.mark.parametrize(
    "data", [b"data: {broken\n\n", b"data: []\n\n", b'data: {"choices": 5}\n\n', b"data: \xff\n\n"]
)
def test_invalid_event_fails_the_request(data: bytes) -> None:
    assert Heard().feed(data).ends == ["event_unreadable"]


def test_comments_and_other_fields_of_a_stream_are_skipped() -> None:
    assert Heard().feed(b": ping\n\n", b"event: x\ndata: [DONE]\n\n").end().ends == [None]


def test_event_over_the_size_limit_fails_the_request() -> None:
    heard = Heard().feed(b"data: " + b"x" * (EVENT_BYTES_MAX + 1))

    assert heard.ends == ["event_too_large"]


def test_usage_of_a_plain_answer_is_read() -> None:
    content = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}).encode()
    heard = Heard(streaming=False).feed(content[:10], content[10:]).end()

    assert heard.ends == [None]
    assert (heard.answer.prompt_tokens, heard.answer.output_tokens) == (3, 4)


def test_rejection_is_labelled_by_status_and_code() -> None:
    body = b'{"error": {"message": "full", "type": "rate_limit_error", "param": null, "code": "queue_full"}}'

    assert Heard(status=429).feed(body).end().ends == ["429 queue_full"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "500"),
        (b"<html>", "500"),
        (b'{"error": "text"}', "500"),
        (b'{"error": {"type": "server_error"}}', "500 server_error"),
        (b'{"error": {"code": 17}}', "500 17"),
    ],
)
def test_error_bodies_of_all_kinds_have_a_label(content: bytes, code: str) -> None:
    assert error_code(500, content) == code


def test_connection_loss_label_tells_whether_the_stream_had_begun() -> None:
    before, after = Heard(), Heard().feed(text("a"))
    before.answer.fail("connection_lost")
    after.answer.fail("connection_lost")

    assert before.ends == ["connection_lost"]
    assert after.ends == ["connection_lost in stream"]
