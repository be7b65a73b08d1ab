"""The cache of parsed heads: a known head is not parsed again, and the result is the same as with the parser."""

from typing import Any, Never, cast

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import cuts, pieces
from tests.net.memory import ANSWERS, REQUESTS, FakeOwner, Shelf, Wire, ask, serve, warm, warm_known
from tests.net.rig import Log, echo, get, peer, post, run, serving

from forebay.net.client import Call, Pool
from forebay.net.client.upstream import CachedHead, Upstream
from forebay.net.owner import HEAD_BYTES_MAX, KEPT_MAX, Common
from forebay.net.reading.refusing import SMALL_BODY_BYTES

LONG = b"x: " + b"y" * HEAD_BYTES_MAX


class Parsed(Exception):  # noqa: N818 - what a test looks for
    """A parser was needed."""


@pytest.fixture
def parserless(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nobody gets a parser of requests."""

    def refuse(_: object) -> Never:
        raise Parsed

    monkeypatch.setattr(httptools, "HttpRequestParser", refuse)


def seen(*requests: bytes) -> Common:
    """What a server shares that has had these."""
    common = FakeOwner().common
    for request in requests:
        serve([request], late=False, common=common)
    return common


@pytest.mark.parametrize("name", [b"content-length", b"Content-Length"])
def test_known_request_head_needs_no_parser_for_any_content_length(
    name: bytes, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spelt(body: bytes) -> bytes:
        return post(body, b"X-Key: Secret", target=b"/a?b=c").replace(b"content-length", name, 1)

    common = seen(spelt(b"hello"))
    request.getfixturevalue("parserless")
    asked: list[Any] = []
    monkeypatch.setattr(FakeOwner, "answer", lambda desk: asked.append(desk.waiting.pop()))
    for body in (b"x" * 12, b"", b"\r\n\r\n", b"content-length: 7\r\n"):
        desk, _ = serve([spelt(body)], late=False, common=common)
        assert desk.seen == [(b"POST", b"/a?b=c", body)]
        length = b"%d" % len(body)
        assert asked[-1].headers == [(b"host", b"a"), (b"x-key", b"Secret"), (b"content-length", length)]
        assert asked[-1].header(b"content-length") == length
        assert asked[-1].keep_alive


@pytest.mark.parametrize(
    "strange",
    [
        get(b"/a"),
        post(b"hello") + get(b"/a"),
        post(b"hello")[:-1],
        post(b"hello").replace(b": 5", b": 05"),
        post(b"hello").replace(b": 5", b":5"),
        post(b"hello", LONG),
        post(b"hello", b"a: b", b"a: b"),
    ],
)
def test_uncacheable_heads_are_parsed_every_time(strange: bytes, request: pytest.FixtureRequest) -> None:
    common = seen(post(b"hello"), strange)
    request.getfixturevalue("parserless")
    with pytest.raises(Parsed):
        serve([strange], late=False, common=common)


def test_different_heads_do_not_share_a_cache_entry(request: pytest.FixtureRequest) -> None:
    common = seen(post(b"hello"))
    request.getfixturevalue("parserless")
    with pytest.raises(Parsed):
        serve([post(b"hello").replace(b"host: a", b"host: b")], late=False, common=common)


def test_body_over_the_limit_is_rejected_behind_a_known_head() -> None:
    common = seen(post(b"hello"))
    desk, wire = serve([post(b"x" * 5001)], late=False, common=common)
    assert desk.seen == []
    assert wire.sent.startswith(b"HTTP/1.1 413 ")
    assert common.limits.body_bytes_max < SMALL_BODY_BYTES


def test_cache_of_heads_is_bounded(request: pytest.FixtureRequest) -> None:
    common = seen(*(get(b"/%d" % at, b"content-length: 0") for at in range(KEPT_MAX + 1)))
    request.getfixturevalue("parserless")
    serve([get(b"/%d" % KEPT_MAX, b"content-length: 0")], late=False, common=common)
    with pytest.raises(Parsed):
        serve([get(b"/0", b"content-length: 0")], late=False, common=common)


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=5), cuts, st.booleans())
def test_requests_are_the_same_with_known_heads(requests: list[bytes], at: list[int], late: bool) -> None:
    data = b"".join(requests)
    for parts in (pieces(data, at), requests):
        cold, answer = serve(parts, late)
        again, again_answer = serve(parts, late, warm())
        assert again.seen == cold.seen
        assert again_answer.sent == answer.sent


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"7\r\ndata: 1\r\n"
LAST = b"0\r\n\r\n"


class Silent:
    """A parser that must not be asked."""

    def feed_data(self, data: bytes) -> Never:
        raise AssertionError(data)


def streamed(parts: list[bytes], known: dict[bytes, CachedHead], parser: object = None) -> tuple[Log, Shelf]:
    shelf, log = Shelf(known), Log()
    upstream = Upstream(cast(Pool, shelf))
    upstream.connection_made(cast(Any, Wire()))
    if parser is not None:
        upstream._parser = cast(Any, parser)
    Call(cast(Pool, shelf), b"request", log).run_on(upstream)
    for part in parts:
        upstream.data_received(part)
    return log, shelf


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "parts",
    [
        [HEAD, EVENT, EVENT, LAST],
        [HEAD + EVENT, EVENT + LAST],
        [HEAD, LAST],
        [HEAD, EVENT + LAST],
    ],
)
def test_ordinary_stream_with_a_known_head_needs_no_parser(parts: list[bytes]) -> None:
    known: dict[bytes, CachedHead] = {}
    cold, _ = streamed(parts, known)
    again, shelf = streamed(parts, known, Silent())
    assert again == cold
    assert again.done
    assert shelf.released == 1


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "rest",
    [
        [EVENT, EVENT + EVENT, LAST],
        [EVENT[:4], EVENT[4:] + LAST],
        [EVENT, b"0\r\nx-told: 1\r\n\r\n"],
        [EVENT, b"7;odd=1\r\ndata: 1\r\n", LAST[:2], LAST[2:]],
        [EVENT, b"c\r\nx\r\n0\r\n\r\n\r\n\r\n\r\n\r\n0\r\n\r\n"],
        [EVENT, b"nonsense\r\n"],
        [EVENT, LAST + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"],
    ],
)
def test_unusual_stream_goes_through_the_parser(rest: list[bytes]) -> None:
    for parts in ([HEAD, *rest], [HEAD + rest[0], *rest[1:]]):
        known: dict[bytes, CachedHead] = {}
        cold, cold_shelf = streamed(parts, known)
        assert known
        again, shelf = streamed(parts, known)
        assert again == cold
        assert (shelf.released, shelf.again_called) == (cold_shelf.released, cold_shelf.again_called)


@pytest.mark.interpreted
def test_response_specific_heads_are_not_cached() -> None:
    assert list(warm_known()) == [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]


@pytest.mark.interpreted
@given(st.sampled_from(ANSWERS), cuts)
def test_responses_are_the_same_with_known_heads(answer: bytes, at: list[int]) -> None:
    cold, _, cold_shelf = ask(pieces(answer, at))
    again, _, shelf = ask(pieces(answer, at), warm_known())
    assert again == cold
    assert shelf.released == cold_shelf.released


def counted(value: bytes, name: bytes = b"x-forebay-usage: ") -> bytes:
    """A head with token counts."""
    return HEAD[:-2] + name + value + b"\r\n\r\n"


def ending(value: bytes) -> bytes:
    """The end of a stream with token counts."""
    return b"0\r\nx-forebay-usage: " + value + b"\r\n\r\n"


@pytest.mark.interpreted
@pytest.mark.parametrize("rest", [[EVENT, ending(b"451,7,100")], [EVENT + ending(b"451,7,100")], [ending(b"1,2,")]])
def test_known_head_and_stream_end_match_with_other_token_counts(rest: list[bytes]) -> None:
    known: dict[bytes, CachedHead] = {}
    streamed([counted(b"9,0,"), EVENT, ending(b"9,1,")], known)
    cold, _ = streamed([counted(b"451,0,100"), *rest], {})
    again, shelf = streamed([counted(b"451,0,100"), *rest], known, Silent())
    assert again == cold
    assert (b"x-forebay-usage", b"451,0,100") in again.headers
    assert again.trailers
    assert (again.done, shelf.released) == (True, 1)
    assert len(known) == 1


values = st.sampled_from(
    [
        b"",
        b"0",
        b"7,0,2",
        b"7,0,",
        b" 7,0,2",
        b"7,0,2 ",
        b"-7,0,2",
        b"many",
        b"9" * 300,
        b",,,",
        b"7;0;2",
        b"\xff",
        b"7\x00",
    ]
) | st.binary(max_size=12).map(lambda value: value.replace(b"\n", b"").replace(b"\r", b""))
names = st.sampled_from(
    [b"x-forebay-usage: ", b"x-forebay-usage:", b"X-Forebay-Usage: ", b"x-forebay-usage: 1\r\nX-Forebay-Usage: "]
)


@pytest.mark.interpreted
@given(st.lists(st.tuples(values, names, values, st.booleans()), min_size=1, max_size=6))
def test_token_counts_equal_those_that_the_parser_reads(
    streams: list[tuple[bytes, bytes, bytes, bool]],
) -> None:
    known: dict[bytes, CachedHead] = {}
    for head, name, last, glued in streams:
        parts = [counted(head, name) + EVENT, ending(last)] if glued else [counted(head, name), EVENT + ending(last)]
        cold, cold_shelf = streamed(parts, {})
        again, shelf = streamed(parts, known)
        assert again == cold
        assert shelf.released == cold_shelf.released


@pytest.mark.parametrize("length", [b"content-length: 0", b"x: y"])
@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\r\nbad header\r\n\r\n"])
def test_head_behind_an_upgrade_offer_is_not_taken_for_that_request(length: bytes, end: bytes) -> None:
    offer = b"POST /offer HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n%b\r\n\r\n" % length
    behind = b"POST /behind HTTP/1.1\r\nhost: a\r\ncontent-length: 5%bhello" % end

    async def main() -> None:
        async with serving(echo) as server:
            for first in (offer, b"", b""):
                async with peer(server.port) as client:
                    client.send(first + behind)
                    if first:
                        assert (await client.answer()).body == b"POST /offer 0 "
                    answer = await client.answer()
                    assert answer.status == (400 if b"bad" in end else 200)
                    assert answer.status == 400 or answer.body == b"POST /behind 5 hello"

    run(main())
