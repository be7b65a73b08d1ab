"""Writes values into a configuration message, for auto-completion."""

from forebay.core.serving.config import Datatype, DynamicBatching, QueuePolicy, TensorSpec
from forebay.modelserver.repository.form.fill import Message
from forebay.modelserver.repository.form.reading import AGE_STEP
from forebay.modelserver.repository.form.schema import TYPE_NAMES


def write_tensor(to: Message, spec: TensorSpec) -> None:
    """Set all fields of a `ModelInput` or `ModelOutput`."""
    to.name = spec.name
    to.data_type = type_number(to, spec.datatype)
    to.dims.extend(spec.dims)
    if spec.reshape is not None:
        to.reshape.SetInParent()
        to.reshape.shape.extend(spec.reshape)
    if "optional" in to.DESCRIPTOR.fields_by_name:
        to.optional = spec.optional
        to.allow_ragged_batch = spec.allow_ragged
        to.format = number(to, "format", spec.format)
    else:
        to.label_filename = spec.label_file


def write_dynamic(message: Message, batching: DynamicBatching) -> None:
    """Set the dynamic batching of a configuration, with a parameter for what Triton has no field for."""
    to = message.dynamic_batching
    to.SetInParent()
    to.preferred_batch_size.extend(batching.preferred_sizes)
    to.max_queue_delay_microseconds = microseconds(batching.delay_s)
    to.preserve_ordering = batching.preserve_ordering
    to.priority_levels = batching.levels
    to.default_priority_level = batching.default_level
    if batching.default_policy != QueuePolicy():
        _queue(to.default_queue_policy, batching.default_policy)
    for level, policy in batching.policies.items():
        _queue(to.priority_queue_policy[level], policy)
    if batching.age_step_s:
        message.parameters[AGE_STEP].string_value = f"{batching.age_step_s * 1e3:.12g}"


def microseconds(seconds: float) -> int:
    """Seconds in the unit of the file."""
    return round(seconds * 1e6)


def number(message: Message, field: str, name: str) -> int:
    """Number of an enum value, by its name."""
    found: int = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_name[name].number
    return found


def type_number(message: Message, datatype: Datatype) -> int:
    """The datatype's number in a `data_type` field."""
    return number(message, "data_type", TYPE_NAMES[datatype])


def _queue(to: Message, policy: QueuePolicy) -> None:
    to.timeout_action = number(to, "timeout_action", policy.timeout_action)
    to.default_timeout_microseconds = microseconds(policy.timeout_s)
    to.allow_timeout_override = policy.allow_override
    to.max_queue_size = policy.queue_max
