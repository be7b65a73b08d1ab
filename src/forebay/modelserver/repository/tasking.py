"""Validation of the tensors of a model with a task: its endpoint needs them."""

from forebay.core.task_tensors import BYTES, CONTRACTS, PARAMETER, Output
from forebay.modelserver.repository.form.fill import Message, Problems
from forebay.modelserver.repository.form.schema import TYPE_NAMES, enum_name


def check_task(message: Message, problems: Problems) -> None:
    """Report every tensor that the model's task needs and that is missing or has another datatype."""
    task = message.parameters[PARAMETER].string_value if PARAMETER in message.parameters else ""
    contract = CONTRACTS.get(task)
    if contract is None:
        return
    for name in contract.inputs:
        _check(message, "input", Output(name, BYTES), task, problems)
    for output in contract.outputs:
        _check(message, "output", output, task, problems)
    for index, spec in enumerate(message.input):
        if spec.name not in contract.inputs and not spec.optional:
            allowed = ", ".join(f"'{name}'" for name in contract.inputs)
            text = f"'{spec.name}' must be optional: the task '{task}' sends only {allowed}"
            problems.add(f"input[{index}].optional", text)


def _check(message: Message, kind: str, wanted: Output, task: str, problems: Problems) -> None:
    name = wanted.name
    types = [TYPE_NAMES[datatype] for datatype in wanted.datatypes]
    specs = list(getattr(message, kind))
    index = next((index for index, spec in enumerate(specs) if spec.name == name), None)
    if index is None:
        if not wanted.optional:
            has = ", ".join(f"'{spec.name}'" for spec in specs) or "none"
            text = f"the task '{task}' needs '{name}' ({types[0]}); found {has}"
            problems.add(kind, text)
    elif enum_name(specs[index], "data_type") not in types:
        found = enum_name(specs[index], "data_type")
        text = f"found {found} for '{name}'; allowed for the task '{task}': {', '.join(types)}"
        problems.add(f"{kind}[{index}].data_type", text)
