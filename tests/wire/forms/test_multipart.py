"""Multipart forms: what clients send is parsed, and anything else is rejected."""

from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Code, Refusal
from forebay.wire.forms.multipart import FIELD_BYTES_MAX, PARTS_MAX, Form, Upload, is_form, read_form

TYPE = b"multipart/form-data; boundary=b"


def sent(fields: dict[str, list[str]], files: dict[str, tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Content type and body as httpx makes them, and with it OpenAI's client."""
    request = httpx.Request("POST", "http://a", data=fields, files=files)
    return request.headers["content-type"].encode(), request.read()


def body(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    """A body of these parts, each with its head."""
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


def field(name: bytes, value: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="%b"\r\n\r\n%b' % (name, value)


NAMES = st.text("abcdefg[]_-", min_size=1, max_size=20)


@given(
    st.dictionaries(NAMES, st.lists(st.text(max_size=50), min_size=1, max_size=3), max_size=8),
    st.dictionaries(
        NAMES, st.tuples(st.text("abc. é", min_size=1), st.binary(max_size=3000)), min_size=1, max_size=4
    ),
)
def test_client_form_is_parsed(fields: dict[str, list[str]], files: dict[str, tuple[str, bytes]]) -> None:
    form = read_form(*sent(fields, files))
    assert form == Form(fields, {name: Upload(*upload) for name, upload in files.items()})


@given(st.binary(max_size=200), st.sampled_from([b"", b"--b\r\n", field(b"x", b"1")]), st.binary(max_size=50))
def test_any_bytes_are_a_form_or_rejected(junk: bytes, middle: bytes, more: bytes) -> None:
    with suppress(Refusal):
        read_form(TYPE, junk + middle + more)


@pytest.mark.parametrize(
    ("content_type", "given_body", "says", "param"),
    [
        (None, b"", "must be multipart", None),
        (b"application/json", b"{}", "must be multipart", None),
        (b"multipart/form-data", b"", "boundary", None),
        (b"multipart/form-data; boundary=" + b"b" * 71, b"", "boundary", None),
        (TYPE, b"", "ends within", None),
        (TYPE, b"nothing", "not valid", None),
        (TYPE, body(field(b"x", b"1"), end=b""), "ends within", None),
        (TYPE, body(b"Content-Type: text/plain\r\n\r\nx"), "must have a name", None),
        (TYPE, body(b'Content-Disposition: attachment; name="x"\r\n\r\nx'), "must have a name", None),
        (TYPE, body(field(b"n" * 257, b"1")), "must have a name", None),
        (TYPE, body(field(b"\xff", b"1")), "not UTF-8", "name of a part"),
        (TYPE, body(field(b"x", b"\xff")), "not UTF-8", "x"),
        (TYPE, body(field(b"x", b"a" * (FIELD_BYTES_MAX + 1))), "longer than", "x"),
        (TYPE, body(*[field(b"x", b"1")] * (PARTS_MAX + 1)), "more than 64 parts", None),
        (TYPE, body(b"A: 1\r\n" * 9 + field(b"x", b"1")), "not valid", None),
        (TYPE, body(b"A: " + b"1" * 5000 + b"\r\n" + field(b"x", b"1")), "not valid", None),
        (TYPE, body(field(b"x", b"1"), end=b"--b" + b" " * 1_000_000), "are not data", None),
        (TYPE, b"\r\n" * 1_000_000, "are not data", None),
    ],
)
def test_invalid_form_is_rejected_with_the_reason(
    content_type: bytes | None, given_body: bytes, says: str, param: str | None
) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        read_form(content_type, given_body)
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.param == param


def test_maximum_parts_and_bytes_are_accepted() -> None:
    form = read_form(TYPE, body(*[field(b"x", b"1")] * (PARTS_MAX - 1), field(b"y", b"a" * FIELD_BYTES_MAX)))
    assert len(form.fields["x"]) == PARTS_MAX - 1
    assert len(form.fields["y"][0]) == FIELD_BYTES_MAX


def test_large_file_is_parsed_and_trailing_bytes_are_ignored() -> None:
    data = bytes(range(256)) * 4_000
    head = b'Content-Disposition: form-data; name="file"; filename=""\r\n\r\n'
    form = read_form(TYPE, body(field(b"x", b""), head + data, end=b"--b--\r\n" + b"-" * 1_000_000))
    assert form == Form({"x": [""]}, {"file": Upload("", data)})


@pytest.mark.parametrize(
    ("given_name", "filename"),
    [
        (b"filename*=utf-8''%C3%A9.wav", ""),
        (b"filename=\"e.wav\"; filename*=utf-8''%C3%A9.wav", "e.wav"),
        (b'filename="\xc3\xa9.wav"', "é.wav"),
        (b'filename="\xe9.wav"', "\ufffd.wav"),
    ],
)
def test_file_with_a_filename_beyond_ascii_is_a_file(given_name: bytes, filename: str) -> None:
    form = read_form(TYPE, body(b'Content-Disposition: form-data; name="file"; ' + given_name + b"\r\n\r\n\xff"))
    assert form == Form({}, {"file": Upload(filename, b"\xff")})


def test_boundary_lookalikes_stay_in_their_file() -> None:
    data = b"\r\n--\r\n--bb\r\n--a" * 1000
    head = b'Content-Disposition: form-data; name="file"; filename="f.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    form = read_form(b'multipart/form-data; boundary="=_b"', b"--=_b\r\n" + head + data + b"\r\n--=_b--\r\n")
    assert form.files == {"file": Upload("f.wav", data)}


def test_content_type_is_recognized_in_every_spelling() -> None:
    assert is_form(b"Multipart/Form-Data ; boundary=x")
    assert not is_form(b"multipart/mixed; boundary=x")
    assert not is_form(None)
