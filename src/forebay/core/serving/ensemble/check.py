"""Validation of ensembles, with all problems at once in Triton's words; and the load order of models.

Models that call others (`forebay.calls`) depend on them as an ensemble depends on its steps.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from forebay.core.serving.config import IN_PROCESS, VARIABLE, Datatype, ModelConfig, Step, TensorSpec

LATEST = -1
Lookup = Callable[[str, int], ModelConfig | None]
"""The completed configuration of a loaded model version (-1: the latest); None: it is not loaded."""


class Checked(NamedTuple):
    """The result of a check. `decoupled`: by step; `many`: a request of the ensemble may have several responses."""

    problems: tuple[str, ...]
    decoupled: tuple[bool, ...] = ()
    many: bool = False


class _Known(NamedTuple):
    """The type and shape of an ensemble's tensor, and the model that they come from."""

    model: str
    datatype: Datatype
    dims: tuple[int, ...]
    full_dims: tuple[int, ...]


def check(config: ModelConfig, lookup: Lookup) -> Checked:
    """Check an ensemble against the models of its steps. Set `many` as `decoupled` of its own configuration."""
    models = [lookup(step.model, step.version) for step in config.steps]
    decoupled = tuple(model is not None and model.decoupled for model in models)
    problems = [*_form(config), *_data_flow(config)]
    problems += _tensors(config, models, lookup)
    problems += _regions(config, decoupled)
    if config.in_process:
        problems += _in_process(config, models)
    return Checked(tuple(dict.fromkeys(problems)), decoupled, any(decoupled))


def lacks(config: ModelConfig, lookup: Lookup) -> tuple[str, ...]:
    """Why a model could not be served with the models that `lookup` knows."""
    problems = check(config, lookup).problems if config.backend == "ensemble" else ()
    calls = (each for each in config.calls if lookup(each, LATEST) is None)
    return (*problems, *(f"model '{config.name}' calls '{each}' which has no loaded version." for each in calls))


def abreast(config: ModelConfig, lookup: Lookup) -> int:
    """How many requests a model processes at once, not counting batching: one per instance; for an ensemble, the sum
    over its models."""
    if config.backend != "ensemble" or config.in_process:
        return max(1, config.instance_count)
    found = {(step.model, step.version): lookup(step.model, step.version) for step in config.steps}
    places = [abreast(model, lookup) for model in found.values() if model is not None]
    return max(1, sum(min(each, config.inflight_max or each) for each in places))


def _form(config: ModelConfig) -> Iterator[str]:
    name = config.name
    if not config.steps:
        yield f"must specify 'step' for ensemble '{name}'"
    if config.warmups:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    made = {spec.name for spec in config.inputs}
    for index, step in enumerate(config.steps):
        fields = (("model_name", step.model), ("input_map", step.inputs), ("output_map", step.outputs))
        for field, value in fields:
            if not value:
                yield f"must specify '{field}' in step {index} of ensemble '{name}'"
        for tensor in step.outputs.values():
            if tensor in made:  # that an input may not be overwritten is our rule: Triton would loop forever
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}'"
                    f" step {index}"
                )
            made.add(tensor)


def _data_flow(config: ModelConfig) -> Iterator[str]:
    name = config.name
    read = {tensor for step in config.steps for tensor in step.inputs.values()}
    makers = {tensor: step for step in config.steps for tensor in step.outputs.values()}
    for spec in config.inputs:
        if spec.name not in read and spec.name not in makers:
            yield f"ensemble input '{spec.name}' for ensemble {name}' is not used"  # the quote is Triton's
    circle = _circle(read, makers, config)
    if circle:
        yield f"circular dependency in ensemble '{name}': {', which needs '.join(map(repr, circle))}"
    ready = {spec.name for spec in config.inputs}
    for index in in_order(config):
        ready.update(config.steps[index].outputs.values())
    outputs = [spec.name for spec in config.outputs]
    for output in outputs:
        if output not in read and output not in makers:
            yield f"ensemble output '{output}' for ensemble {name}' is not used"
        elif output not in ready:
            source = _unconnected(output, makers, ready)
            because = f": at least one of its depending tensors, '{source}', is not connected"
            yield f"output '{output}' for ensemble '{name}' is not written{because if source != output else ''}"
    for tensor in sorted(read.union(makers).difference(outputs)):
        if tensor not in ready or tensor not in read:
            yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"


def _circle(read: Collection[str], makers: Mapping[str, Step], config: ModelConfig) -> list[str]:
    """A cycle of tensors, each depending on the next, the last being the first again; empty: there is none."""
    ready = {*(spec.name for spec in config.inputs), *(tensor for tensor in read if tensor not in makers)}
    for index in in_order(config, ready):
        ready.update(config.steps[index].outputs.values())
    left = sorted(makers.keys() - ready)
    if not left:
        return []
    walk = [left[0]]
    while True:  # each remaining tensor depends on another remaining one
        walk.append(min(tensor for tensor in makers[walk[-1]].inputs.values() if tensor not in ready))
        if walk[-1] in walk[:-1]:
            return walk[walk.index(walk[-1]) :]


def in_order(config: ModelConfig, given: Collection[str] = ()) -> list[int]:
    """The steps that can run, each after its dependencies; `given` tensors exist besides the inputs."""
    ready = {*given, *(spec.name for spec in config.inputs)}
    left, ordered = list(range(len(config.steps))), []
    while runnable := [index for index in left if ready.issuperset(config.steps[index].inputs.values())]:
        ordered += runnable
        left = [index for index in left if index not in runnable]
        ready.update(tensor for index in runnable for tensor in config.steps[index].outputs.values())
    return ordered


def _unconnected(tensor: str, makers: Mapping[str, Step], ready: Collection[str]) -> str:
    """Follow missing tensors from one to the root cause; each at most once, in case of a cycle."""
    seen = {tensor}
    while tensor in makers:
        lacking = [each for each in sorted(makers[tensor].inputs.values()) if each not in ready and each not in seen]
        if not lacking:
            break
        tensor = lacking[0]
        seen.add(tensor)
    return tensor


def _tensors(config: ModelConfig, models: list[ModelConfig | None], lookup: Lookup) -> Iterator[str]:
    known: dict[str, _Known] = {}
    for spec in (*config.inputs, *config.outputs):
        known.setdefault(spec.name, _known(config, spec, spec.dims if spec.reshape is None else spec.reshape))
    for step, model in zip(config.steps, models, strict=True):
        if model is None:
            yield _absent(config.name, step, lookup)
            continue
        if model.max_batch and model.max_batch < config.max_batch:
            yield (
                f"ensemble {config.name} allows maximum batch size {config.max_batch}, but it contains model"
                f" {step.model} which only allows maximum batch size to be {model.max_batch}"
            )
        yield from _mapping(config.name, step, model)
        specs = [(model.input(own), tensor) for own, tensor in step.inputs.items()]
        specs += [(model.output(own), tensor) for own, tensor in step.outputs.items()]
        for own_spec, tensor in specs:
            if own_spec is not None:
                found = _known(model, own_spec, own_spec.dims)
                yield from _difference(config.name, tensor, known.setdefault(tensor, found), found)


def _in_process(config: ModelConfig, models: list[ModelConfig | None]) -> Iterator[str]:
    """What cannot run within a batch of the ensemble."""
    start = f"ensemble '{config.name}' has {IN_PROCESS}"
    if config.inflight_max:
        yield f"{start}, and max_inflight_requests, which limits the requests to the models of other processes"
    pythons = {model.name for model in models if model is not None and model.backend == "python"}
    if len(pythons) > 1:  # the modules next to one would be found by the other
        yield f"{start}, but {len(pythons)} of its models are of the python backend; only one can be"
    for model in models:
        if model is None:
            continue
        batches = "batches" if model.max_batch else "does not batch"
        reasons = (
            (model.backend == "ensemble", "is an ensemble"),
            (model.decoupled, "is decoupled"),
            (model.sequences is not None, "has sequence_batching"),
            (bool(model.max_batch) != bool(config.max_batch), f"{batches}, unlike the ensemble"),
            (any(spec.reshape is not None for spec in (*model.inputs, *model.outputs)), "has tensors with reshape"),
            (any(group.resources for group in model.instances), "has rate_limiter resources"),
        )
        for applies, reason in reasons:
            if applies:
                yield f"{start}, but model '{model.name}' of its steps {reason}"


def _absent(ensemble: str, step: Step, lookup: Lookup) -> str:
    if step.version == LATEST or lookup(step.model, LATEST) is None:
        return f"ensemble '{ensemble}' depends on '{step.model}' which has no loaded version."
    return f"ensemble '{ensemble}' depends on '{step.model}' whose required version {step.version} is not loaded."


def _mapping(ensemble: str, step: Step, model: ModelConfig) -> Iterator[str]:
    start = f"in ensemble {ensemble}, "
    for own, tensor in step.inputs.items():
        if model.input(own) is None:
            yield f"{start}ensemble tensor {tensor} is mapping to non-existing input {own} in model {step.model}"
    for spec in model.inputs:
        if spec.name not in step.inputs and not spec.optional:
            yield f"{start}input {spec.name} in model {step.model} is not mapped to any ensemble tensors"
    for own, tensor in step.outputs.items():
        if model.output(own) is None:
            yield f"{start}ensemble tensor {tensor} is mapped from non-existing output {own} in model {step.model}"


def _known(config: ModelConfig, spec: TensorSpec, dims: tuple[int, ...]) -> _Known:
    return _Known(config.name, spec.datatype, dims, (VARIABLE, *dims) if config.max_batch else dims)


def _difference(ensemble: str, tensor: str, before: _Known, found: _Known) -> Iterator[str]:
    start = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if before.datatype is not found.datatype:
        yield (
            f"{start}inconsistent data type: {_type(before.datatype)} is inferred from model {before.model} while"
            f" {_type(found.datatype)} is inferred from model {found.model}"
        )
    elif not _alike(before.dims, found.dims) and not _alike(before.full_dims, found.full_dims):
        yield (
            f"{start}inconsistent shape: {_list(before.full_dims)} is inferred from model {before.model} while"
            f" {_list(found.full_dims)} is inferred from model {found.model}"
        )


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or VARIABLE in {a, b} for a, b in zip(one, other, strict=True))


def _type(datatype: Datatype) -> str:
    return "TYPE_STRING" if datatype is Datatype.BYTES else f"TYPE_{datatype}"


def _list(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _regions(config: ModelConfig, decoupled: tuple[bool, ...]) -> Iterator[str]:
    """A decoupled step opens a region: later steps run once per response of it, so regions must not mix."""
    text = "in ensemble {}, step of model '{}' receives inputs originated from different decoupled models"
    region = {spec.name: 0 for spec in config.inputs}
    opened = 0
    for index in in_order(config):
        step = config.steps[index]
        regions = {region[tensor] for tensor in step.inputs.values()}
        if len(regions) > 1:
            yield text.format(config.name, step.model)
        opened += decoupled[index]
        for tensor in step.outputs.values():
            region[tensor] = opened if decoupled[index] else max(regions, default=0)
    if len({region[spec.name] for spec in config.outputs if spec.name in region}) > 1:
        yield text.format(config.name, config.name)


def load_order(
    needs: Mapping[str, Collection[str]], callers: Collection[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Models sorted so that each comes after its dependencies, and the problems of those that cannot be loaded.

    `needs`: each model's dependencies, for an ensemble its steps. `callers`: models that are not ensembles but call
    their dependencies.
    """
    problems: dict[str, str] = {}
    for name in sorted(needs):
        lacking = sorted(set(needs[name]).difference(needs))
        if lacking:
            start = f"model {name} calls" if name in callers else f"ensemble {name} contains"
            problems[name] = f"{start} models that are not available or ambiguous: {', '.join(lacking)}"
    order = dict.fromkeys(_settled(needs, {}, problems, callers))
    left = {name: needs[name] for name in sorted(needs) if name not in order and name not in problems}
    for name in left:
        before = _before(name, left)
        if before is not None:
            who = "models" if callers and not left.keys().isdisjoint(callers) else "ensembles"
            problems[name] = f"circular dependency between {who}: {name} -> ... -> {before} -> {name}"
    _settled(needs, order, problems, callers)
    return list(order), problems


def _settled(
    needs: Mapping[str, Collection[str]], order: dict[str, None], problems: dict[str, str], callers: Collection[str]
) -> dict[str, None]:
    """Add loadable models to `order`, and those with a failed dependency to `problems`, until nothing changes."""
    left = [name for name in sorted(needs) if name not in order and name not in problems]
    while left:
        for name in left:
            bad = next((each for each in sorted(needs[name]) if each in problems), None)
            if bad is not None:
                who = "model" if name in callers else "ensemble"
                problems[name] = (
                    f"{who} '{name}' depends on '{bad}' which is not valid. Model '{bad}' failed with error:"
                    f" {problems[bad]}"
                )
            elif all(each in order for each in needs[name]):
                order[name] = None
        before, left = left, [name for name in left if name not in order and name not in problems]
        if len(left) == len(before):
            break
    return order


def _before(start: str, needs: Mapping[str, Collection[str]]) -> str | None:
    """The model through which the dependencies of `start` lead back to it; None: they do not."""
    seen, walk = {start}, [start]
    for name in walk:
        for each in sorted(needs.get(name, ())):
            if each == start:
                return name
            if each not in seen:
                seen.add(each)
                walk.append(each)
    return None
