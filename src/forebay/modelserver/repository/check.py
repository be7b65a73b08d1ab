"""Validation of configurations: every field is honoured, rejected here, or reported as having no effect.

The rules are those of Triton's core, `ValidateModelConfig` and its callees, plus a few for features that do not exist
here.
"""

import math
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Final

from forebay.core.serving.config import CALLS, IN_PROCESS, MICRO_BATCH, VARIABLE
from forebay.core.task_tensors import CONTRACTS, PARAMETER
from forebay.engines.tensor.gpus import FRACTION
from forebay.modelserver.repository import ragged, scheduling
from forebay.modelserver.repository.defaults import ENSEMBLE, FILES, PLATFORMS
from forebay.modelserver.repository.form.fill import Message, Problems
from forebay.modelserver.repository.form.reading import age_step_s
from forebay.modelserver.repository.form.schema import enum_name
from forebay.modelserver.repository.paths import path_problem
from forebay.modelserver.repository.tasking import check_task
from forebay.modelserver.repository.values import ALLOW_PICKLE, Rules

INSTANCES_MAX: Final = 1_000
"""Instances per group."""
ELEMENTS_MAX: Final = 2**40
"""Product of the fixed dimensions of one tensor."""
FILES_SHOWN_MAX: Final = 8
OURS: Final = {
    "forebay.age_step_ms": "milliseconds in the queue after which a request moves up one priority level",
    CALLS: "comma-separated models that this one calls; they are loaded with it",
    "forebay.deadlines": "true: a request's timeout is also the deadline of its response",
    IN_PROCESS: "true: an ensemble runs its steps in a process of its own, batch by batch",
    MICRO_BATCH: "rows of a batch that run at once on a CPU; 0: all; without it as many as is fastest",
    "forebay.pinned": "true: the memory budget never puts this model to sleep",
    FRACTION: "fraction of its GPU's memory that each process of the model may use, such as 0.5",
    PARAMETER: "the task whose endpoint below /v1 the model also serves",
}
"""Parameters that Triton does not have."""
CUTTING: Final = ("onnxruntime", "openvino", "pytorch")
"""Backends that can run a batch in several parts."""
DIGITS_MAX: Final = 9
TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}

NO_GPU: Final = {
    "onnxruntime": "the ONNX Runtime that is installed here computes on none (pip install onnxruntime-gpu)",
    "pytorch": "the PyTorch that is installed here computes on none (it is a build without CUDA)",
    "openvino": "models of OpenVINO run on CPUs only",
}
"""Why a backend cannot use GPUs that exist."""

_NO_EFFECT = ("runtime", "cc_model_filenames", "model_operations", "metric_tags")
_CONTROLLED: Final = "nv_inference_first_response_histogram_ms"
"""The only metric that `model_metrics` has an effect on: its buckets."""
_OPTIMIZATIONS = ("graph", "cuda", "execution_accelerators")


def check(message: Message, name: str, problems: Problems, rules: Rules, files: Collection[str] = ()) -> None:
    """Report all problems of a configuration with filled-in defaults, for the model `name` with these files."""
    if message.name != name:
        problems.add("name", f"found {message.name!r}; allowed: {name!r}, the name of the model's folder")
    _backend(message, problems, files)
    if message.max_batch_size < 0:
        problems.add("max_batch_size", f"found {message.max_batch_size}; allowed: 0 (no batches) or more")
    for kind in ("input", "output"):
        _tensors(message, kind, problems)
    _versions(message, problems)
    if not message.HasField("ensemble_scheduling"):
        _instances(message, problems, rules)
    _warmups(message, problems)
    _parameters(message, problems)
    _refused(message, problems)
    ragged.check(message, problems)
    scheduling.check(message, problems)


def check_whole(message: Message, problems: Problems) -> None:
    """Report what is missing in the tensors after the loaded model has been consulted."""
    for kind in ("input", "output"):
        for index, spec in enumerate(getattr(message, kind)):
            path = f"{kind}[{index}]"
            if not spec.data_type:
                problems.add(f"{path}.data_type", f"must be given for '{spec.name}'")
            if not spec.dims:
                problems.add(f"{path}.dims", f"must be given for '{spec.name}'")
    check_task(message, problems)


def without_effect(message: Message) -> list[str]:
    """Fields that are set and accepted but have no effect here."""
    found = [name for name in _NO_EFFECT if _is_set(message, name)]
    # these schedule each request on its own
    if message.backend == "python" or message.HasField("ensemble_scheduling"):
        found += [name for name in ("batch_input", "batch_output") if _is_set(message, name)]
    optimization = message.optimization
    idle = [name for name in _OPTIMIZATIONS if name != "graph" or message.backend != "onnxruntime"]
    found += [f"optimization.{name}" for name in idle if _is_set(optimization, name)]
    found += [f"optimization.{n}" for n in ("priority", "gather_kernel_buffer_threshold") if getattr(optimization, n)]
    if optimization.eager_batching:
        found.append("optimization.eager_batching")
    found += [
        f"instance_group[{index}].passive" for index, group in enumerate(message.instance_group) if group.passive
    ]
    sequences = message.sequence_batching
    if sequences.iterative_sequence and sequences.oldest.preserve_ordering:
        found.append("sequence_batching.oldest.preserve_ordering (with iterative_sequence)")
    for index, control in enumerate(message.model_metrics.metric_control):
        family = control.metric_identifier.family
        if family != _CONTROLLED:
            found.append(f"model_metrics.metric_control[{index}] (it is for '{family}')")
    for index, warmup in enumerate(message.model_warmup):
        if not warmup.batch_size:
            found.append(f"model_warmup[{index}] (its batch_size is 0)")
    for index, state in enumerate(sequences.state):
        for name in ("use_same_buffer_for_input_output", "use_growable_memory"):
            if getattr(state, name):
                found.append(f"sequence_batching.state[{index}].{name}")
    if message.dynamic_batching.priority_queue_policy and not message.dynamic_batching.priority_levels:
        found.append("dynamic_batching.priority_queue_policy (there are no priority_levels)")
    return [f"{path} has no effect here" for path in found]


def dims_problem(dims: Iterable[int]) -> str:
    """Why these are not valid dimensions of a tensor, or empty. -1 is any size."""
    dims = list(dims)
    for dim in dims:
        if dim < 1 and dim != VARIABLE:
            return f"found {dim}; allowed: 1 or more, or -1 for any size"
    if math.prod(dim for dim in dims if dim > 0) > ELEMENTS_MAX:
        return f"found {dims}; at most {ELEMENTS_MAX} elements"
    return ""


def _underivable(files: Collection[str]) -> str:
    """Why a version with these files does not tell its backend."""
    if not files:
        return "there are no files in a folder with the number of a version, such as 1"
    shown = ", ".join(sorted(files)[:FILES_SHOWN_MAX]) + (", …" if len(files) > FILES_SHOWN_MAX else "")
    expected = ", ".join(name for names in FILES.values() for name in dict.fromkeys((names[0], names[-1])))
    return f"found the files {shown}; expected one of {expected}"


def _is_set(message: Message, name: str) -> bool:
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated or not field.has_presence:
        return bool(getattr(message, name))
    return bool(message.HasField(name))


def _backend(message: Message, problems: Problems, files: Collection[str]) -> None:
    backend, platform = message.backend, message.platform
    served = f"supported are the backends {', '.join(FILES)} and the platform {ENSEMBLE}"
    if platform == ENSEMBLE:
        if backend:
            problems.add("backend", f"found {backend!r}; an ensemble has none")
    elif not backend and not platform:
        problems.add("backend", f"not given, and it cannot be derived: {_underivable(files)}; {served}")
    elif not backend:
        problems.add("platform", f"found {platform!r}; {served}")
    elif backend not in FILES:
        problems.add("backend", f"found {backend!r}; {served}")
    elif backend in PLATFORMS.values() and PLATFORMS.get(platform) != backend:
        problems.add("platform", f"found {platform!r}, which does not match the backend {backend!r}")
    if message.default_model_filename and (trouble := path_problem(message.default_model_filename)):
        problems.add("default_model_filename", trouble)


def _tensors(message: Message, kind: str, problems: Problems) -> None:
    seen = set()
    for index, spec in enumerate(getattr(message, kind)):
        path = f"{kind}[{index}]"
        if not spec.name:
            problems.add(f"{path}.name", "must be given")
        elif spec.name in seen:
            problems.add(f"{path}.name", f"{spec.name!r} is the name of an earlier {kind}")
        seen.add(spec.name)
        trouble = dims_problem(spec.dims)
        if trouble:
            problems.add(f"{path}.dims", trouble)
        if spec.HasField("reshape"):
            wrong = dims_problem(spec.reshape.shape)
            if not wrong and not trouble and not same_elements(list(spec.dims), list(spec.reshape.shape)):
                wrong = f"{list(spec.reshape.shape)} does not have as many elements as dims {list(spec.dims)}"
            if wrong:
                problems.add(f"{path}.reshape.shape", wrong)
        for name in ("is_shape_tensor", "is_non_linear_format_io"):
            if getattr(spec, name):
                problems.add(f"{path}.{name}", "only TensorRT models have this, and they are not served here")
        if kind == "output":
            if spec.label_filename and (wrong := path_problem(spec.label_filename)):
                problems.add(f"{path}.label_filename", wrong)
        elif spec.format and len(spec.dims) != 3:
            problems.add(f"{path}.format", f"{enum_name(spec, 'format')} needs 3 dims; found {list(spec.dims)}")


def same_elements(dims: list[int], shape: list[int]) -> bool:
    """Whether tensors of `dims` can be viewed as `shape`: equal products before, between and after variable sizes."""
    return _runs(dims) == _runs(shape)


def _runs(dims: list[int]) -> list[int]:
    # Each -1 separates the dimensions around it; two in a row have the empty product between them.
    runs = [1]
    for variable, group in groupby(dims, key=lambda dim: dim == VARIABLE):
        if variable:
            runs += [1 for _ in group]
        else:
            runs[-1] = math.prod(group)
    return runs


def _versions(message: Message, problems: Problems) -> None:
    policy = message.version_policy
    if policy.HasField("latest") and policy.latest.num_versions == 0:
        problems.add("version_policy.latest.num_versions", "found 0; allowed: 1 or more")
    if policy.HasField("specific"):
        versions = list(policy.specific.versions)
        if not versions or min(versions) < 0:
            problems.add(
                "version_policy.specific.versions", f"found {versions}; allowed: the numbers of some versions"
            )


def _instances(message: Message, problems: Problems, rules: Rules) -> None:
    gpus = rules.gpus
    for index, group in enumerate(message.instance_group):
        path = f"instance_group[{index}]"
        if group.count > INSTANCES_MAX:
            problems.add(f"{path}.count", f"found {group.count}; allowed: 1 to {INSTANCES_MAX}")
        absent = sorted(set(group.gpus) - set(gpus))
        if group.kind == group.KIND_GPU and not gpus:
            problems.add(f"{path}.kind", "found KIND_GPU, but there are no GPUs here; allowed: KIND_CPU, KIND_AUTO")
        elif group.kind == group.KIND_GPU and message.backend in FILES.keys() - rules.gpu_backends:
            problems.add(
                f"{path}.kind", f"found KIND_GPU, but {NO_GPU[message.backend]}; allowed: KIND_CPU, KIND_AUTO"
            )
        elif group.kind == group.KIND_GPU and absent:
            problems.add(f"{path}.gpus", f"found {absent}, but the GPUs here are {list(gpus)}")
        elif group.kind != group.KIND_GPU and group.gpus:
            auto = f"; KIND_AUTO becomes that unless all of them can be used, and the GPUs here are {list(gpus)}"
            text = f"found {list(group.gpus)}, but the kind is {enum_name(group, 'kind')}"
            problems.add(f"{path}.gpus", text + auto * (group.kind == group.KIND_CPU))
        if group.profile:
            problems.add(f"{path}.profile", "only TensorRT models have this, and they are not served here")
        if group.secondary_devices:
            problems.add(f"{path}.secondary_devices", "there are none here")
        names = [resource.name for resource in group.rate_limiter.resources]
        for number, resource in enumerate(group.rate_limiter.resources):
            where = f"{path}.rate_limiter.resources[{number}]"
            if not resource.name or resource.name in names[:number]:
                problems.add(f"{where}.name", f"found {resource.name!r}; allowed: a name, each once in a group")


def _warmups(message: Message, problems: Problems) -> None:
    for index, warmup in enumerate(message.model_warmup):
        path = f"model_warmup[{index}]"
        if message.max_batch_size and warmup.batch_size > message.max_batch_size:
            allowed = f"0 (it is skipped) to max_batch_size ({message.max_batch_size})"
            problems.add(f"{path}.batch_size", f"found {warmup.batch_size}; allowed: {allowed}")
        if not warmup.inputs:
            problems.add(f"{path}.inputs", "must be given")
        for name in sorted(warmup.inputs):
            given = warmup.inputs[name]
            where = f'{path}.inputs["{name}"]'
            if not given.data_type:
                problems.add(f"{where}.data_type", "must be given")
            trouble = dims_problem(given.dims)
            if trouble or VARIABLE in given.dims:
                problems.add(
                    f"{where}.dims", trouble or f"found {list(given.dims)}; allowed: sizes that are not open"
                )
            chosen = given.WhichOneof("input_data_type")
            if chosen is None or (chosen != "input_data_file" and not getattr(given, chosen)):
                problems.add(where, "one of zero_data: true, random_data: true and input_data_file must be given")
            elif chosen == "input_data_file" and (trouble := path_problem(given.input_data_file)):
                problems.add(f"{where}.input_data_file", trouble)


def _parameters(message: Message, problems: Problems) -> None:
    for key in sorted(message.parameters):
        path, value = f'parameters["{key}"]', message.parameters[key].string_value
        if key == ALLOW_PICKLE:
            problems.add(path, "only the operator can allow this, by the model's name")
        elif key == "TRITON_BATCH_STRATEGY_PATH":
            problems.add(path, "custom batching libraries are not run here")
        elif key.startswith("forebay.") and key not in OURS:
            problems.add(path, f"unknown parameter; allowed: {', '.join(OURS)}")
        elif key == PARAMETER and value not in CONTRACTS:
            problems.add(path, f"found {value!r}; allowed: {', '.join(CONTRACTS)}")
        elif key == IN_PROCESS and not message.HasField("ensemble_scheduling"):
            problems.add(path, "only ensembles have steps to run in one process")
        elif key in ("forebay.pinned", "forebay.deadlines", IN_PROCESS) and value.lower() not in TRUTHS:
            problems.add(path, f"found {value!r}; allowed: true or false")
        elif key == "forebay.deadlines" and message.WhichOneof("scheduling_choice") not in (None, "dynamic_batching"):
            problems.add(path, "neither sequences nor ensembles have deadlines")
        elif key == CALLS:
            if message.backend != "python":
                problems.add(path, "only models of the python backend can call others")
            elif not all(name.strip() for name in value.split(",")):
                problems.add(path, f"found {value!r}; allowed: comma-separated model names")
        elif key == MICRO_BATCH:
            if not (value.isascii() and value.isdecimal() and len(value) <= DIGITS_MAX):
                problems.add(path, f"found {value!r}; allowed: a number of rows, 0 (whole batches) or more")
            elif message.backend not in CUTTING or not message.HasField("dynamic_batching"):
                problems.add(path, f"needs dynamic_batching and one of the backends {', '.join(CUTTING)}")
        elif key == "forebay.age_step_ms":
            if not message.HasField("dynamic_batching"):
                problems.add(path, "needs dynamic_batching")
            if age_step_s(value) is None:
                problems.add(path, f"found {value!r}; allowed: milliseconds, 0 (strict order) to 3600000")


def _refused(message: Message, problems: Problems) -> None:
    """Features that cannot be ignored without changing results."""
    if message.model_repository_agents.agents:
        problems.add("model_repository_agents", "agents are not supported here, so their checks would be skipped")
