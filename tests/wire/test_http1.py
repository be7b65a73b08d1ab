"""HTTP/1 heads, chunks and requests as bytes."""

from forebay.wire import http1


def test_ipv6_address_before_a_port_is_in_brackets() -> None:
    assert http1.authority("127.0.0.1", 80) == "127.0.0.1:80"
    assert http1.authority("gateway.example", 8080) == "gateway.example:8080"
    assert http1.authority("::1", 8080) == "[::1]:8080"


def test_empty_chunk_is_never_written() -> None:
    assert http1.chunk(b"") == b""
    assert http1.chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n"


def test_lone_chunk_is_recognized_by_its_length_and_size_line() -> None:
    for size in (1, 15, 16, 17, 255, 256, 257, 1023):
        assert http1.lone_chunk(http1.chunk(b"x" * size)) == b"x" * size
    whole = http1.chunk(b"x" * 17)
    others = (whole[:-1], whole + b"\n", whole[:-2] + b"xx", b"011" + whole[2:], b"10" + whole[2:], whole + whole)
    for data in (*others, b"", b"0\r\n\r\n", b"A\r\n" + b"x" * 10 + b"\r\n", http1.chunk(b"x" * 1024)):
        assert http1.lone_chunk(data) == b""


def test_last_chunk_carries_the_trailers() -> None:
    assert http1.last_chunk(()) == b"0\r\n\r\n"
    assert http1.last_chunk([(b"a", b"1"), (b"b", b"2")]) == b"0\r\na: 1\r\nb: 2\r\n\r\n"


def test_status_without_a_reason_phrase_has_a_status_line() -> None:
    assert http1.status_line(200) == b"HTTP/1.1 200 OK\r\n"
    assert http1.status_line(499) == b"HTTP/1.1 499 \r\n"


def test_request_has_its_content_length() -> None:
    request = http1.request(b"POST", b"/x", [(b"host", b"a")], b"body")
    assert request == b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody"
