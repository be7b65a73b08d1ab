"""Validation of `batch_input` and `batch_output`: the rules are those of Triton's core, `ValidateBatchIO`."""

from typing import Final

from forebay.modelserver.repository.form.fill import Message, Problems
from forebay.modelserver.repository.form.schema import enum_name

MADE_TYPES: Final = ("TYPE_INT32", "TYPE_FP32")


def check(message: Message, problems: Problems) -> None:
    """Report all problems of tensors that describe the shape of a batch."""
    inputs = {spec.name for spec in message.input}
    outputs = {spec.name: spec for spec in message.output}
    taken = set(inputs)
    for index, given in enumerate(message.batch_input):
        path = f"batch_input[{index}]"
        _source(message, given, path, problems)
        found = enum_name(given, "data_type")
        if found not in MADE_TYPES:
            problems.add(f"{path}.data_type", f"found {found}; allowed: {', '.join(MADE_TYPES)}")
        _targets(given, path, taken, problems)
    scattered: set[str] = set()
    for index, given in enumerate(message.batch_output):
        path = f"batch_output[{index}]"
        source = _source(message, given, path, problems)
        _targets(given, path, scattered, problems)
        for name in given.target_name:
            spec = outputs.get(name)
            if spec is None or not spec.dims:
                problems.add(f"{path}.target_name", f"found {name!r}; allowed: an output with its dims")
            elif source is not None and -1 in list(_made(spec))[len(source.dims) :]:
                problems.add(f"{path}.target_name", f"{name!r} has a variable dimension that '{source.name}' lacks")


def _made(spec: Message) -> list[int]:
    return list(spec.reshape.shape if spec.HasField("reshape") else spec.dims)


def _source(message: Message, given: Message, path: str, problems: Problems) -> Message | None:
    """The source input, if it is valid."""
    if message.max_batch_size < 1:
        problems.add(path, "needs a max_batch_size of 1 or more")
    names = list(given.source_input)
    found = next((spec for spec in message.input if [spec.name] == names), None)
    if found is None:
        problems.add(f"{path}.source_input", f"found {names}; allowed: the name of one input")
    return found


def _targets(given: Message, path: str, taken: set[str], problems: Problems) -> None:
    if not given.target_name:
        problems.add(f"{path}.target_name", "must be given")
    for name in given.target_name:
        if not name or name in taken:
            problems.add(f"{path}.target_name", f"found {name!r}; allowed: a name, each once")
        taken.add(name)
