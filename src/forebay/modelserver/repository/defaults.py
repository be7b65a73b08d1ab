"""Defaults of configurations: Triton's, filled in in Triton's order.

The rules are those of its core's `model_config_utils.cc` (AutoCompleteBackendFields, NormalizeModelConfig,
NormalizeInstanceGroup); the backends are those supported here.
"""

from collections.abc import Collection
from typing import Final

from forebay.modelserver.repository.form.fill import Message
from forebay.modelserver.repository.values import Rules

FILES: Final = {
    "onnxruntime": ("model.onnx",),
    "openvino": ("model.xml", "model.onnx", "model.tflite"),
    "pytorch": ("model.pt", "model.pt2"),
    "python": ("model.py",),
}
"""Model file names by backend: the first that exists, else the first. The backend is guessed in this order."""
PLATFORMS: Final = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "libtorch": "pytorch",
    "torch_aoti": "pytorch",
}
"""Platforms that older configurations name instead of a backend."""
SUFFIXES: Final = {
    ".onnx": "onnxruntime",
    ".xml": "openvino",
    ".tflite": "openvino",
    ".pt": "pytorch",
    ".pt2": "pytorch",
    ".py": "python",
}
"""Backends of bare model files, by suffix."""
ENSEMBLE: Final = "ensemble"
IDLE_US: Final = 1_000_000
"""Idle time after which a sequence ends."""
CPU_INSTANCES: Final = {"onnxruntime": 2}
"""Default CPU instances of backends that perform better with more than one."""


def fill_in(message: Message, name: str, files: Collection[str], rules: Rules) -> None:
    """Fill in what `message` leaves open; `files` are in a version's folder. Invalid values are kept as they are."""
    if not message.name:
        message.name = name
    if message.platform != ENSEMBLE:
        _backend(message, files)
    if message.platform == "libtorch":
        message.platform = "pytorch_libtorch"
    normalise(message)
    if message.HasField("ensemble_scheduling"):
        # shown to clients, because the models of the ensemble may make it decoupled
        message.model_transaction_policy.SetInParent()
    else:
        _instances(message, rules.gpus if message.backend in rules.gpu_backends else ())


def normalise(message: Message) -> None:
    """Defaults that depend on the maximum batch size, which may be known only after the model is loaded."""
    if not message.HasField("version_policy"):
        message.version_policy.latest.num_versions = 1
    if message.HasField("dynamic_batching"):
        _preferred(message.dynamic_batching.preferred_batch_size, message.max_batch_size)
    if message.HasField("sequence_batching"):
        sequences = message.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or IDLE_US
        if sequences.HasField("oldest"):
            _preferred(sequences.oldest.preferred_batch_size, message.max_batch_size)
    if not message.HasField("ensemble_scheduling"):
        for pinned in ("input_pinned_memory", "output_pinned_memory"):
            if not message.optimization.HasField(pinned):
                getattr(message.optimization, pinned).enable = True


def _preferred(sizes: Message, max_batch: int) -> None:
    if not sizes and max_batch > 0:
        sizes.append(max_batch)


def _backend(message: Message, files: Collection[str]) -> None:
    file = message.default_model_filename
    if not message.backend:
        message.backend = PLATFORMS.get(message.platform, "")
    if not message.backend and not message.platform:
        wanted = {file} if file else set(files)
        message.backend = next((b for b, names in FILES.items() if wanted & {names[0], names[-1]}), "")
    names = FILES.get(message.backend)
    if names is None:
        return
    if not file:
        message.default_model_filename = next((n for n in names if n in files), names[0])
        if message.backend == "pytorch" and message.platform == "torch_aoti":
            message.default_model_filename = "model.pt2"
    if not message.platform:
        if message.backend == "onnxruntime":
            message.platform = "onnxruntime_onnx"
        elif message.backend == "pytorch":
            ahead = message.default_model_filename.endswith(".pt2")
            message.platform = "torch_aoti" if ahead else "pytorch_libtorch"


def _instances(message: Message, gpus: tuple[int, ...]) -> None:
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        kinds = type(group)
        group.name = group.name or f"{message.name}_{index}"
        if group.kind == kinds.KIND_AUTO:
            # GPUs that are named but cannot be used stay, and are rejected by `check`, as in Triton
            group.kind = kinds.KIND_GPU if gpus and set(group.gpus) <= set(gpus) else kinds.KIND_CPU
        if group.kind == kinds.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)
        if group.count < 1:
            group.count = CPU_INSTANCES.get(message.backend, 1) if group.kind == kinds.KIND_CPU else 1
