"""Config values to a complete configuration message: the inverse of what the product parses."""

from forebay.core.serving.config import (
    Control,
    Datatype,
    InstanceGroup,
    ModelConfig,
    SequenceBatching,
    State,
    VersionPolicy,
    VersionRule,
    WarmupInput,
)
from forebay.modelserver.repository.form.fill import Message
from forebay.modelserver.repository.form.reading import CONTROL_PREFIX
from forebay.modelserver.repository.form.schema import empty
from forebay.modelserver.repository.form.writing import (
    microseconds,
    number,
    type_number,
    write_dynamic,
    write_tensor,
)


def message_from(config: ModelConfig) -> Message:
    """The message that says what `config` says."""
    message = empty()
    ensemble = config.backend == "ensemble"
    message.name = config.name
    message.backend = "" if ensemble else config.backend
    message.platform = "ensemble" if ensemble else config.platform
    message.max_batch_size = config.max_batch
    for spec in config.inputs:
        write_tensor(message.input.add(), spec)
    for spec in config.outputs:
        write_tensor(message.output.add(), spec)
    for made in config.batch_inputs:
        to = message.batch_input.add(target_name=made.targets, source_input=[made.source])
        to.kind, to.data_type = number(to, "kind", made.kind), type_number(to, made.datatype)
    for scattered in config.batch_outputs:
        message.batch_output.add(target_name=scattered.targets, source_input=[scattered.source])
    _versions(message.version_policy, config.versions)
    for group in () if ensemble else config.instances:
        _group(message.instance_group.add(), group)
    for step in config.steps:
        to = message.ensemble_scheduling.step.add(model_name=step.model, model_version=step.version)
        to.input_map.update(step.inputs)
        to.output_map.update(step.outputs)
    if config.inflight_max:
        message.ensemble_scheduling.max_inflight_requests = config.inflight_max
    for key, value in config.parameters.items():
        message.parameters[key].string_value = value
    if config.batching is not None:
        write_dynamic(message, config.batching)
    if config.sequences is not None:
        _sequences(message.sequence_batching, config.sequences)
    message.default_model_filename = config.model_file
    if config.graph_level:
        message.optimization.graph.level = config.graph_level
    for warmup in config.warmups:
        made = message.model_warmup.add(name=warmup.name, batch_size=warmup.batch_size, count=warmup.count)
        for name, given in warmup.inputs.items():
            _warmup_input(made.inputs[name], given)
    if config.cache:
        message.response_cache.enable = True
    if config.decoupled:
        message.model_transaction_policy.decoupled = True
    return message


def _versions(to: Message, policy: VersionPolicy) -> None:
    if policy.rule is VersionRule.LATEST:
        to.latest.num_versions = policy.count
    elif policy.rule is VersionRule.ALL:
        to.all.SetInParent()
    else:
        to.specific.versions.extend(policy.versions)


def _group(to: Message, group: InstanceGroup) -> None:
    to.name = group.name
    to.kind = number(to, "kind", group.kind)
    to.count = group.count
    to.gpus.extend(group.gpus)
    to.passive = group.passive
    to.host_policy = group.host_policy
    for resource in group.resources:
        made = to.rate_limiter.resources.add(name=resource.name, count=resource.count)
        setattr(made, "global", resource.is_global)
    if group.priority:
        to.rate_limiter.priority = group.priority


def _sequences(to: Message, sequences: SequenceBatching) -> None:
    to.max_sequence_idle_microseconds = microseconds(sequences.idle_max_s)
    to.iterative_sequence = sequences.iterative
    if sequences.oldest:
        to.oldest.max_candidate_sequences = sequences.candidates_max
        to.oldest.preferred_batch_size.extend(sequences.preferred_sizes)
        to.oldest.max_queue_delay_microseconds = microseconds(sequences.delay_s)
        to.oldest.preserve_ordering = sequences.preserve_ordering
    else:
        to.direct.max_queue_delay_microseconds = microseconds(sequences.delay_s)
        to.direct.minimum_slot_utilization = sequences.minimum_slot_utilization
    for control in sequences.controls:
        _control(to.control_input.add(name=control.tensor).control.add(), control)
    for state in sequences.states:
        _state(to.state.add(), state)


def _control(to: Message, control: Control) -> None:
    to.kind = number(to, "kind", f"{CONTROL_PREFIX}{control.kind}")
    if control.kind == "CORRID":
        to.data_type = type_number(to, control.datatype)
    elif control.datatype is Datatype.INT32:
        to.int32_false_true.extend(int(value) for value in control.false_true)
    elif control.datatype is Datatype.FP32:
        to.fp32_false_true.extend(control.false_true)
    else:
        to.bool_false_true.extend(bool(value) for value in control.false_true)


def _state(to: Message, state: State) -> None:
    to.input_name = state.input
    to.output_name = state.output
    to.data_type = type_number(to, state.datatype)
    to.dims.extend(state.dims)
    if state.initial_dims:
        initial = to.initial_state.add(name=state.input, data_type=to.data_type, dims=state.initial_dims)
        if state.initial_file:
            initial.data_file = state.initial_file
        else:
            initial.zero_data = True


def _warmup_input(to: Message, given: WarmupInput) -> None:
    to.data_type = type_number(to, given.datatype)
    to.dims.extend(given.dims)
    if given.fill == "file":
        to.input_data_file = given.file
    elif given.fill == "random":
        to.random_data = True
    else:
        to.zero_data = True
