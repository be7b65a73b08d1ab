"""Completes a configuration with what the loaded model reports.

For every backend, the rules are those of Triton's for ONNX Runtime (`AutoCompleteConfig`, `CompareDimsSupported`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from forebay.core.serving.config import VARIABLE, ModelConfig, TensorSpec
from forebay.engines.tensor.protocol import Loaded
from forebay.modelserver.repository.check import check, check_whole
from forebay.modelserver.repository.defaults import normalise
from forebay.modelserver.repository.describing import describe
from forebay.modelserver.repository.form.fill import Message, Problems
from forebay.modelserver.repository.form.schema import TYPE_NAMES, enum_name, message_of
from forebay.modelserver.repository.form.writing import write_dynamic, write_tensor
from forebay.modelserver.repository.values import BadModel, Described, Rules

ADOPTED: Final = ("instance_group", "version_policy")
"""Fields that can change while a version serves."""


def complete(described: Described, loaded: Loaded, rules: Rules | None = None) -> Described:
    """The complete configuration. Raises `BadModel` if it contradicts the model, showing both."""
    if described.config.steps:
        return described  # an ensemble: its steps have been checked against each other
    rules = rules or Rules()
    message, problems = message_of(described.document), Problems()
    if loaded.config is not None:
        _from_model(message, loaded.config)
    elif loaded.inputs or loaded.outputs:
        _from_file(message, loaded, problems, rules)
        _sequence_tensors(described.config, loaded, problems)
    elif message.backend == "pytorch" and not (message.input and message.output):
        problems.add("input", "must be given, and output too: the file does not name its tensors")
    normalise(message)
    check(message, described.config.name, problems, rules)
    check_whole(message, problems)
    if problems:
        raise BadModel(described.config.name, problems.found)
    return describe(message, described, rules)


def same_but_instances(old: Described, new: Described) -> bool:
    """Whether only instances and the version policy differ, so that no model needs to be reloaded.

    Does not cover the files: compare `Found.stamp`.
    """
    return all(
        old.document.get(name) == new.document.get(name)
        for name in (old.document.keys() | new.document.keys()) - set(ADOPTED)
    )


def _from_model(message: Message, config: ModelConfig) -> None:
    """Take over the configuration from a model that completes its own (it was given all that is configured)."""
    message.max_batch_size = config.max_batch
    for name, specs in (("input", config.inputs), ("output", config.outputs)):
        message.ClearField(name)
        for spec in specs:
            write_tensor(getattr(message, name).add(), spec)
    if config.batching is not None and message.WhichOneof("scheduling_choice") is None:
        write_dynamic(message, config.batching)
    if message.HasField("model_transaction_policy") or config.decoupled:
        message.model_transaction_policy.decoupled = config.decoupled


def _from_file(message: Message, loaded: Loaded, problems: Problems, rules: Rules) -> None:
    if rules.auto_complete and not (message.input and message.output):
        most = rules.max_batch_of.get(message.backend, rules.max_batch_default)
        _batches(message, loaded, problems, most)
    sequences = message.sequence_batching
    fed = {tensor.name for tensor in sequences.control_input} | {state.input_name for state in sequences.state}
    fed |= _made(message, loaded, problems)
    kept = {state.output_name for state in sequences.state}
    for kind, specs, apart in (("input", loaded.inputs, fed), ("output", loaded.outputs, kept)):
        declared = getattr(message, kind)
        if declared or not rules.auto_complete:
            _compare(message, kind, specs, apart, problems)
        else:
            batches = message.max_batch_size > 0
            for spec in specs:
                if spec.name not in apart and not (batches and spec.optional and spec.dims[:1] != (VARIABLE,)):
                    write_tensor(declared.add(), _derived(spec, batches))


def _made(message: Message, loaded: Loaded, problems: Problems) -> set[str]:
    """Inputs that are generated for each batch; the model must have them."""
    known = {spec.name: spec for spec in loaded.inputs}
    names = set()
    for index, given in enumerate(message.batch_input):
        for name in given.target_name:
            names.add(name)
            spec, found = known.get(name), enum_name(given, "data_type")
            if spec is None:
                text = f"found {name!r}; the model's inputs are {sorted(known)}"
                problems.add(f"batch_input[{index}].target_name", text)
            elif TYPE_NAMES[spec.datatype] != found:
                text = f"found {found} for '{name}'; the model has {TYPE_NAMES[spec.datatype]}"
                problems.add(f"batch_input[{index}].data_type", text)
    return names


def _sequence_tensors(config: ModelConfig, loaded: Loaded, problems: Problems) -> None:
    """Controls and states, which the server feeds itself: the model must have them, of that datatype."""
    if config.sequences is None:
        return
    inputs = {spec.name: spec for spec in loaded.inputs}
    outputs = {spec.name: spec for spec in loaded.outputs}
    named = [
        (f"control_input[{index}]", "name", control.tensor, control.datatype, "input", inputs)
        for index, control in enumerate(config.sequences.controls)
    ]
    for index, state in enumerate(config.sequences.states):
        named.append((f"state[{index}]", "input_name", state.input, state.datatype, "input", inputs))
        named.append((f"state[{index}]", "output_name", state.output, state.datatype, "output", outputs))
    for where, field, name, datatype, kind, specs in named:
        path, spec = f"sequence_batching.{where}", specs.get(name)
        if spec is not None and spec.datatype != datatype:
            text = f"found {TYPE_NAMES[datatype]} for '{name}'; the model has {TYPE_NAMES[spec.datatype]}"
            problems.add(path, text)
        elif spec is None and config.backend != "pytorch":  # whose programs may take what they do not name
            problems.add(f"{path}.{field}", f"found {name!r}; the model's {kind}s are {sorted(specs)}")


def _batches(message: Message, loaded: Loaded, problems: Problems, max_batch_default: int) -> None:
    # inputs that are optional in the file, such as its weights, need not be sent
    needed = [spec for spec in (*loaded.inputs, *loaded.outputs) if not spec.optional]
    fixed = next((spec for spec in needed if spec.dims[:1] != (VARIABLE,)), None)
    if fixed is not None:
        if message.max_batch_size > 0:
            problems.add(
                "max_batch_size",
                f"found {message.max_batch_size}, but the model does not batch: '{fixed.name}' has the shape "
                f"{list(fixed.dims)}, which does not begin with -1",
            )
        return
    if message.max_batch_size == 0:
        inputs = [given for given in message.input if not given.allow_ragged_batch]
        if _whole(inputs, loaded.inputs) or _whole(message.output, loaded.outputs):
            return
        message.max_batch_size = max(max_batch_default, 0)
    if message.max_batch_size > 1 and message.WhichOneof("scheduling_choice") is None:
        message.dynamic_batching.SetInParent()


def _whole(declared: Iterable[Message], specs: Sequence[TensorSpec]) -> bool:
    """Whether a declared tensor has all dimensions of the file's, the batch included."""
    ranks = {spec.name: len(spec.dims) for spec in specs}
    return any(len(given.dims) == ranks.get(given.name) and not given.HasField("reshape") for given in declared)


def _derived(spec: TensorSpec, batches: bool) -> TensorSpec:
    dims = spec.dims[1:] if batches else spec.dims
    # The protocol has no scalars; they are represented as one element.
    return replace(spec, dims=dims or (1,), reshape=None if dims else ())


def _compare(message: Message, kind: str, specs: Sequence[TensorSpec], apart: set[str], problems: Problems) -> None:
    found = {spec.name: spec for spec in specs}
    declared = getattr(message, kind)
    scattered = {name for each in message.batch_output for name in each.target_name} if kind == "output" else ()
    for index, given in enumerate(declared):
        spec = found.get(given.name)
        path = f"{kind}[{index}]"
        if spec is None:
            problems.add(f"{path}.name", f"found {given.name!r}; the model's {kind}s are {sorted(found)}")
            continue
        batches = message.max_batch_size > 0
        if not given.data_type and not given.dims:
            derived = _derived(spec, batches)
            given.dims.extend(derived.dims)
            if derived.reshape is not None and not given.HasField("reshape"):
                given.reshape.SetInParent()
        expected = TYPE_NAMES[spec.datatype]
        if not given.data_type:
            given.data_type = given.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name[expected].number
        elif enum_name(given, "data_type") != expected:
            was = enum_name(given, "data_type")
            problems.add(f"{path}.data_type", f"found {was} for '{spec.name}'; the model has {expected}")
        if kind == "input" and given.allow_ragged_batch:
            if batches and len(spec.dims) != 1:
                text = f"'{spec.name}' is ragged, so a batch has it in one dimension; the model has {list(spec.dims)}"
                problems.add(f"{path}.allow_ragged_batch", text)
        elif given.dims and given.name not in scattered:
            _compare_shape(given, spec, path, message, problems)
    names = {given.name for given in declared}
    absent = sorted(s.name for s in specs if s.name not in names and s.name not in apart and not s.optional)
    if kind == "input" and absent:
        problems.add(kind, f"the model also has {absent}, and needs them")


def _compare_shape(given: Message, spec: TensorSpec, path: str, message: Message, problems: Problems) -> None:
    batches = message.max_batch_size > 0
    if not spec.dims and not batches and not given.HasField("reshape"):
        if set(given.dims) == {1}:
            given.reshape.SetInParent()  # the only form of a scalar that Triton takes without batches
        elif message.backend == "onnxruntime":
            return  # of an unknown rank, which ONNX Runtime shows like a scalar: the configuration counts
    shape = list(given.reshape.shape if given.HasField("reshape") else given.dims)
    whole = [VARIABLE, *shape] if batches else shape
    fits = len(whole) == len(spec.dims) and all(
        has in {VARIABLE, wants} for has, wants in zip(spec.dims, whole, strict=True)
    )
    if batches and spec.dims[:1] != (VARIABLE,):
        fits = False
    if not fits:
        means = f"{whole} with the batch in front (max_batch_size is not 0)" if batches else f"{whole}"
        problems.add(f"{path}.dims", f"'{spec.name}' is {means}; the model has {list(spec.dims)}")
