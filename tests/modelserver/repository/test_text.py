"""The text format of configurations: problems name their line or field, and no input breaks the parser."""

import json

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from forebay.modelserver.repository.form.fill import ITEMS_MAX, PROBLEMS_MAX, Problems, fill
from forebay.modelserver.repository.form.pbtxt import TEXT_BYTES_MAX, BadText, parse_json, parse_text
from forebay.modelserver.repository.form.schema import document_of, empty, message_of


def read(text: str | bytes, *, lenient: bool = False) -> tuple[str, list[str]]:
    """The message in protobuf's own words, and what is wrong."""
    message, problems = empty(), Problems()
    encoded = text.encode() if isinstance(text, str) else text
    fill(message, parse_json(encoded) if lenient else parse_text(encoded), problems, lenient=lenient)
    return text_format.MessageToString(message), problems.found


SAME = {
    "a colon before a message": "input: { name: 'x' }",
    "none, and angle brackets": "input < name: 'x' >",
    "a list of messages": 'input [ { name: "x" } ]',
    "commas and semicolons": "input { name: 'x', };",
    "strings that follow each other": "input { name: \"\" 'x' }",
    "a comment": '# a comment { "\ninput { # another\n name: "x" }',
    "escapes": r'input { name: "\x78" }',
    "an octal escape": r'input { name: "\170" }',
    "a code point": r'input { name: "\u0078" }',
    "a byte order mark": '\ufeffinput { name: "x" }',
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_text_format_variants_parse_to_the_same_message(text: str) -> None:
    assert read(text) == ('input {\n  name: "x"\n}\n', [])


VALUES = [
    "max_batch_size: 0x10",
    "max_batch_size: 010",
    "max_batch_size: -3",
    "input { dims: [] }",
    "input { dims: [1, -1] dims: 2 }",
    "input { data_type: TYPE_FP32 }",
    "input { data_type: 11 }",
    "response_cache { enable: t }",
    "response_cache { enable: 1 }",
    "response_cache { enable: False }",
    "version_policy { all {} }",
    "sequence_batching { direct { minimum_slot_utilization: .5f } }",
    'metric_tags { key: "a" value: "b" }',
    'metric_tags { key: "a" }',
    "metric_tags { } sequence_batching { } model_warmup { inputs { value { dims: 1 } } }",
    'parameters [ { key: "a" value {} } ]',
    r'name: "\a\b\f\n\r\t\v\\\"\303\251"',
    "input { dims: [1, 2,3] } # x",
    "max_batch_size: 0X1f",
    """default_model_filename: 'a' "b" """,
]


@pytest.mark.parametrize("text", VALUES)
def test_values_parse_as_in_protobuf(text: str) -> None:
    expected = text_format.MessageToString(text_format.Parse(text, empty()))

    assert read(text) == (expected, [])


BROKEN = {
    "name": "line 1: found the end of the file after 'name' where ':' or '{' should be",
    "name 'x'": "line 1: found ''x'' after 'name' where ':' or '{' should be",
    "name:": "line 1: found the end of the file where the value of 'name' should be",
    "name: -x": "line 1: found 'x' where the value of 'name' should be",
    "\n\ninput {": "line 3: found the end of the file where a field or '}' should be",
    "}": "line 1: found '}' where a field should be",
    "input { > ": "line 1: found '>' where a field or '}' should be",
    "a: [1 2]": "line 1: found '2' where ',' or ']' should be",
    "\nname: 'x": "line 2: an unterminated string",
    "name: 'x\ny'": "line 1: an unterminated string",
    "name: 'a\0'": "line 1: an unterminated string",
    "name: 08": "line 1: 08 begins with 0, but is not octal",
    "name: 1x": "line 1: unexpected '1x'",
    "[google]: 1": "line 1: found '[' where a field should be",
    "[google.Any]: 1": "line 1: unexpected '.Any]: 1'",
    r"name: '\q'": "line 1: unknown escape \\q in a string",
    r"name: '\ud800'": "line 1: \\d800 is not a character",
    r"name: '\377'": "line 1: name is not UTF-8",
    "a: " + "1" * 41: "line 1: a number of 41 characters; at most 40",
    "input {" * 30: "line 1: nested deeper than 24 levels",
    "name: " + "x" * 50 + " :": "line 1: found ':' where a field should be",
}


@pytest.mark.parametrize(("text", "problem"), BROKEN.items(), ids=[t[:20] for t in BROKEN])
def test_syntax_error_reports_the_line(text: str, problem: str) -> None:
    with pytest.raises(BadText, match="line") as raised:
        read(text)

    assert str(raised.value) == problem


def test_invalid_utf8_and_oversized_files_are_rejected() -> None:
    with pytest.raises(BadText, match="line 2: not UTF-8"):
        read(b"name: 'x'\n\xff")
    with pytest.raises(BadText, match="longer than"):
        read(b" " * (TEXT_BYTES_MAX + 1))


INT32 = "a whole number from -2147483648 to 2147483647"
KINDS = "one of KIND_AUTO, KIND_CPU, KIND_GPU, KIND_MODEL"
STRING = "a string in quotes, without NUL"
WRONG = {
    "nam: 'x'": "line 1: nam: no such field; did you mean name?",
    "name: 5": "line 1: name: found 5; allowed: a string in quotes, without NUL",
    r"name: '\0'": "line 1: name: found '\\x00'; allowed: a string in quotes, without NUL",
    "name: 'a' name: 'b'": "line 1: name: given more than once",
    "max_batch_size: 1.5": f"line 1: max_batch_size: found 1.5; allowed: {INT32}",
    "max_batch_size: 'x'": f"line 1: max_batch_size: found 'x'; allowed: {INT32}",
    "max_batch_size: true": f"line 1: max_batch_size: found true; allowed: {INT32}",
    "input { dims: 9223372036854775808 }": "line 1: input[0].dims[0]: found 9223372036854775808; allowed: "
    "a whole number from -9223372036854775808 to 9223372036854775807",
    "input: 3": "line 1: input[0]: found 3; allowed: { … }",
    "dynamic_batching: 3": "line 1: dynamic_batching: found 3; allowed: { … }",
    "name: { }": "line 1: name: found { … }; allowed: a string in quotes, without NUL",
    "\nresponse_cache { enable: 2 }": "line 2: response_cache.enable: found 2; allowed: true or false",
    "response_cache { enable: 'true' }": "line 1: response_cache.enable: found 'true'; allowed: true or false",
    "instance_group { kind: KIND_CPUS }": f"line 1: instance_group[0].kind: found KIND_CPUS; allowed: {KINDS}",
    "instance_group { kind: 77 }": f"line 1: instance_group[0].kind: found 77; allowed: {KINDS}",
    "dynamic_batching {} sequence_batching {}": "line 1: sequence_batching: cannot be given together with "
    "dynamic_batching",
    "sequence_batching { direct { minimum_slot_utilization: 1e39 } }": "line 1: sequence_batching.direct."
    "minimum_slot_utilization: found 1e+39; allowed: a finite number",
    "sequence_batching { direct { minimum_slot_utilization: nan } }": "line 1: sequence_batching.direct."
    "minimum_slot_utilization: found nan; allowed: a finite number",
    "metric_tags { kee: 'a' }": "line 1: metric_tags: an entry is one `key` and one `value`, and nothing else",
    "metric_tags: 4": "line 1: metric_tags: found 4; allowed: { … }",
    "metric_tags { key: 4 }": "line 1: metric_tags.key: found 4; allowed: a string in quotes, without NUL",
    "metric_tags { key: 'a' value: 4 }": f'line 1: metric_tags["a"]: found 4; allowed: {STRING}',
    "metric_tags { key: 'a' } metric_tags { key: 'a' }": 'line 1: metric_tags["a"]: given more than once',
    "parameters { key: 'a' value: 'b' }": "line 1: parameters[\"a\"]: found 'b'; allowed: { … }",
    "dynamic_batching { priority_queue_policy { key: 1 value { max_queue: 1 } } }": "line 1: dynamic_batching."
    "priority_queue_policy[1].max_queue: no such field; did you mean max_queue_size?",
    f"name: {'9' * 40}": f"line 1: name: found {'9' * 40}; allowed: a string in quotes, without NUL",
}


@pytest.mark.parametrize(("text", "problem"), WRONG.items(), ids=[t[:40].strip() for t in WRONG])
def test_invalid_field_reports_allowed_values(text: str, problem: str) -> None:
    assert read(text)[1] == [problem]


def test_all_invalid_fields_are_reported_together() -> None:
    found = read("foo: 1\ninput {\n dims: 'x'\n datatype: 3 }\nname: 1\nzzzz: 1")[1]

    assert [problem.split(";")[0] for problem in found] == [
        "line 1: foo: no such field",
        "line 3: input[0].dims[0]: found 'x'",
        "line 4: input[0].datatype: no such field",
        "line 5: name: found 1",
        "line 6: zzzz: no such field",
    ]


def test_number_of_reported_problems_is_limited() -> None:
    assert len(read(" ".join(f"f{n}: 1" for n in range(9_000)))[1]) == PROBLEMS_MAX
    assert read("input { dims: [" + "1," * ITEMS_MAX + "1] }")[1] == [
        f"line 1: input[0].dims: more than {ITEMS_MAX} fields in one file"
    ]


JSON = {
    '{"name": "x", "max_batch_size": 4}': 'name: "x"\nmax_batch_size: 4\n',
    '{"maxBatchSize": "4"}': "max_batch_size: 4\n",
    '{"max_batch_size": 4.0, "name": null}': "max_batch_size: 4\n",
    '{"input": [{"data_type": "type_fp32", "dims": [1, "-1"]}]}': (
        "input {\n  data_type: TYPE_FP32\n  dims: 1\n  dims: -1\n}\n"
    ),
    '{"parameters": {"a": {"string_value": "b"}}}': (
        'parameters {\n  key: "a"\n  value {\n    string_value: "b"\n  }\n}\n'
    ),
    '{"metric_tags": {"a": "b"}}': 'metric_tags {\n  key: "a"\n  value: "b"\n}\n',
    '{"dynamic_batching": {}}': "dynamic_batching {\n}\n",
    '{"response_cache": {"enable": true}}': "response_cache {\n  enable: true\n}\n",
}


@pytest.mark.parametrize(("text", "expected"), JSON.items(), ids=JSON)
def test_json_parses_as_in_protobuf(text: str, expected: str) -> None:
    assert read(text, lenient=True) == (expected, [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON: "),
        ('{"max_batch_size": ' + "9" * 5000 + "}", "not JSON: "),
        ('{"a": ' * 30 + "1" + "}" * 30, "nested deeper than 24 levels"),
        ('{"a":' * 20_000, "nested deeper than 24 levels"),
        ('{"name": [["x"]]}', "'name': a list within a list, or null in a list"),
        ('{"name": [null]}', "'name': a list within a list, or null in a list"),
    ],
    ids=range(7),
)
def test_invalid_json_is_rejected(text: str, problem: str) -> None:
    with pytest.raises(BadText) as raised:
        read(text, lenient=True)

    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "a", "name": "b"}', "name: given more than once"),
        ('{"name": "\\ud800"}', "name: found '\\ud800'; allowed: a string in quotes, without NUL"),
        ('{"parameters": {"a": {}, "a": {}}}', 'parameters["a"]: given more than once'),
        (
            '{"input": [{"data_type": "TYPE_FP31"}]}',
            "input[0].data_type: found 'TYPE_FP31'; allowed: one of TYPE_BF16",
        ),
        ('{"max_batch_size": 1e400}', "max_batch_size: found inf; allowed: a whole number"),
        ('{"max_batch_size": 1.5}', "max_batch_size: found 1.5; allowed: a whole number"),
        ('{"input": [{"data_type": "\\ud800"}]}', "input[0].data_type: found '\\ud800'; allowed: one of TYPE_BF16"),
        ('{"\\ud800": 1}', "\\ud800: no such field; allowed: backend"),
        ('{"parameters": {"\\ud800": 1}}', 'parameters["\\ud800"]: found 1'),
        ('{"max_batch_size": true}', "max_batch_size: found true; allowed: a whole number"),
        ('{"max_batch_size": "x"}', "max_batch_size: found 'x'; allowed: a whole number"),
        ('{"max_batch_size": "--5"}', "max_batch_size: found '--5'; allowed: a whole number"),
        ('{"response_cache": {"enable": "yes"}}', "response_cache.enable: found 'yes'; allowed: true or false"),
    ],
    ids=range(13),
)
def test_invalid_json_field_is_reported_by_name(text: str, problem: str) -> None:
    [found] = read(text, lenient=True)[1]

    assert found.startswith(problem)


def test_document_has_json_numbers_and_round_trips() -> None:
    message, problems = empty(), Problems()
    text = (
        b"name: 'm' input { name: 'x' dims: [3, -1] reshape { shape: [] } }"
        b"version_policy { specific { versions: 3 } }"
        b"dynamic_batching { priority_levels: 2 priority_queue_policy { key: 2 value {"
        b" default_timeout_microseconds: 7 } } } model_warmup { inputs { key: 'x'"
        b" value { dims: 5 zero_data: true } } }"
    )
    fill(message, parse_text(text), problems)

    document = document_of(message)

    assert document["input"][0]["dims"] == [3, -1]
    assert document["version_policy"] == {"specific": {"versions": [3]}}
    assert document["dynamic_batching"]["priority_levels"] == 2
    assert document["dynamic_batching"]["priority_queue_policy"]["2"]["default_timeout_microseconds"] == 7
    assert document["model_warmup"][0]["inputs"]["x"] == {"data_type": "TYPE_INVALID", "dims": [5], "zero_data": True}
    assert message_of(document) == message


PIECES = [
    "{",
    "}",
    "<",
    ">",
    "[",
    "]",
    ":",
    ",",
    "-",
    "'",
    '"',
    "\\",
    "#",
    "\n",
    "\0",
    "input",
    "name",
    "dims",
    "1",
    "x",
]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=60) | st.binary(max_size=60))
def test_arbitrary_text_parses_or_raises_badtext(text: str | bytes) -> None:
    for lenient in (False, True):
        try:
            read(text if isinstance(text, bytes) else text.encode("utf-8", "replace"), lenient=lenient)
        except BadText:
            continue


KEYS = st.sampled_from(["input", "dims", "name", "parameters", "string_value", "key", "\ud800", "a\0"])
DOCUMENTS = st.dictionaries(
    KEYS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@given(DOCUMENTS)
def test_arbitrary_json_parses_or_raises_badtext(document: object) -> None:
    try:
        read(json.dumps(document), lenient=True)
    except BadText:
        return
