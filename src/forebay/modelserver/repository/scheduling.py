"""Validation of scheduling: batching, sequences, ensembles, the response cache."""

from collections.abc import Sequence
from typing import Final

from forebay.core.serving.config import VARIABLE
from forebay.modelserver.repository.defaults import ENSEMBLE
from forebay.modelserver.repository.form.fill import Message, Problems
from forebay.modelserver.repository.form.schema import enum_name
from forebay.modelserver.repository.paths import path_problem

LEVELS_MAX: Final = 1_000
"""Priority levels per model; each has a queue."""
CORRELATION_TYPES: Final = ("TYPE_INT32", "TYPE_INT64", "TYPE_STRING", "TYPE_UINT32", "TYPE_UINT64")

_FALSE_TRUE = ("int32_false_true", "fp32_false_true", "bool_false_true")


def check(message: Message, problems: Problems) -> None:
    """Report all problems with the scheduling of a configuration."""
    if message.HasField("dynamic_batching"):
        _dynamic(message, problems)
    if message.HasField("sequence_batching"):
        _sequences(message, problems)
    if message.HasField("ensemble_scheduling"):
        _ensemble(message, problems)
    elif message.platform == ENSEMBLE:
        problems.add("ensemble_scheduling", "must be given for an ensemble")
    if message.response_cache.enable:
        if message.HasField("sequence_batching"):
            problems.add("response_cache.enable", "responses within a sequence cannot be cached")
        if message.model_transaction_policy.decoupled:
            problems.add("response_cache.enable", "responses of a decoupled model cannot be cached")


def _preferred(sizes: Sequence[int], path: str, max_batch: int, problems: Problems) -> None:
    for index, size in enumerate(sizes):
        if size < 1:
            problems.add(f"{path}[{index}]", f"found {size}; allowed: 1 or more")
        elif size > max_batch:
            problems.add(f"{path}[{index}]", f"found {size}; allowed: at most max_batch_size ({max_batch})")


def _dynamic(message: Message, problems: Problems) -> None:
    batching, path = message.dynamic_batching, "dynamic_batching."
    _preferred(batching.preferred_batch_size, f"{path}preferred_batch_size", message.max_batch_size, problems)
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels > LEVELS_MAX:
        problems.add(f"{path}priority_levels", f"found {levels}; allowed: at most {LEVELS_MAX}")
    if levels and not 1 <= default <= levels:
        problems.add(f"{path}default_priority_level", f"found {default}; allowed: 1 to priority_levels ({levels})")
    if batching.preserve_ordering and levels > 1:
        problems.add(f"{path}preserve_ordering", f"requires a single priority level; found {levels}")
    policies = [(f"{path}default_queue_policy.", batching.default_queue_policy)]
    for level in sorted(batching.priority_queue_policy):
        where = f"{path}priority_queue_policy[{level}]"
        if levels and not 1 <= level <= levels:
            problems.add(where, f"found level {level}; allowed: 1 to priority_levels ({levels})")
        policies.append((f"{where}.", batching.priority_queue_policy[level]))
    for where, policy in policies:
        late = policy.timeout_action == policy.DELAY and policy.default_timeout_microseconds
        if late and batching.preserve_ordering:
            problems.add(f"{where}timeout_action", "DELAY cannot be combined with preserve_ordering")


def _sequences(message: Message, problems: Problems) -> None:
    sequences, path = message.sequence_batching, "sequence_batching."
    if sequences.HasField("oldest"):
        oldest = sequences.oldest
        where = f"{path}oldest."
        _preferred(oldest.preferred_batch_size, f"{where}preferred_batch_size", message.max_batch_size, problems)
        if oldest.max_candidate_sequences < 0:
            problems.add(
                f"{where}max_candidate_sequences", f"found {oldest.max_candidate_sequences}; allowed: 0 or more"
            )
    share = sequences.direct.minimum_slot_utilization
    if not 0 <= share <= 1:
        problems.add(f"{path}direct.minimum_slot_utilization", f"found {share}; allowed: 0 to 1")
    _controls(sequences, problems)
    _states(message, problems)


def _controls(sequences: Message, problems: Problems) -> None:
    tensors, kinds = set(), set()
    for index, tensor in enumerate(sequences.control_input):
        path = f"sequence_batching.control_input[{index}]"
        if not tensor.name or tensor.name in tensors:
            problems.add(f"{path}.name", f"found {tensor.name!r}; allowed: a name, each tensor once")
        tensors.add(tensor.name)
        if len(tensor.control) != 1:
            problems.add(f"{path}.control", f"found {len(tensor.control)}; allowed: one for each tensor")
        for number, control in enumerate(tensor.control):
            kind = enum_name(control, "kind")
            where = f"{path}.control[{number}]"
            if kind in kinds:
                problems.add(f"{where}.kind", f"another tensor has {kind} already")
            kinds.add(kind)
            given = [name for name in _FALSE_TRUE if getattr(control, name)]
            if kind == "CONTROL_SEQUENCE_CORRID":
                if given:
                    problems.add(f"{where}.{given[0]}", f"cannot be combined with {kind}")
                found = enum_name(control, "data_type")
                if found not in CORRELATION_TYPES:
                    problems.add(f"{where}.data_type", f"found {found}; allowed: {', '.join(CORRELATION_TYPES)}")
            elif len(given) != 1:
                problems.add(where, f"found {given or 'none'}; allowed: one of {', '.join(_FALSE_TRUE)}")
            elif len(getattr(control, given[0])) != 2:
                problems.add(f"{where}.{given[0]}", "allowed: two values, the one for false and the one for true")


def _states(message: Message, problems: Problems) -> None:
    inputs: set[str] = set()
    outputs: set[str] = set()
    for index, state in enumerate(message.sequence_batching.state):
        path = f"sequence_batching.state[{index}]"
        for name, seen in (("input_name", inputs), ("output_name", outputs)):
            value = getattr(state, name)
            if not value or value in seen:
                problems.add(f"{path}.{name}", f"found {value!r}; allowed: a name, each once")
            seen.add(value)
        if not state.data_type:
            problems.add(f"{path}.data_type", "must be given")
        dims = list(state.dims)
        if not dims or any(dim < 1 and dim != VARIABLE for dim in dims):
            problems.add(f"{path}.dims", f"found {dims}; allowed: 1 or more, or -1 for any size")
        if len(state.initial_state) > 1:
            problems.add(f"{path}.initial_state", f"found {len(state.initial_state)}; allowed: one")
        for initial in state.initial_state[:1]:
            _initial(initial, state, f"{path}.initial_state[0]", problems)


def _initial(initial: Message, state: Message, path: str, problems: Problems) -> None:
    if not initial.name:
        problems.add(f"{path}.name", "must be given")
    if initial.data_type != state.data_type:
        found = enum_name(initial, "data_type")
        problems.add(
            f"{path}.data_type", f"found {found}; allowed: that of the state, {enum_name(state, 'data_type')}"
        )
    dims = list(initial.dims)
    fits = len(dims) == len(state.dims) and all(
        dim >= 1 and wanted in {dim, VARIABLE} for dim, wanted in zip(dims, state.dims, strict=True)
    )
    if not fits:
        problems.add(f"{path}.dims", f"found {dims}; allowed: sizes that fit the state's dims {list(state.dims)}")
    chosen = initial.WhichOneof("state_data")
    if chosen is None or (chosen == "zero_data" and not initial.zero_data):
        problems.add(path, "one of zero_data: true and data_file must be given")
    elif chosen == "data_file" and (trouble := path_problem(initial.data_file)):
        problems.add(f"{path}.data_file", trouble)


def _ensemble(message: Message, problems: Problems) -> None:
    if message.platform != ENSEMBLE:
        problems.add("ensemble_scheduling", f"needs platform: {ENSEMBLE!r}; found {message.platform!r}")
    for name in ("instance_group", "model_warmup"):
        if getattr(message, name):
            problems.add(name, "an ensemble has none of its own; its models may")
    if message.HasField("optimization"):
        problems.add("optimization", "an ensemble has none of its own; its models may")
    steps = message.ensemble_scheduling.step
    if not steps:
        problems.add("ensemble_scheduling.step", "must be given")
    for index, step in enumerate(steps):
        path = f"ensemble_scheduling.step[{index}]"
        if not step.model_name or step.model_name == message.name:
            problems.add(f"{path}.model_name", f"found {step.model_name!r}; allowed: the name of another model")
        if step.model_version < -1:
            problems.add(
                f"{path}.model_version", f"found {step.model_version}; allowed: a version, or -1 for the latest"
            )
        if step.model_namespace:
            problems.add(f"{path}.model_namespace", "there are no namespaces here: model names are unique")
        for name in ("input_map", "output_map"):
            given = getattr(step, name)
            if not given:
                problems.add(f"{path}.{name}", "must be given")
            for key in sorted(given):
                if not key or not given[key]:
                    problems.add(f'{path}.{name}["{key}"]', "both names must be given")
