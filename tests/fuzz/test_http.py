"""HTTP, both sides: whatever the bytes and however they are cut, a clean end, and one reading of a request."""

import re

import h11
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import cuts, mutated, pieces
from tests.net.memory import ANSWERS, REQUESTS, ask, serve, warm, warm_known
from tests.net.rig import get

WORDS = (
    b"content-length: 3\r\n",
    b"content-length: +3\r\n",
    b"content-length: 3, 3\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding:\tchunked, identity\r\n",
    b"transfer-encoding : chunked\r\n",
    b"connection: close\r\n",
    b"connection: upgrade\r\n",
    b"upgrade: websocket\r\n",
    b"expect: 100-continue\r\n",
    b"host: a\r\n",
    b" folded\r\n",
    b"0\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"x: " + b"y" * 3500 + b"\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"HTTP/1.0\r\n",
)
STATUSES = (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 101 Switching\r\n\r\n")
requests = mutated(REQUESTS, WORDS) | st.binary(max_size=200)
answers = mutated(ANSWERS, WORDS + STATUSES) | st.binary(max_size=200)
MARK = get(b"/mark")


@given(requests, cuts, st.booleans())
def test_any_bytes_end_in_answers_and_at_most_one_refusal(data: bytes, at: list[int], late: bool) -> None:
    desk, wire = serve(pieces(data, at), late)
    statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", wire.sent)
    assert all(status in {b"200", b"100"} for status in statuses[:-1])
    assert statuses.count(b"200") == len(desk.seen)
    if statuses and statuses[-1] not in {b"200", b"100"}:
        assert wire.ended


@given(requests, cuts)
def test_any_bytes_are_the_same_requests_for_every_split(data: bytes, at: list[int]) -> None:
    whole, _ = serve([data], late=False)
    cut, _ = serve(pieces(data, at), late=False)
    several = min(len(whole.seen), len(cut.seen))
    assert cut.seen[:several] == whole.seen[:several]


@given(requests, cuts, st.booleans())
def test_cached_heads_do_not_change_how_requests_are_parsed(data: bytes, at: list[int], late: bool) -> None:
    cold, cold_answer = serve(pieces(data, at), late)
    for common in (warm(), cold.common):
        again, answer = serve(pieces(data, at), late, common)
        assert again.seen == cold.seen
        assert answer.sent == cold_answer.sent
        assert answer.ended == cold_answer.ended


def second_opinion(data: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """The requests that another implementation finds, up to the first that it does not like."""
    found = []
    try:
        peer = h11.Connection(h11.SERVER)
        peer.receive_data(data)
        while True:
            event = peer.next_event()
            if not isinstance(event, h11.Request):
                return found
            head, body = event, b""
            while isinstance(event := peer.next_event(), h11.Data):
                body += bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                return found
            found.append((head.method, head.target, body))
            if peer.their_state is not h11.DONE:
                return found
            peer.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            peer.send(h11.EndOfMessage())
            peer.start_next_cycle()
    except h11.ProtocolError:
        return found


@given(mutated(REQUESTS, WORDS))
def test_requests_are_those_that_another_implementation_finds(data: bytes) -> None:
    """Two readings of the same bytes are how one client's request gets into another one's."""
    ours, theirs = serve([data + MARK], late=False)[0].seen, second_opinion(data + MARK)
    several = min(len(ours), len(theirs))
    assert ours[:several] == theirs[:several]


@given(answers, cuts)
def test_any_answer_ends_exactly_once(data: bytes, at: list[int]) -> None:
    log, wire, shelf = ask(pieces(data, at))
    assert log.done != bool(shelf.again_called)
    assert shelf.released + wire.closing <= 1 or log.done


@given(answers, cuts)
def test_any_answer_is_the_same_for_every_split(data: bytes, at: list[int]) -> None:
    whole, _, _ = ask([data])
    cut, _, _ = ask(pieces(data, at))
    if whole.trailers is not None and cut.trailers is not None:
        assert (cut.status, cut.body) == (whole.status, whole.body)


@given(answers, cuts)
def test_cached_heads_do_not_change_how_responses_are_parsed(data: bytes, at: list[int]) -> None:
    cold, cold_wire, cold_shelf = ask(pieces(data, at))
    again, wire, shelf = ask(pieces(data, at), warm_known())
    assert again == cold
    assert (wire.closing, shelf.released, shelf.again_called) == (
        cold_wire.closing, cold_shelf.released, cold_shelf.again_called
    )  # fmt: skip
