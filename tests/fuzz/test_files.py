"""Files that may be damaged or somebody else's: read, or refused with the error that their reader promises."""

import struct
import tempfile
from pathlib import Path

import msgspec
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import DEEP, damaged, json_bytes, mutated, survives

from forebay.core.cluster import Cluster
from forebay.core.tenancy import Directory, authorise, mint
from forebay.core.tenancy.keys import Denied, Granted, Tenant
from forebay.engines.gguf_header import Header, read_header
from forebay.engines.protocol import EngineBroken
from forebay.registry.keys import KeyFileError, read_keys
from forebay.wire.clusterfile import PROBLEMS_MAX, ClusterFileError, load
from forebay.wire.records import (
    AuditLine,
    Chain,
    Decision,
    Head,
    Verifier,
    candidates,
    decisions,
    end_of,
    frame,
    payloads,
    sound_lines,
)

# --- the cluster file

CLUSTERS = [
    {
        "name": "demo",
        "gateway": {"port": 8080, "processes": 2, "auth": "keys", "limits": {"body_bytes_max": 1000}},
        "admin": {"port": 8081},
        "models": [
            {"name": "chat", "task": "chat", "source": "hf:a/b", "engine": {"name": "openvino", "threads": 1}},
            {"name": "embed", "task": "embed", "source": "./x", "engine": "onnx", "replicas": 2},
            {"name": "s", "task": "chat", "source": "x", "engine": "synthetic", "fallback": [{"model": "chat"}]},
        ],
        "tenants": [{"name": "t", "models": ["chat*"], "limits": {"requests_per_min": 60}}],
        "aliases": {"gpt": "chat"},
        "routes": [{"name": "auto", "then": "chat", "when": {"prompt_tokens_max": 100}}],
    },
    {"models": [{"name": "s", "source": "x", "engine": "synthetic", "slo": {"availability": 0.99}}]},
]
TEXTS = tuple(yaml.safe_dump(cluster, allow_unicode=True).encode() for cluster in CLUSTERS)
YAML_WORDS = (
    b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"!x ", b"---\n", b"...\n", b"? ", b"| \n", b"> \n", b"~",
    b"%YAML 9.9\n", b"0x" + b"f" * 5000, b"9" * 5000, b"0o7", b".inf", b"-.NaN", b"1e999", b"[" * 40, b"{" * 40, b"'",
    b'"\\ud800"', b'"\\x00"', b"\xef\xbb\xbf", b"\xff\xfe", b"\t", b"#", b"gateway:\n", b"2001-01-01", b"12:30:45",
)  # fmt: skip
cluster_files = st.one_of(
    mutated(TEXTS, YAML_WORDS),
    damaged(CLUSTERS).map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode()),
)
overrides = st.dictionaries(
    st.sampled_from(
        ["gateway.port", "models[0].engine", "models.chat.engine.threads", "models[9]", "x.y", "a..b", "]"]
    )
    | st.text(max_size=12),
    st.sampled_from(["1", "[1, 2]", "{a: b}", "&a [*a]", "'", "!!x y", "0x" + "f" * 5000]) | st.text(max_size=8),
    max_size=2,
)


@given(cluster_files, overrides)
def test_any_cluster_file_is_a_cluster_or_a_list_of_problems(text: bytes, over: dict[str, str]) -> None:
    try:
        assert isinstance(load(text, "f.yaml", over), Cluster)
    except ClusterFileError as error:
        problems, shown = error.problems, str(error)
    else:
        return
    assert 0 < len(problems) <= PROBLEMS_MAX
    assert all(problem.found and problem.allowed for problem in problems)
    assert len(shown) < 1000 * PROBLEMS_MAX


# --- API keys

NOW = 1e9
KEY, RECORD = mint("t", bytes(range(37)), NOW)
RECORDS = [msgspec.to_builtins(RECORD), {**msgspec.to_builtins(RECORD), "id": "aaaaaaaa", "expires": NOW + 10}]
KEY_FILES = [{"version": 1, "keys": RECORDS}, {"keys": []}]
CREDENTIALS = (KEY.encode(), b"Bearer " + KEY.encode(), b"bearer  " + KEY.encode(), b"fb-aaaaaaaa-" + b"a" * 52)


@given(json_bytes(KEY_FILES, ["é" * 64, "\ud800"]), mutated(CREDENTIALS) | st.binary(max_size=80))
def test_any_key_file_is_read_or_refused_and_any_credential_is_good_or_not(content: bytes, presented: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        keys = survives(lambda _: read_keys(Path(file.name)), b"", KeyFileError)
    if keys is None:
        return
    directory = Directory([Tenant("t")], keys)
    for each in (presented, KEY.encode()):
        verdict = authorise(directory, each, NOW)
        assert isinstance(verdict, Denied | Granted)
        if isinstance(verdict, Granted):
            assert KEY.encode() in each


# --- records

DECISION = Decision(1.0, "a", "m", "t", 200, "ok", 0.5)
PACKED, PACKED_ONE = msgspec.msgpack.encode([DECISION]), msgspec.msgpack.encode(DECISION)
chain = Chain("c", Head())
BATCHES = []
for events in (("gap", "broken"), ("request",), ("pruned", "witness", "killed", "request")):
    for event in events:
        chain.add(AuditLine(0, event, 1.0, request_id="r", pruned_seq=1, pruned_hash="0" * 64, other="d"))
    BATCHES.append(chain.seal(1.0))
AUDIT = b"".join(BATCHES)
LINE_WORDS = (
    b'"seq":2',
    b'"seq":9999999999999999999',
    b',"hash":"' + b"0" * 64 + b'"}\n',
    b'{"a":' * 2000,
    b"[" * 2000,
)


@given(mutated([frame([DECISION])], (b"\xc1fb2", b"\x00" * 16)) | st.binary(max_size=200))
def test_any_decision_file_is_read_as_far_as_it_is_whole(content: bytes) -> None:
    read = payloads(content)
    assert sum(map(len, read.whole)) <= len(content)
    for payload in read.whole:
        found = decisions(payload)
        assert not found or frame(found)


@given(
    mutated([PACKED, PACKED_ONE], (b"\x91" * DEEP, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"))
    | st.binary(max_size=200)
)
def test_any_payload_is_a_decision_or_nothing(payload: bytes) -> None:
    found = decisions(payload)
    assert not found or decisions(msgspec.msgpack.encode(found)) == found
    assert all(candidates(each.candidates) is not None for each in found)


@given(mutated([AUDIT, *BATCHES], LINE_WORDS), st.booleans())
def test_any_audit_file_is_verified_to_its_end(content: bytes, archived: bool) -> None:
    verifier = Verifier("c", chain.head, archived=archived)
    flaws = [verifier.feed(raw, number) for number, raw in enumerate(content.split(b"\n"), 1)]
    flaws += [verifier.end_file(), *verifier.finish()]
    moved_away = archived and AUDIT.removesuffix(b"\n").endswith(content.removesuffix(b"\n"))  # on purpose
    if content.removesuffix(b"\n") != AUDIT.removesuffix(b"\n") and not moved_away:
        assert any(flaws)
    assert verifier.last.seq >= 0
    assert verifier.against(Head(verifier.last.seq + 1, "0" * 64), "d") is not None
    assert verifier.reach >= 0


@given(mutated([AUDIT, *BATCHES], LINE_WORDS))
def test_the_end_of_any_audit_file_is_found_and_no_line_is_read_twice(content: bytes) -> None:
    end = end_of(content)
    assert content.endswith(end.unsealed + content[len(content) - end.torn_bytes :])
    lines = sum(1 for _ in sound_lines(content.splitlines(keepends=True)))
    assert lines <= content.count(b"\n") + 1


# --- GGUF


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ENTRIES = (
    entry(b"general.architecture", 8, text(b"llama")),
    entry(b"llama.context_length", 4, struct.pack("<I", 4096)),
    entry(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text(b"<s>") + text(b"a")),
    entry(b"tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 0)),
    entry(b"general.alignment", 4, struct.pack("<I", 32)),
)
TENSOR = text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0)
GGUFS = (
    b"GGUF" + struct.pack("<IQQ", 3, 1, len(ENTRIES)) + b"".join(ENTRIES) + TENSOR + bytes(96),
    b"GGUF" + struct.pack("<IQQ", 2, 0, 1) + ENTRIES[0],
    b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + ENTRIES[3] + entry(b"tokenizer.ggml.tokens", 4, struct.pack("<I", 7)),
)
GGUF_WORDS = (
    *ENTRIES,
    struct.pack("<Q", 2**63),
    struct.pack("<Q", 16_000_000),
    struct.pack("<I", 9) * 8,
    entry(b"general.architecture", 9, struct.pack("<IQ", 9, 0)),
)


@given(mutated(GGUFS, GGUF_WORDS))
def test_any_gguf_header_is_read_or_the_file_is_refused(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        header: Header | None = survives(lambda _: read_header(Path(file.name)), b"", EngineBroken)
    if header is not None:
        header.of_model("context_length")
        assert isinstance(header.token("bos"), str | None)
        assert all(tensor.offset >= 0 for tensor in header.tensors)
