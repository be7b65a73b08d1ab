"""Fields found without parsing the whole form: same values as from a full parse."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.wire.forms.field import PARTS_MAX, VALUE_BYTES_MAX, find_fields
from forebay.wire.forms.multipart import read_form

KIND = b"multipart/form-data; boundary=mark"
NAMES = (b"model", b"stream")
plain = st.text("abcmodelstream-", max_size=12).map(str.encode)
parts = st.tuples(st.sampled_from((*NAMES, b"file", b"language")), st.binary(max_size=40) | plain)


def form(fields: list[tuple[bytes, bytes]]) -> bytes:
    made = b""
    for name, value in fields:
        more = b'; filename="x"' if name == b"file" else b""
        made += b'--mark\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name, more, value)
    return made + b"--mark--\r\n"


def found(body: bytes, kind: bytes = KIND) -> dict[bytes, bytes]:
    return {name: body[place.start : place.end] for name, place in find_fields(kind, body, NAMES).items()}


@given(st.lists(parts, max_size=8))
def test_found_fields_equal_the_first_ones_of_a_full_parse(fields: list[tuple[bytes, bytes]]) -> None:
    fields = [(name, value if name == b"file" else value.hex().encode()) for name, value in fields]
    fields = [(name, value) for name, value in fields if b"--mark" not in value]
    fields = [each for i, each in enumerate(fields) if each[0] != b"file" or each[0] not in dict(fields[:i])]
    body = form(fields)
    read = read_form(KIND, body).fields if fields else {}

    assert found(body) == {name: read[name.decode()][0].encode() for name in NAMES if name.decode() in read}


@given(st.binary(max_size=300), st.binary(max_size=60))
def test_any_bytes_are_handled(body: bytes, kind: bytes) -> None:
    for place in find_fields(kind, body, NAMES).values():
        assert 0 <= place.start <= place.end <= len(body)
    for place in find_fields(KIND, b"--mark\r\n" + body, NAMES).values():
        assert place.end - place.start <= VALUE_BYTES_MAX


def test_field_inside_a_file_or_beyond_the_limits_is_not_found() -> None:
    inner = form([(b"model", b"inner")]).replace(b"mark", b"other")
    assert found(form([(b"file", inner), (b"model", b"outer")])) == {b"model": b"outer"}
    assert found(form([(b"model", b"x" * (VALUE_BYTES_MAX + 1))])) == {}
    assert found(form([(b"language", b"en")] * PARTS_MAX + [(b"model", b"late")])) == {}
    assert found(form([(b"model", b"m")]), b"multipart/form-data") == {}
    assert found(form([(b"model", b"m")]), b'multipart/form-data; charset=x; Boundary="mark"') == {b"model": b"m"}
    assert found(b"--mark\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n--mark--") == {b"model": b"m"}
