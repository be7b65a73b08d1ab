"""The models of the suite's own checks, as a repository for any server that reads Triton's format."""

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Final

TYPES: Final = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16",
    "BYTES",
)  # fmt: skip
"""All datatypes of the protocol; the model `types` has an optional input and an output of each."""


@dataclass(frozen=True, slots=True)
class Model:
    """A folder of the repository: `source` is a file of `models/`; None: without a model file."""

    name: str
    source: str | None
    config: str | None
    versions: tuple[int, ...] = (1,)
    files: dict[str, str] = field(default_factory=dict)
    loads: bool = True
    """False: servers must fail to load it."""


def _tensor(kind: str, name: str, datatype: str, dims: str, more: str = "") -> str:
    datatype = "STRING" if datatype == "BYTES" else datatype
    return f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: {dims} {more}}}\n'


def _in(name: str, datatype: str, dims: str, more: str = "") -> str:
    return _tensor("input", name, datatype, dims, more)


def _out(name: str, datatype: str, dims: str, more: str = "") -> str:
    return _tensor("output", name, datatype, dims, more)


def _python(max_batch: int, *parts: str) -> str:
    return f'backend: "python"\nmax_batch_size: {max_batch}\n' + "".join(parts) + _CPU


_CPU: Final = "instance_group { count: 1 kind: KIND_CPU }\n"
_VECTORS: Final = "".join(
    [_in("IN0", "FP32", "[4]"), _in("IN1", "FP32", "[4]"), _out("OUT0", "FP32", "[4]"), _out("OUT1", "FP32", "[4]")]
)
_LABELS: Final = _VECTORS.replace('name: "OUT0"', 'name: "OUT0" label_filename: "labels.txt"')


def _types() -> str:
    inputs = [_in(f"IN_{each}", each, "[-1]", "optional: true ") for each in TYPES]
    outputs = [_out(f"OUT_{each}", each, "[-1]") for each in TYPES]
    return _python(0, *inputs, *outputs)


def _probe(max_batch: int, more: str = "", sleep_ms: int = 0, dims: str = "[1]", ragged: bool = False) -> str:
    sleep = f'parameters {{ key: "sleep_ms" value {{ string_value: "{sleep_ms}" }} }}\n'
    given = _in("IN", "INT32", dims, "allow_ragged_batch: true " if ragged else "")
    return _python(max_batch, given, _out("TELL", "INT64", "[4]"), sleep, more)


def _sequence(strategy: str) -> str:
    controls = "".join(
        f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{name} {values} }} }}\n'
        for name, values in (
            ("START", "int32_false_true: [0, 1]"),
            ("END", "int32_false_true: [0, 1]"),
            ("READY", "int32_false_true: [0, 1]"),
            ("CORRID", "data_type: TYPE_UINT64"),
        )
    )
    batching = f"sequence_batching {{ max_sequence_idle_microseconds: 2000000 {strategy}\n{controls}}}\n"
    tensors = _in("IN", "INT32", "[1]"), _out("OUT", "INT32", "[4]"), _out("SEEN", "UINT64", "[1]")
    return _python(2, *tensors, batching)


def _ensemble(steps: str, *tensors: str, max_batch: int = 8) -> str:
    head = f'platform: "ensemble"\nmax_batch_size: {max_batch}\n'
    return head + "".join(tensors) + f"ensemble_scheduling {{\n{steps}}}\n"


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = "".join(f'input_map {{ key: "{key}" value: "{value}" }} ' for key, value in inputs.items())
    maps += "".join(f'output_map {{ key: "{key}" value: "{value}" }} ' for key, value in outputs.items())
    return f'step {{ model_name: "{model}" model_version: -1 {maps}}}\n'


def _batched(more: str = "") -> str:
    return f"dynamic_batching {{ {more} }}\n"


_CHAIN: Final = _ensemble(
    _step("add_sub", {"IN0": "A", "IN1": "B"}, {"OUT0": "sum", "OUT1": "difference"})
    + _step("add_sub", {"IN0": "sum", "IN1": "difference"}, {"OUT0": "twice_a", "OUT1": "twice_b"}),
    _in("A", "FP32", "[4]"), _in("B", "FP32", "[4]"), _out("twice_a", "FP32", "[4]"), _out("twice_b", "FP32", "[4]"),
)  # fmt: skip
_CHAIN_BROKEN: Final = _ensemble(
    _step("broken", {"HOW": "HOW"}, {"OUT": "OUT"}),
    _in("HOW", "BYTES", "[1]"), _out("OUT", "FP32", "[2]"),
    max_batch=4,
)  # fmt: skip
_LATE: Final = "default_queue_policy { timeout_action: %s default_timeout_microseconds: %d %s}"
_SHORT_QUEUE: Final = "default_queue_policy { max_queue_size: 2 }"
_WARMUP: Final = (
    'model_warmup { name: "w" batch_size: 1 count: 3 inputs { key: "IN" value { %s zero_data: true } } }\n'
)
_LIMITED: Final = (
    "instance_group { count: 1 kind: KIND_CPU rate_limiter { resources { name: 'R' global: true count: 1 } } }"
)


def _limited() -> str:
    return _probe(0, sleep_ms=200).replace(_CPU, _LIMITED + "\n")


def _models() -> list[Model]:
    text = _in("HOW", "BYTES", "[1]")
    repeated = _in("COUNT", "INT32", "[1]") + _in("WAIT_MS", "INT32", "[1]", "optional: true ")
    spoken = _in("text_input", "BYTES", "[1]") + _in("REPEAT", "INT32", "[1]", "optional: true ")
    decoupled = "model_transaction_policy { decoupled: true }\n"
    reshape = "reshape { shape: [2, 2] } "
    return [
        Model("types", "echo", _types()),
        Model("add_sub", "add_sub", _python(8, _LABELS), files={"labels.txt": "zero\none\ntwo\nthree\n"}),
        Model("plain", "add_sub", _python(0, _VECTORS)),
        Model("cached", "add_sub", _python(8, _VECTORS, "response_cache { enable: true }\n")),
        Model("reshaped", "echo", _python(4, _in("IN", "FP32", "[4]", reshape), _out("OUT", "FP32", "[4]", reshape))),
        Model("free", "echo", _python(4, _in("IN", "FP32", "[-1, 2]"), _out("OUT", "FP32", "[-1, 2]"))),
        Model("broken", "broken", _python(4, text, _out("OUT", "FP32", "[2]"), _batched())),
        Model("repeat", "repeat", _python(0, repeated, _out("OUT", "INT32", "[1]"), decoupled)),
        Model("speak", "speak", _python(0, spoken, _out("text_output", "BYTES", "[1]"), decoupled)),
        Model("about", "about", _python(0, _in("IN", "INT32", "[1]"), _out("ABOUT", "BYTES", "[1]"))),
        Model("calls", "calls", _python(0, text, _in("IN", "FP32", "[1, 4]"), _out("OUT", "FP32", "[1, 4]"))),
        Model("direct", "accumulate", _sequence("direct { }")),
        Model("oldest", "accumulate", _sequence("oldest { max_candidate_sequences: 4 }")),
        Model("chain", None, _CHAIN),
        Model("chain_broken", None, _CHAIN_BROKEN),
        *_scheduled(),
        *_versioned(),
        *_refused(),
    ]


def _scheduled() -> list[Model]:
    delay = "max_queue_delay_microseconds: 300000"
    levels = "priority_levels: 3 default_priority_level: 2"
    return [
        Model("serial", "probe", _probe(0, sleep_ms=100)),
        Model("delayed", "probe", _probe(16, _batched(delay), 50)),
        Model("preferred", "probe", _probe(16, _batched("preferred_batch_size: [4, 8] " + delay), 50)),
        Model("preferred_one", "probe", _probe(16, _batched("preferred_batch_size: [1, 4, 8] " + delay), 50)),
        Model("eager", "probe", _probe(4, _batched(), 200)),
        Model("unbatched", "probe", _probe(4, sleep_ms=100)),
        Model("shapes", "probe", _probe(8, _batched(delay), 50, "[-1]")),
        Model("ragged", "probe", _probe(8, _batched(delay), 50, "[-1]", ragged=True)),
        Model("priorities", "probe", _probe(1, _batched(levels), 150)),
        Model("queue_short", "probe", _probe(1, _batched(_SHORT_QUEUE), 300)),
        Model("queue_reject", "probe", _probe(1, _batched(_LATE % ("REJECT", 200000, "")), 400)),
        Model(
            "queue_override",
            "probe",
            _probe(1, _batched(_LATE % ("REJECT", 5000000, "allow_timeout_override: true ")), 400),
        ),
        Model("warm", "probe", _probe(4, _WARMUP % "data_type: TYPE_INT32 dims: [1]")),
        Model("pair", "probe", _probe(0, sleep_ms=300).replace("count: 1", "count: 2")),
        Model("limited_a", "probe", _limited()),
        Model("limited_b", "probe", _limited()),
    ]


def _versioned() -> list[Model]:
    policies = {"specific": "specific { versions: [1, 3] }", "all": "all { }", "latest": "latest { num_versions: 2 }"}
    return [
        Model(f"versions_{name}", "probe", _probe(0, f"version_policy {{ {policy} }}\n"), (1, 2, 3))
        for name, policy in policies.items()
    ]


def _refused() -> list[Model]:
    good = _python(0, _VECTORS)
    missing = _ensemble(
        _step("no_such_model", {"X": "A"}, {"Y": "B"}), _in("A", "FP32", "[4]"), _out("B", "FP32", "[4]")
    )
    cycle = _ensemble(
        _step("add_sub", {"IN0": "A", "IN1": "late"}, {"OUT0": "early"})
        + _step("add_sub", {"IN0": "A", "IN1": "early"}, {"OUT0": "late", "OUT1": "B"}),
        _in("A", "FP32", "[4]"), _out("B", "FP32", "[4]"),
    )  # fmt: skip
    return [
        Model("bad_syntax", "add_sub", good + "input [ {", loads=False),
        Model("bad_field", "add_sub", good + 'colour: "green"\n', loads=False),
        Model("bad_name", "add_sub", 'name: "other"\n' + good, loads=False),
        Model("bad_backend", "add_sub", good.replace('"python"', '"cobol"'), loads=False),
        Model("bad_version", "add_sub", good, versions=(), loads=False),
        Model("bad_file", None, good, loads=False),
        Model("bad_missing", None, missing, loads=False),
        Model("bad_cycle", None, cycle, loads=False),
        Model("bad_dims", "add_sub", good.replace("[4]", "[0]"), loads=False),
        Model("bad_start", "add_sub", good, files={"1/model.py": "raise RuntimeError('no')\n"}, loads=False),
    ]


MODELS: Final = {model.name: model for model in _models()}
"""Models by name."""


def write(folder: Path) -> None:
    """Write the repository into a folder, created if missing. Raises FileExistsError if one of its models exists."""
    sources = resources.files("forebay.cli.conformance.models")
    for model in MODELS.values():
        place = folder / model.name
        place.mkdir(parents=True)
        if model.config is not None:
            named = "" if model.config.startswith("name:") else f'name: "{model.name}"\n'
            (place / "config.pbtxt").write_text(named + model.config)
        for version in model.versions:
            (place / str(version)).mkdir()
            if model.source is not None:
                (place / str(version) / "model.py").write_text((sources / f"{model.source}.py").read_text())
        for name, text in model.files.items():
            (place / name).write_text(text)
