"""Parsing is independent of how bytes are split: same result, no exception, clean end. Damaged bytes: tests/fuzz."""

import asyncio
import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import cuts, pieces
from tests.net.memory import ANSWERS, REQUESTS, FakeOwner, Wire, ask, serve
from tests.net.rig import get, post, run

from forebay.net.connection import Connection

NESTED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    b"2\r\na\n\r\n2\r\nb\n\r\n1c\r\n5\r\nhello\r\nab\r\n\n\r\n3\r\nyou\r\nend\r\n3;e=1\r\nend\r\n0\r\n\r\n",
)
"""Head and body of an answer with chunks whose content looks like chunks."""


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=5), cuts, st.booleans())
def test_requests_are_the_same_for_every_split(requests: list[bytes], at: list[int], late: bool) -> None:
    data = b"".join(requests)
    whole, answer = serve([data], late=False)
    cut, cut_answer = serve(pieces(data, at), late)
    assert len(whole.seen) == len(requests)
    assert cut.seen == whole.seen
    assert cut_answer.sent == answer.sent


@given(st.sampled_from(REQUESTS))
def test_requests_are_the_same_byte_by_byte(request: bytes) -> None:
    assert serve([bytes([b]) for b in request], late=True)[0].seen == serve([request], late=False)[0].seen


@pytest.mark.parametrize("begun", [b"P", b"POST", b"POST ", b"\r\nPOST "])
def test_partial_request_behind_a_stream_survives_the_parser(begun: bytes) -> None:
    stream = post(b"x", target=b"/stream")
    assert [target for _, target, _ in serve([stream + begun, get(b"/a")], late=False)[0].seen] == [b"/stream"]
    rest = get(b"/a").replace(b"GET ", b"POST "[len(begun.strip(b"\r\n")) :])
    assert [target for _, target, _ in serve([stream + begun, rest], late=False)[0].seen] == [b"/stream", b"/a"]


def test_bytes_between_an_answer_and_the_next_request_keep_their_order() -> None:
    desk, wire = FakeOwner(late=True), Wire()

    async def main() -> None:
        connection = Connection(desk)
        connection.connection_made(cast(Any, wire))
        second = get(b"/b")
        connection.data_received(get(b"/a"))
        connection.data_received(second[:9])
        desk.answer()
        connection.data_received(second[9:])
        connection.quit()  # idle, but for what is to come
        assert [target for _, target, _ in desk.seen] == [b"/a"]
        await asyncio.sleep(0)
        assert [target for _, target, _ in desk.seen] == [b"/a", b"/b"]
        desk.answer()
        connection.connection_lost(None)

    run(main())
    assert wire.sent.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.interpreted
@given(st.sampled_from(ANSWERS), cuts)
def test_responses_are_the_same_for_every_split(answer: bytes, at: list[int]) -> None:
    whole, _, shelf = ask([answer])
    cut, _, cut_shelf = ask(pieces(answer, at))
    assert whole.error is None
    assert cut == whole
    assert cut_shelf.released == shelf.released


@pytest.mark.interpreted
def test_chunk_lookalikes_inside_a_chunk_are_data() -> None:
    head, body = NESTED
    whole, _, _ = ask([head + body])
    assert whole.body == b"a\nb\n5\r\nhello\r\nab\r\n\n\r\n3\r\nyou\r\nendend"
    for at in itertools.combinations(range(len(body) + 1), 2):
        cut, _, shelf = ask([head, *pieces(body, list(at))])
        assert cut == whole, at
        assert shelf.released == 1
