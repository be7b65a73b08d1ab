"""The cluster file: all problems reported at once in plain words, and robust against malicious YAML."""

from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from forebay.core.cluster import Cluster
from forebay.core.engine_settings import LlamaCppSettings, OnnxSettings
from forebay.core.model import Task
from forebay.wire import clusterfile
from forebay.wire.clusterfile import ClusterFileError, Problem, load

CHAT = "{name: chat, task: chat, source: a.gguf}"
GOOD = f"models: [{CHAT}]"


def problems(text: str | bytes, **overrides: str) -> dict[str, Problem]:
    with pytest.raises(ClusterFileError) as caught:
        load(text, "f.yaml", overrides)
    paths = [p.path for p in caught.value.problems if p.path]
    assert len(set(paths)) == len(paths)
    return {p.path: p for p in caught.value.problems}


def one(text: str | bytes, **overrides: str) -> Problem:
    found = list(problems(text, **overrides).values())
    assert len(found) == 1, found
    return found[0]


def patterns(schema: Any) -> Iterator[str]:
    """All patterns in a JSON Schema."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "pattern" and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from patterns(value)


def test_allowed_patterns_are_described_in_words() -> None:
    found = problems(f"{GOOD}\ngateway: {{cors_origins: ['https://a.example/']}}\naliases: [a]")

    assert "https://app.example" in found["gateway.cors_origins[0]"].allowed
    assert found["aliases"].allowed == "a section, each line NAME: TEXT"
    assert (
        "24:00" in one(f"models: [{CHAT[:-1]}, scale: {{max: 2, schedule: [{{start: '25:00', min: 1}}]}}}}]").allowed
    )
    used = set(patterns(Cluster.model_json_schema()))
    assert len(used) > 5
    assert used <= clusterfile._PATTERNS.keys()


def test_minimal_file_gets_all_defaults() -> None:
    cluster = load(GOOD, "f.yaml")

    assert cluster == Cluster.model_validate({"models": [{"name": "chat", "task": "chat", "source": "a.gguf"}]})
    assert cluster.gateway.port == 8080
    assert cluster.models[0].engine is None


def test_bundled_demo_is_valid_and_short() -> None:
    text = (resources.files("forebay.cli") / "demo" / "forebay.yaml").read_text()

    cluster = load(text, "demo")

    assert [(m.name, m.task, m.replicas) for m in cluster.models] == [
        ("chat", Task.CHAT, 2),
        ("embed", Task.EMBED, 1),
    ]
    assert len(text.splitlines()) <= 30


def test_engine_can_be_a_name_or_a_section() -> None:
    short = load(f"models: [{CHAT[:-1]}, engine: llamacpp}}]", "f.yaml")
    long = load("models: [{name: e, task: embed, source: x, engine: {name: onnx, max_batch: 8}}]", "f.yaml")

    assert short.models[0].engine == LlamaCppSettings()
    assert long.models[0].engine == OnnxSettings(max_batch=8)


def test_all_problems_are_listed_in_file_order() -> None:
    text = """\
name: Forebay!
gatway: {}
gateway:
  port: "abc"
  processes: true
  limits: {idle_timeout_s: .inf, headers_max: 1}
admin: 3
worker_port_first: 0x1F90
models:
  - name: chat
    task: chta
    source: ""
    replicas: 2.5
    engine: openvinno
  - name: chat
    task: embed
    engine: {name: openvino, threads: x, bogus: 1, threads: 2}
    slo: {availability: 2}
    queue_timeout_s: no
  - {name: gateway, source: x, sha256: zz, engine: {threads: 1}, routing: lest_requests}
  - 5
"""
    found = problems(text)

    assert list(found) == [
        "name", "gatway", "gateway.port", "gateway.processes", "gateway.limits.idle_timeout_s",
        "gateway.limits.headers_max", "admin", "models[0].task", "models[0].source", "models[0].replicas",
        "models[0].engine.name", "models[1].name", "models[1].source", "models[1].engine.threads",
        "models[1].engine.name", "models[1].engine.bogus", "models[1].slo.availability", "models[1].queue_timeout_s",
        "models[2].name", "models[2].task", "models[2].sha256", "models[2].engine.name", "models[2].routing",
        "models[3]",
    ]  # fmt: skip
    assert found["models[1].slo.availability"].line == 18
    source = "text (not empty), such as ./model.gguf or package:DIST==VERSION/PATH"
    assert found["models[1].source"] == Problem("models[1].source", "nothing", source, 15)
    assert "did you mean `gateway`" in found["gatway"].allowed
    assert "did you mean `openvino`" in found["models[0].engine.name"].allowed


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ('"abc"', '"abc"'), ('"8080"', '"8080"'), ("2.5", "2.5"), ("true", "true"), ("0", "0"), ("-1", "-1"),
        ("65536", "65536"), ("[1]", "a list of 1"), ("{a: 1}", "a section"), ("", "nothing"), ("~", "nothing"),
        ("0b11", '"0b11"'), ("1_000", '"1_000"'), ("2026-01-01", '"2026-01-01"'), ("9" * 5000, None),
        (".nan", ".nan"), (".NaN", ".NaN"), (".NAN", ".NAN"), ("-.INF", "-.INF"),
    ],
)  # fmt: skip
def test_port_must_be_an_integer(value: str, found: str | None) -> None:
    problem = one(f"gateway:\n  port: {value}\n{GOOD}")

    assert problem.path == "gateway.port"
    assert problem.line == 2
    assert "number" in problem.allowed
    if found is not None:
        assert problem.found == found


@pytest.mark.parametrize("value", ["no", "yes", "on", "off", "y", "1", '"true"', "null"])
def test_boolean_must_be_true_or_false(value: str) -> None:
    engine = f"models: [{CHAT[:-1]}, engine: {{name: openvino, prefix_cache: {value}}}}}]"

    assert one(engine).allowed == "true or false"


@pytest.mark.parametrize(
    ("value", "found"),
    [("maybe", '"maybe"'), ("-1", "-1"), ("[1]", "a list of 1"), ("{a: 1}", "a section"), ("1.5", "1.5")],
)
def test_union_field_problem_names_both_forms_once(value: str, found: str) -> None:
    problem = one(f"models: [{CHAT[:-1]}, spares: {value}}}]")

    allowed = 'a whole number from 0 to 100, or "auto"'
    assert (problem.path, problem.found, problem.allowed) == ("models[0].spares", found, allowed)


def test_yaml_1_1_booleans_are_strings() -> None:
    assert load("models: [{name: no, task: chat, source: yes}]", "f.yaml").models[0].source == "yes"


def test_number_notations_are_accepted() -> None:
    cluster = load(f"gateway: {{port: 0x1F90, drain_grace_s: 1e1, replica_timeout_s: 5}}\n{GOOD}", "f.yaml")

    assert cluster.gateway.port == 8080
    assert cluster.gateway.drain_grace_s == 10
    assert cluster.gateway.replica_timeout_s == 5


@pytest.mark.parametrize(
    ("text", "found", "line"),
    [
        ("", "nothing", None),
        ("# only a comment\n", "nothing", None),
        ("- a\n", "a list of 1", 1),
        ("just words", '"just words"', 1),
        ("a: [", "a syntax error", 1),
        ("a:\n\tb: 1", "a syntax error", 2),
        ("a: 1\n---\nb: 2", "a syntax error", 2),
        ("a: *x", "a syntax error", 1),
        ("a: \x00", "a syntax error", None),
        (b"a: \xff", "a byte that is not UTF-8 at offset 3", None),
        ("[" * 5000, "sections nested more than 32 deep", 1),
        ("a: b: c", "a syntax error", 1),
    ],
)
def test_other_file_contents_are_one_problem(text: str | bytes, found: str, line: int | None) -> None:
    problem = one(text)

    assert problem.path == ""
    assert problem.found.startswith(found)
    assert problem.line == line


def test_byte_order_mark_and_crlf_are_accepted() -> None:
    assert load(b"\xef\xbb\xbfname: x\r\n" + GOOD.encode(), "f.yaml").name == "x"


def test_duplicate_and_non_string_keys_tags_and_merges_are_problems() -> None:
    text = f"""\
name: a
name: b
? [x]
: 1
admin: !!python/object:os.system {{}}
gateway: &g {{port: 1}}
<<: *g
{GOOD}
"""
    with pytest.raises(ClusterFileError) as caught:
        load(text, "f.yaml")
    found = {p.found for p in caught.value.problems}

    assert "the key again, first on line 1" in found
    assert "a key that is a section or list" in found
    assert "the tag tag:yaml.org,2002:python/object:os.system" in found
    assert "an unknown key" in found
    assert one(f"name: !!str abc\n{GOOD}").found == "the tag tag:yaml.org,2002:str"


def test_alias_bombs_and_recursive_aliases_are_problems() -> None:
    same = load(f"models:\n - &m {CHAT}\nname: x", "f.yaml")
    assert len(same.models) == 1
    bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
        f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9)
    )
    assert any("unfold to more than" in p.found for p in problems(bomb).values())
    assert any("contains itself" in p.found for p in problems("models: &a [*a]").values())


def test_too_large_file_is_rejected_before_it_is_read() -> None:
    assert one("a" * (clusterfile.TEXT_BYTES_MAX + 1)).allowed == "at most 1000000 bytes"
    assert "more than" in one("models: [" + "1, " * 60_000 + "]").found


def test_engine_must_fit_the_task_and_ports_must_differ() -> None:
    text = "admin: {port: 8080}\nmodels:\n - {name: a, task: embed, source: x, engine: llamacpp}"
    found = problems(text)

    assert found["models[0].engine.name"].allowed == "onnx or synthetic, for `task: embed`"
    assert found["admin.port"].found == "8080, also the port of the gateway"


def test_engine_name_as_source_is_explained() -> None:
    found = one("models:\n - {name: a, task: chat, source: synthetic}")

    assert (found.path, found.found) == ("models[0].engine", "nothing, with `source: synthetic`")
    assert found.allowed.startswith("`engine: synthetic`")
    for model in ("{name: a, task: chat, source: ./synthetic}", "{name: a, task: tensor, source: synthetic}"):
        assert load(f"models:\n - {model}", "f.yaml").models[0].engine is None


def test_clusters_built_in_code_are_validated_alike() -> None:
    model = {"name": "a", "task": "chat", "source": "x", "engine": "onnx"}
    with pytest.raises(ValueError, match="openvino or llamacpp or synthetic"):
        Cluster.model_validate({"models": [model]})
    with pytest.raises(ValueError, match="no other model has"):
        Cluster.model_validate({"models": [{**model, "engine": None}] * 2})


def test_overrides_take_precedence_over_the_file() -> None:
    text = f"models: [{CHAT[:-1]}, engine: openvino}}, {{name: bge-v1.5, task: embed, source: b}}]"
    overrides = {
        "gateway.port": "9000",
        "gateway.limits.headers_max": "50",
        "models[0].engine.threads": "2",
        "models.chat.replicas": "3",
        "models.bge-v1.5.replicas": "4",
        "models[1].engine": "onnx",
        "name": '"8080"',
    }
    cluster = load(text, "f.yaml", overrides)

    assert (cluster.gateway.port, cluster.gateway.limits.headers_max, cluster.name) == (9000, 50, "8080")
    assert [m.replicas for m in cluster.models] == [3, 4]
    assert cluster.models[0].engine is not None
    assert cluster.models[0].engine.threads == 2  # type: ignore[union-attr]
    assert cluster.models[1].engine == OnnxSettings()


@pytest.mark.parametrize(
    ("path", "where"), [("gatewy.port", "gatewy"), ("models.chat.sloo.ttft_p99_ms", "models[0].sloo")]
)
def test_problem_in_an_overridden_section_has_no_line(path: str, where: str) -> None:
    text = "models:\n  - {name: chat, task: chat, source: s, engine: synthetic}\n"
    found = one(text, **{path: "1"})
    assert (found.path, found.line) == (where, None)
    assert found.found == "an unknown key"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("gateway.port", "abc"), ("gateway.port", "1.5"), ("gateway.prot", "1"), ("gateway", "[1"), ("a..b", "1"),
        ("", "1"), ("models[9].replicas", "1"), ("models.none.replicas", "1"), ("gateway.port.x", "1"),
        ("models[x]", "1"), ("]", "1"), ("models[0][0]", "1"),
    ],
)  # fmt: skip
def test_invalid_override_is_a_problem_with_its_path_and_no_line(path: str, value: str) -> None:
    found = problems(f"gateway: {{port: 1}}\n{GOOD}", **{path: value})

    assert path in found
    assert found[path].line is None


def test_override_of_an_unknown_model_names_the_known_ones() -> None:
    text = "models: [{name: chat, task: chat, source: s}, {name: embed, task: embed, source: s}]"
    found = one(text, **{"models.chta.replicas": "2"})
    assert (found.found, found.allowed) == ("no model `chta`", "chat, embed")
    found = one(f"{text}\ngateway: {{auth: keys}}\ntenants: [{{name: free}}]", **{"tenants.free.band": "batch"})
    assert (found.found, found.allowed) == ("no entry `free`", "the number of an existing entry, such as [0]")


def test_error_message_is_a_readable_list() -> None:
    with pytest.raises(ClusterFileError) as caught:
        load(f"gateway: {{port: x}}\n{GOOD}", "f.yaml")

    assert str(caught.value) == 'f.yaml:1: gateway.port: found "x"; allowed: a whole number from 1 to 65535'


@pytest.mark.parametrize("text", ['models: ["caf\\udce9.gguf"]', 'models: {"\\ud800": 1}'])
def test_half_of_a_surrogate_pair_is_named(text: str) -> None:
    with pytest.raises(ClusterFileError) as refused:
        load(text, "f.yaml")

    first = refused.value.problems[0]
    assert "with an invalid character" in first.found
    assert (first.allowed, first.line) == ("UTF-8 text", 1)


def test_guess_for_a_number_or_a_word_is_the_word() -> None:
    with pytest.raises(ClusterFileError) as refused:
        load("models: [{name: m, task: chat, source: s, spares: autoo}]", "f.yaml")

    assert refused.value.problems[0].allowed.endswith('or "auto" (did you mean `auto`?)')


def attempt(text: str | bytes, overrides: dict[str, str]) -> Cluster | tuple[Problem, ...]:
    try:
        return load(text, "f.yaml", overrides)
    except ClusterFileError as error:
        return error.problems


KEYS = st.sampled_from(
    ["models", "gateway", "admin", "name", "port", "engine", "limits", "task", "source", "x", "slo"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(KEYS, VALUES), st.dictionaries(KEYS, st.text(max_size=6), max_size=2))
def test_any_data_is_a_cluster_or_a_list_of_problems(data: dict[str, object], overrides: dict[str, str]) -> None:
    outcome = attempt(yaml.safe_dump(data, allow_unicode=True), overrides)

    assert isinstance(outcome, Cluster) or all(p.found and p.allowed for p in outcome)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet="ab:-[]{}&*!|>'\"#% \n\t,?01.~", max_size=60))
def test_any_text_is_a_cluster_or_a_list_of_problems(text: str | bytes) -> None:
    assert attempt(text, {})
