"""Every configuration round-trips through text, JSON and config values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.modelserver.repository.writing import message_from

from forebay.core.serving.config import (
    BatchInput,
    BatchKind,
    BatchOutput,
    Control,
    Datatype,
    DynamicBatching,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    QueuePolicy,
    Resource,
    SequenceBatching,
    State,
    Step,
    TensorSpec,
    TimeoutAction,
    VersionPolicy,
    VersionRule,
    Warmup,
    WarmupInput,
)
from forebay.modelserver.repository import Found, Rules, read
from forebay.modelserver.repository.form.fill import Problems, fill
from forebay.modelserver.repository.form.pbtxt import parse_text
from forebay.modelserver.repository.form.reading import values_of
from forebay.modelserver.repository.form.schema import document_of, empty

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)
NAMES = TEXT.filter(bool)
DATATYPES = st.sampled_from(list(Datatype))
SECONDS = st.integers(0, 10**12).map(lambda us: us / 1e6)
SIZES = st.integers(1, 9)
DIMS = st.lists(st.just(-1) | SIZES, min_size=1, max_size=4).map(tuple)
FIXED = st.lists(SIZES, min_size=1, max_size=4).map(tuple)
PREFERRED = st.sets(SIZES, min_size=1, max_size=3).map(lambda sizes: tuple(sorted(sizes)))
GPUS = (0, 1, 2)
BATCH_MAX = 9


def distinct(values: st.SearchStrategy[Any], by: str, min_size: int = 0) -> st.SearchStrategy[Any]:
    return st.lists(values, min_size=min_size, max_size=3, unique_by=lambda each: getattr(each, by)).map(tuple)


@st.composite
def reshaped(draw: st.DrawFn, spec: TensorSpec) -> TensorSpec:
    return replace(spec, reshape=draw(st.none() | st.just((1, *spec.dims, 1))))


INPUTS = st.builds(
    TensorSpec,
    NAMES,
    DATATYPES,
    DIMS,
    optional=st.booleans(),
    allow_ragged=st.booleans(),
    format=st.just("FORMAT_NONE"),
).flatmap(reshaped)
IMAGES = st.builds(
    TensorSpec,
    NAMES,
    DATATYPES,
    st.tuples(SIZES, SIZES, SIZES),
    format=st.sampled_from(["FORMAT_NHWC", "FORMAT_NCHW"]),
)
OUTPUTS = st.builds(TensorSpec, NAMES, DATATYPES, DIMS).flatmap(reshaped)


def with_batch_tensors(config: ModelConfig) -> "st.SearchStrategy[ModelConfig]":
    """The configuration with batch inputs and outputs, which refer to its own tensors."""
    if not config.inputs:
        return st.just(config)
    sources, names = st.sampled_from([spec.name for spec in config.inputs]), {spec.name for spec in config.inputs}
    kinds, types = st.sampled_from(list(BatchKind)), st.sampled_from([Datatype.INT32, Datatype.FP32])
    target = NAMES.filter(lambda name: name not in names)
    made = st.builds(BatchInput, kinds, target.map(lambda name: (name,)), types, sources)
    fixed = [spec.name for spec in config.outputs if -1 not in (spec.dims if spec.reshape is None else spec.reshape)]
    scattered = [BatchOutput((name,), config.inputs[0].name) for name in fixed[:1]]
    return st.lists(made, max_size=2, unique_by=lambda each: each.targets).flatmap(
        lambda given: st.sampled_from(
            [
                replace(config, batch_inputs=tuple(given)),
                replace(config, batch_inputs=tuple(given), batch_outputs=tuple(scattered)),
            ]
        )
    )


QUEUES = st.builds(
    QueuePolicy, st.sampled_from(list(TimeoutAction)), SECONDS, st.booleans(), st.integers(0, 2**32 - 1)
)
DYNAMIC = st.builds(
    DynamicBatching,
    preferred_sizes=PREFERRED,
    delay_s=SECONDS,
    levels=st.just(3),
    default_level=st.integers(1, 3),
    default_policy=QUEUES,
    policies=st.dictionaries(st.integers(1, 3), QUEUES),
    age_step_s=st.integers(0, 10**6).map(lambda ms: ms / 1e3),
) | st.builds(DynamicBatching, preferred_sizes=PREFERRED, preserve_ordering=st.booleans())
FLAGS = st.builds(
    lambda tensor, kind, pair: Control(tensor, kind, *pair),
    NAMES,
    st.sampled_from(["START", "END", "READY"]),
    st.sampled_from([(Datatype.INT32, (-1, 5)), (Datatype.FP32, (0.0, 0.5)), (Datatype.BOOL, (True, False))]),
)
CORRIDS = st.builds(Control, NAMES, st.just("CORRID"), st.sampled_from([Datatype.UINT64, Datatype.BYTES]))
CONTROLS = st.lists(FLAGS | CORRIDS, max_size=4, unique_by=(lambda c: c.tensor, lambda c: c.kind)).map(tuple)
STATES = st.lists(
    st.builds(State, NAMES, NAMES, DATATYPES, FIXED).flatmap(
        lambda state: st.sampled_from([state, replace(state, initial_dims=state.dims)])
    ),
    max_size=3,
    unique_by=(lambda s: s.input, lambda s: s.output),
).map(tuple)
ABOUT_ALL = {
    "idle_max_s": st.integers(1, 10**12).map(lambda us: us / 1e6),
    "controls": CONTROLS,
    "states": STATES,
    "delay_s": SECONDS,
    "iterative": st.booleans(),
}
SEQUENCES = st.builds(
    SequenceBatching,
    oldest=st.just(True),
    preferred_sizes=PREFERRED,
    candidates_max=st.integers(0, 2**31 - 1),
    preserve_ordering=st.booleans(),
    **ABOUT_ALL,
) | st.builds(SequenceBatching, minimum_slot_utilization=st.integers(0, 1000).map(lambda n: n / 1000), **ABOUT_ALL)
GROUPS = st.builds(
    InstanceGroup,
    NAMES,
    st.sampled_from([InstanceKind.CPU, InstanceKind.MODEL]),
    SIZES,
    passive=st.booleans(),
    host_policy=TEXT,
    resources=distinct(st.builds(Resource, NAMES, st.integers(0, 2**32 - 1), st.booleans()), "name"),
    priority=st.integers(0, 2**32 - 1),
) | st.builds(
    InstanceGroup, NAMES, st.just(InstanceKind.GPU), SIZES, st.sets(st.sampled_from(GPUS), min_size=1).map(tuple)
)
VERSIONS = st.one_of(
    st.builds(VersionPolicy, count=SIZES),
    st.just(VersionPolicy(VersionRule.ALL)),
    st.sets(st.integers(0, 2**63 - 1), min_size=1).map(
        lambda versions: VersionPolicy(VersionRule.SPECIFIC, versions=tuple(sorted(versions)))
    ),
)
WARMUPS = st.builds(
    Warmup,
    TEXT,
    st.integers(1, BATCH_MAX),
    st.dictionaries(
        NAMES, st.builds(WarmupInput, DATATYPES, FIXED, st.sampled_from(["zero", "random"])), min_size=1, max_size=2
    ),
    st.integers(0, 2**32 - 1),
)
SCHEDULED = st.fixed_dictionaries({}, optional={"batching": DYNAMIC, "cache": st.booleans()}) | st.fixed_dictionaries(
    {"sequences": SEQUENCES}, optional={"decoupled": st.booleans()}
)
MODELS = SCHEDULED.flatmap(
    lambda scheduled: st.builds(
        ModelConfig,
        name=st.just("m"),
        backend=st.just("python"),
        graph_level=st.integers(-1, 2),
        platform=TEXT.filter(lambda name: name not in {"ensemble", "libtorch"}),
        max_batch=st.just(BATCH_MAX),
        inputs=distinct(INPUTS | IMAGES, "name"),
        outputs=distinct(OUTPUTS, "name"),
        versions=VERSIONS,
        instances=st.lists(GROUPS, min_size=1, max_size=3).map(tuple),
        parameters=st.dictionaries(TEXT, TEXT, max_size=3),
        model_file=st.sampled_from(["model.py", "sub/other.py"]),
        warmups=st.lists(WARMUPS, max_size=2).map(tuple),
        **{name: st.just(value) for name, value in scheduled.items()},
    )
).flatmap(with_batch_tensors)
MAPS = st.dictionaries(NAMES, NAMES, min_size=1, max_size=3)
ENSEMBLES = st.builds(
    ModelConfig,
    name=st.just("m"),
    backend=st.just("ensemble"),
    platform=st.just("ensemble"),
    max_batch=SIZES,
    inputs=distinct(INPUTS, "name"),
    outputs=distinct(OUTPUTS, "name"),
    versions=VERSIONS,
    instances=st.just(()),
    steps=st.lists(
        st.builds(Step, NAMES.filter(lambda n: n != "m"), st.integers(-1, 2**63 - 1), MAPS, MAPS),
        min_size=1,
        max_size=3,
    ).map(tuple),
    inflight_max=st.integers(0, 2**32 - 1),
    cache=st.booleans(),
)
FILES = ModelConfig(
    "m",
    "python",
    sequences=SequenceBatching(states=(State("i", "o", Datatype.INT8, (-1,), "zeros", (3,)),)),
    warmups=(Warmup("w", 1, {"i": WarmupInput(Datatype.INT8, (3,), "file", "threes")}),),
)
RULES = Rules(gpus=GPUS)
NOWHERE = Found("m", Path())


@settings(max_examples=examples(150))
@given(MODELS | ENSEMBLES)
def test_configurations_round_trip_through_text_and_json(config: ModelConfig) -> None:
    message, again, problems = message_from(config), empty(), Problems()
    text = text_format.MessageToString(message)
    fill(again, parse_text(text.encode()), problems)

    assert problems.found == []
    assert again == message == text_format.Parse(text, empty())
    assert read(NOWHERE, json.dumps(document_of(message)), rules=RULES).config == config


def test_file_names_round_trip() -> None:
    assert values_of(message_from(FILES)) == FILES
