"""Converts a validated configuration message into values: times in seconds, enums by our names."""

from typing import Final

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
from forebay.modelserver.repository.form.fill import Message
from forebay.modelserver.repository.form.schema import TYPES, enum_name

AGE_STEP: Final = "forebay.age_step_ms"
TIME_MAX_S: Final = 365 * 86_400.0
"""Longer times mean forever, and would overflow some clocks and timers."""
CONTROL_PREFIX: Final = "CONTROL_SEQUENCE_"


def values_of(message: Message) -> ModelConfig:
    """The values of a message that `check` has accepted."""
    ensemble = message.HasField("ensemble_scheduling")
    parameters = {key: message.parameters[key].string_value for key in sorted(message.parameters)}
    age = age_step_s(parameters.pop(AGE_STEP, "0")) or 0.0
    return ModelConfig(
        name=message.name,
        backend="ensemble" if ensemble else message.backend,
        platform=message.platform,
        max_batch=message.max_batch_size,
        inputs=tuple(_tensor(spec) for spec in message.input),
        outputs=tuple(_tensor(spec) for spec in message.output),
        batch_inputs=tuple(_batch_input(each) for each in message.batch_input),
        batch_outputs=tuple(BatchOutput(tuple(e.target_name), e.source_input[0]) for e in message.batch_output),
        versions=_versions(message.version_policy),
        instances=() if ensemble else tuple(_group(group) for group in message.instance_group),
        batching=_dynamic(message.dynamic_batching, age) if message.HasField("dynamic_batching") else None,
        sequences=_sequences(message.sequence_batching) if message.HasField("sequence_batching") else None,
        steps=tuple(_step(step) for step in message.ensemble_scheduling.step),
        inflight_max=message.ensemble_scheduling.max_inflight_requests,
        parameters=parameters,
        model_file=message.default_model_filename,
        warmups=tuple(_warmup(warmup) for warmup in message.model_warmup),
        cache=message.response_cache.enable,
        decoupled=message.model_transaction_policy.decoupled,
        graph_level=message.optimization.graph.level,
    )


def age_step_s(value: str) -> float | None:
    """Parse milliseconds into seconds; None if invalid."""
    try:
        ms = float(value)
    except ValueError:
        return None
    return ms / 1e3 if 0 <= ms <= 3_600_000 else None


def _seconds(microseconds: int) -> float:
    return min(microseconds / 1e6, TIME_MAX_S)


def _datatype(message: Message) -> Datatype:
    # A datatype left open is known only after the model is loaded; until then any value will do.
    return TYPES.get(enum_name(message, "data_type"), Datatype.FP32)


def _tensor(spec: Message) -> TensorSpec:
    is_input = "optional" in spec.DESCRIPTOR.fields_by_name
    return TensorSpec(
        name=spec.name,
        datatype=_datatype(spec),
        dims=tuple(spec.dims),
        reshape=tuple(spec.reshape.shape) if spec.HasField("reshape") else None,
        optional=is_input and spec.optional,
        allow_ragged=is_input and spec.allow_ragged_batch,
        format=enum_name(spec, "format") if is_input else "FORMAT_NONE",
        label_file="" if is_input else spec.label_filename,
    )


def _batch_input(given: Message) -> BatchInput:
    kind = BatchKind(enum_name(given, "kind"))
    return BatchInput(kind, tuple(given.target_name), _datatype(given), given.source_input[0])


def _versions(policy: Message) -> VersionPolicy:
    if policy.HasField("latest"):
        return VersionPolicy(VersionRule.LATEST, policy.latest.num_versions)
    if policy.HasField("specific"):
        return VersionPolicy(VersionRule.SPECIFIC, versions=tuple(sorted(set(policy.specific.versions))))
    return VersionPolicy(VersionRule.ALL)


def _group(group: Message) -> InstanceGroup:
    limiter = group.rate_limiter
    return InstanceGroup(
        name=group.name,
        kind=InstanceKind(enum_name(group, "kind")),
        count=group.count,
        gpus=tuple(group.gpus),
        passive=group.passive,
        host_policy=group.host_policy,
        resources=tuple(Resource(r.name, r.count, getattr(r, "global")) for r in limiter.resources),
        priority=limiter.priority,
    )


def _queue(policy: Message) -> QueuePolicy:
    return QueuePolicy(
        TimeoutAction(enum_name(policy, "timeout_action")),
        _seconds(policy.default_timeout_microseconds),
        policy.allow_timeout_override,
        policy.max_queue_size,
    )


def _dynamic(batching: Message, age: float) -> DynamicBatching:
    policies = batching.priority_queue_policy
    return DynamicBatching(
        preferred_sizes=tuple(sorted(set(batching.preferred_batch_size))),
        delay_s=_seconds(batching.max_queue_delay_microseconds),
        preserve_ordering=batching.preserve_ordering,
        levels=batching.priority_levels,
        default_level=batching.default_priority_level,
        default_policy=_queue(batching.default_queue_policy),
        policies={level: _queue(policies[level]) for level in sorted(policies)},
        age_step_s=age,
    )


def _sequences(sequences: Message) -> SequenceBatching:
    oldest = sequences.HasField("oldest")
    strategy = sequences.oldest if oldest else sequences.direct
    return SequenceBatching(
        idle_max_s=_seconds(sequences.max_sequence_idle_microseconds),
        oldest=oldest,
        controls=tuple(_control(tensor.name, tensor.control[0]) for tensor in sequences.control_input),
        states=tuple(_state(state) for state in sequences.state),
        delay_s=_seconds(strategy.max_queue_delay_microseconds),
        minimum_slot_utilization=0.0 if oldest else round(strategy.minimum_slot_utilization, 6),
        preferred_sizes=tuple(sorted(set(strategy.preferred_batch_size))) if oldest else (),
        candidates_max=strategy.max_candidate_sequences if oldest else 0,
        preserve_ordering=strategy.preserve_ordering if oldest else False,
        iterative=sequences.iterative_sequence,
    )


def _control(tensor: str, control: Message) -> Control:
    kind = enum_name(control, "kind").removeprefix(CONTROL_PREFIX)
    if kind == "CORRID":
        return Control(tensor, kind, _datatype(control))
    given = {
        Datatype.INT32: control.int32_false_true,
        Datatype.FP32: control.fp32_false_true,
        Datatype.BOOL: control.bool_false_true,
    }
    [(datatype, pair)] = [(datatype, pair) for datatype, pair in given.items() if pair]
    return Control(
        tensor, kind, datatype, (float(pair[0]), float(pair[1]))
    )  # floats, because a bool could not be sent to the model's process


def _state(state: Message) -> State:
    initial = state.initial_state[0] if state.initial_state else None
    return State(
        input=state.input_name,
        output=state.output_name,
        datatype=_datatype(state),
        dims=tuple(state.dims),
        initial_file=initial.data_file if initial is not None else "",
        initial_dims=tuple(initial.dims) if initial is not None else (),
    )


def _step(step: Message) -> Step:
    inputs, outputs = step.input_map, step.output_map
    return Step(
        model=step.model_name,
        version=step.model_version,
        inputs={name: inputs[name] for name in sorted(inputs)},
        outputs={name: outputs[name] for name in sorted(outputs)},
    )


def _warmup(warmup: Message) -> Warmup:
    inputs = {}
    for name in sorted(warmup.inputs):
        given = warmup.inputs[name]
        fill = {"zero_data": "zero", "random_data": "random"}.get(given.WhichOneof("input_data_type"), "file")
        inputs[name] = WarmupInput(_datatype(given), tuple(given.dims), fill, given.input_data_file)
    return Warmup(warmup.name, warmup.batch_size, inputs, warmup.count)
