"""PyTorch models: TorchScript archives and programs of `torch.export`, shared by all instances.

Neither format needs pickles of arbitrary objects, which execute code of whoever created the file. Archives that
contain such pickles or compiled libraries are rejected unless the operator allows it for the model by name.
"""

import os
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from forebay.core.serving.config import VARIABLE, Datatype, InstanceKind, ModelConfig, TensorSpec
from forebay.engines.tensor.arrays import as_bytes, as_text, joined, made_by, mismatch
from forebay.engines.tensor.batch import FAILURES
from forebay.engines.tensor.expressions import only_arithmetic
from forebay.engines.tensor.gpus import memory_fraction, on_gpu
from forebay.engines.tensor.measures import Family
from forebay.engines.tensor.protocol import (
    Array,
    BackendFailed,
    BadInput,
    CallModel,
    Emit,
    Loaded,
    Request,
    Response,
)
from forebay.engines.tensor.ragged import Ragged

FILES_DEFAULT: Final = ("model.pt", "model.pt2")
ALLOW_PICKLE: Final = "forebay.allow_pickle"
"""Parameter that the server sets to `true` for models that the operator has named; a repository cannot."""
UNPACKED_BYTES_MAX: Final = 256 << 20
"""Limit of compressed data in an archive. PyTorch compresses only code; a zip bomb would exhaust the memory."""
WEIGHTS_ONLY: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""PyTorch's own switch: anything that it unpickles must contain only tensors."""

LOCKED_BYTES_MIN: Final = 1 << 20
"""Batches from this size on are copied to and from a GPU through page-locked memory."""

DATATYPES: Final = {
    torch.bool: Datatype.BOOL,
    torch.uint8: Datatype.UINT8,
    torch.uint16: Datatype.UINT16,
    torch.uint32: Datatype.UINT32,
    torch.uint64: Datatype.UINT64,
    torch.int8: Datatype.INT8,
    torch.int16: Datatype.INT16,
    torch.int32: Datatype.INT32,
    torch.int64: Datatype.INT64,
    torch.float16: Datatype.FP16,
    torch.float32: Datatype.FP32,
    torch.float64: Datatype.FP64,
    torch.bfloat16: Datatype.BF16,
}

TOPS: Final = ("ARGS", "KWARGS")
"""First steps of a path to an argument of a program."""

Call = Callable[[Mapping[str, object]], object]
"""Inputs by name → whatever the model returns."""

Order = Callable[[Mapping[str, object]], Sequence[str]]
"""Inputs by name → their names in the model's order."""


class _Overwritten(Exception):  # noqa: N818 - states the condition
    """A batch has failed after the model changed its inputs: its requests cannot be run one by one."""


class TorchBackend:
    """A module; its inputs and outputs are mapped by Triton's rules (README of its PyTorch backend)."""

    def load(self, config: ModelConfig, folder: Path, instance: int, call: CallModel) -> Loaded:
        file = _file(config, folder)
        torch.set_num_threads(_threads(config))
        device = _device(config, instance)
        kind = device.type if device is not None else ""
        join = _locked if kind == "cuda" else joined
        self._ragged = Ragged(config, join, version=folder.name, cpu=kind == "cpu")
        self._writes = False  # to its inputs, as far as known: it gets copies then
        self._device, self._streams = device or torch.device("cpu"), _Streams(device)
        # inputs may be read-only, and models that write to them do so at their own risk
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        given = config
        try:
            config, self._places, self._call = _open(given, file, device)
        except BackendFailed:
            raise
        except Exception as error:  # the library raises RuntimeError, ValueError, KeyError and exceptions of its own
            raise BackendFailed(f"model '{config.name}': {file.name} cannot be loaded: {_first(error)}") from error
        self._config = config
        self._made = made_by(config)
        self._scattered = config.scattered
        self._answers = tuple(self._made)
        self._bf16 = config.bf16_inputs
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # streams of instances do not wait for the one that has copied the weights
        inputs, outputs = ((), ()) if config is given else (config.inputs, config.outputs)
        return Loaded(inputs, outputs, measures=self._ragged.measures)

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response | None]:
        return self._ragged.execute(requests, self._answers, self._run, emit)

    def measured(self) -> tuple[Family, ...]:
        return self._ragged.measured()

    def close(self) -> None:
        del self._call

    def _run(self, feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        copied = self._writes
        if copied:
            feed = {name: array.copy() for name, array in feed.items()}
        with self._streams.own():
            inputs = {name: self._input(name, array) for name, array in feed.items()}
            try:
                found = self._called(inputs)
                return {name: self._output(name, found) for name in wanted}
            except FAILURES as error:
                if self._has_written(inputs) and not copied:
                    raise _Overwritten(str(error)) from error
                raise
            finally:
                self._writes = self._writes or self._has_written(inputs)

    def _has_written(self, inputs: Mapping[str, object]) -> bool:
        """Whether the model has changed the memory of its inputs, which on a GPU are copies."""
        if self._device.type != "cpu":
            return False
        return any(isinstance(each, torch.Tensor) and each._version > 0 for each in inputs.values())

    def _called(self, inputs: Mapping[str, object]) -> dict[str | int, Any]:
        optimised = not self._config.says("DISABLE_OPTIMIZED_EXECUTION")
        inferring = self._config.says("INFERENCE_MODE", default=True)
        try:
            with (
                torch.inference_mode() if inferring else torch.no_grad(),
                nullcontext() if optimised else torch.jit.optimized_execution(False),
            ):
                return _leaves(self._call(inputs))
        except Exception as error:  # the model is Python too: it may raise anything
            raise RuntimeError(f"PyTorch execute failure: {error}") from error

    def _input(self, name: str, array: Array) -> object:
        """A tensor, on a CPU over the array's memory; strings as a list, since PyTorch has no string tensors."""
        if array.dtype.hasobject:
            if sum(size > 1 for size in array.shape) > 1:
                raise BadInput(f"input '{name}': PyTorch takes strings in one dimension, not {list(array.shape)}")
            return as_text(array, name).ravel().tolist()
        tensor = torch.from_numpy(array)
        return (tensor.view(torch.bfloat16) if name in self._bf16 else tensor).to(self._device, non_blocking=True)

    def _output(self, name: str, found: Mapping[str | int, Any]) -> Array:
        place = name if name in found else self._places(name)
        if place not in found:
            count = sum(1 for each in found if isinstance(each, int))
            raise ValueError(f"output '{name}' is not among the {count} that the model has returned")
        array = _array(found[place])
        spec = self._made.get(name) if name not in self._scattered else None
        problem = mismatch(spec, array, self._config.name, self._config.max_batch > 0) if spec else ""
        if problem:
            raise ValueError(problem)
        return array


class _Streams:
    """A CUDA stream for each thread, so that batches of several instances overlap; none on CPUs."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._mine = threading.local()

    def own(self) -> AbstractContextManager[object]:
        """Work of the calling thread within this context goes to its own stream, and is done at its end."""
        if self._device is None or self._device.type != "cuda":
            return nullcontext()
        if not hasattr(self._mine, "stream"):
            self._mine.stream = torch.cuda.Stream(self._device)
        return _until_done(self._mine.stream)


@contextmanager
def _until_done(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream):
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to tell
                stream.synchronize()
            raise
        stream.synchronize()  # inputs may be on their way until now, and their memory is others' afterwards


def _device(config: ModelConfig, instance: int) -> torch.device | None:
    """Device of the model and its inputs; None (KIND_MODEL): as in its file. Raises `BackendFailed`."""
    fraction = memory_fraction(config)
    if on_gpu(config, instance):
        if not torch.cuda.is_available():
            raise BackendFailed(f"model '{config.name}': its instances are KIND_GPU, but PyTorch finds no CUDA")
        if fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction)
        return torch.device("cuda", 0)
    where_saved = config.group_of(instance).kind is InstanceKind.MODEL and torch.cuda.is_available()
    return None if where_saved else torch.device("cpu")


def _file(config: ModelConfig, folder: Path) -> Path:
    names = (config.model_file,) if config.model_file else FILES_DEFAULT
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise BackendFailed(f"model '{config.name}': there is no file {' or '.join(names)} in {folder}")


def _open(
    config: ModelConfig, file: Path, device: torch.device | None
) -> tuple[ModelConfig, Callable[[str], str | int], Call]:
    """The configuration, completed from the file if it lists no tensors; the output mapping; the model."""
    allowed = config.parameters.get(ALLOW_PICKLE, "") == "true"
    kind = _format(config, file, allowed)
    if not (config.inputs and config.outputs) and (kind != "export" or config.inputs or config.outputs):
        raise BackendFailed(
            f"model '{config.name}': {file.name} does not say what its inputs and outputs are; the configuration "
            "must list them (both, or neither for a program of torch.export)"
        )
    match kind:
        case "export":
            with _weights_only(not allowed), only_arithmetic(not allowed):
                program = torch.export.load(file)
            if device is not None and torch.cuda.is_available():
                program = move_to_device_pass(program, device)
            config = config if config.inputs else _said_by(program, config)
            return config, *_program(config, program)
        case "script":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the format is deprecated, but still in use
                module = torch.jit.load(str(file), map_location=device).eval()
            arguments = [each for each in module.forward.schema.arguments if each.name != "self"]
            names = [each.name for each in arguments]
            if len(arguments) == 1 and isinstance(arguments[0].type, torch.DictType):
                return config, _place_of(config), lambda feed: module(dict(feed))
        case _:
            module = torch.load(file, map_location=device, weights_only=False)
            if not isinstance(module, torch.nn.Module):
                raise BackendFailed(f"model '{config.name}': {file.name} does not hold a module")
            module.eval()
            code = module.forward.__code__
            names = list(code.co_varnames[1 : code.co_argcount])
    order = _order(_named(config), names)
    return config, _place_of(config), partial(_call_module, module, order, frozenset(names), _named(config))


def _format(config: ModelConfig, file: Path, allowed: bool) -> str:
    """`export`, `script` or `pickle`. Raises `BackendFailed` for what may not be loaded."""
    if not zipfile.is_zipfile(file):
        with file.open("rb") as opened:
            if opened.read(1) != b"\x80":  # every pickle since protocol 2 begins like this
                raise BackendFailed(f"model '{config.name}': {file.name} is not a whole PyTorch file")
        names: list[str] = []
    else:
        with zipfile.ZipFile(file) as archive:
            names = [name.partition("/")[2] or name for name in archive.namelist()]
            packed = [each for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED]
        if sum(each.file_size for each in packed) > UNPACKED_BYTES_MAX:
            text = f"{file.name} holds more than {UNPACKED_BYTES_MAX} bytes in compressed form"
            raise BackendFailed(f"model '{config.name}': {text}")
    if "archive_format" in names or "serialized_exported_program.json" in names:
        code = [name for name in names if "aotinductor/" in name or "/opaque_obj" in name]
        found, problem = "export", f"it holds {code[0]}, which is code" if code else ""
    elif "constants.pkl" in names and any(name.startswith("code/") for name in names):
        found, problem = "script", ""
    elif not names or "data.pkl" in names:
        found, problem = "pickle", "it is a pickle, which runs code while it is read"
    else:
        raise BackendFailed(f"model '{config.name}': {file.name} is an archive, but not one of PyTorch")
    if problem and not allowed:
        raise BackendFailed(
            f"model '{config.name}': {file.name} is not loaded: {problem}. "
            "Save it with torch.export or torch.jit, or have the operator allow it for this model by name."
        )
    return found


@contextmanager
def _weights_only(wanted: bool) -> Iterator[None]:
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1" if wanted else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WEIGHTS_ONLY]
        else:
            os.environ[WEIGHTS_ONLY] = before


def _said_by(program: Any, config: ModelConfig) -> ModelConfig:
    """The configuration with the program's tensors, batch dimension included; outputs have positions but no names."""
    signature = program.graph_signature
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [_spec(name, values.get(name), config) for name, constant in _arguments(program) if not constant]
    outputs = [
        _spec(f"OUTPUT__{place}", values[name], config)
        for place, name in enumerate(signature.user_outputs)
        if isinstance(values.get(name), torch.Tensor)
    ]
    return replace(config, inputs=tuple(inputs), outputs=tuple(outputs), max_batch=0)


def _spec(name: str, value: object, config: ModelConfig) -> TensorSpec:
    datatype = DATATYPES.get(value.dtype) if isinstance(value, torch.Tensor) else None
    if datatype is None or not isinstance(value, torch.Tensor):
        raise BackendFailed(f"model '{config.name}': '{name}' is not a tensor that the protocol can carry")
    return TensorSpec(name, datatype, tuple(size if isinstance(size, int) else VARIABLE for size in value.shape))


def _program(config: ModelConfig, program: Any) -> tuple[Callable[[str], str | int], Call]:
    """A program of `torch.export`: inputs by argument, by position, or by path (`ARGS[0]`, `KWARGS[mask][a]`)."""
    module = program.module()
    entry, leave = program.call_spec.in_spec, program.call_spec.out_spec
    given = _arguments(program)
    constants = [(place, constant.value) for place, (_, constant) in enumerate(given) if constant]
    paths = [path for path, (_, constant) in zip(_paths(entry, TOPS), given, strict=True) if not constant]
    names = _named(config)
    by_path = names and all(name in paths for name in names)
    order = _order(names, paths if by_path else [name for name, constant in given if not constant])
    results = {f"RESULT{path}": place for place, path in enumerate(_paths(leave, None))}
    plain = _place_of(config)

    def call(feed: Mapping[str, object]) -> object:
        flat = [feed[name] for name in order(feed)]
        for place, value in constants:
            flat.insert(place, value)
        args, kwargs = pytree.tree_unflatten(flat, entry)
        return pytree.tree_leaves(module(*args, **kwargs))

    return lambda name: results[name] if name in results else plain(name), call


def _arguments(program: Any) -> list[tuple[str, ConstantArgument | None]]:
    """The arguments of a program in order, with the value of those that are no tensors (None, for example)."""
    found = [each.arg for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT]
    return [(str(each.name), each if isinstance(each, ConstantArgument) else None) for each in found]


def _call_module(
    module: Callable[..., object],
    order: Order,
    arguments: frozenset[str],
    configured: Sequence[str],
    feed: Mapping[str, object],
) -> object:
    """Call a module by argument, or else by position, where None takes the place of an absent optional input."""
    if arguments.issuperset(feed):
        return module(**feed)
    given = {**dict.fromkeys(configured), **feed}
    values = [given[name] for name in order(given)]
    while values and values[-1] is None:
        values.pop()
    return module(*values)


def _named(config: ModelConfig) -> list[str]:
    """The model's inputs in configured order; those generated for each batch come last."""
    return [*(spec.name for spec in config.inputs), *config.made_inputs]


def _paths(spec: Any, tops: tuple[str, str] | None) -> list[str]:
    """The leaves of a structure as `[0][key]`; the first step is named by `tops`, if given."""
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    found = []
    for path, _ in leaves:
        steps: list[Any] = [getattr(step, "idx", getattr(step, "key", None)) for step in path]
        first = tops[steps.pop(0)] if tops else ""
        found.append(first + "".join(f"[{step}]" for step in steps))
    return found


def _order(configured: Sequence[str], arguments: Sequence[str]) -> Order:
    """The order of inputs: by argument name, by `<name>__<position>`, or as configured."""
    if all(name in arguments for name in configured):
        ranks = {name: place for place, name in enumerate(arguments)}
    elif all(_index(name) is not None for name in configured):
        return lambda feed: sorted(feed, key=lambda name: (_index(name) or 0, name))
    else:
        ranks = {name: place for place, name in enumerate(configured)}
    return lambda feed: sorted(feed, key=lambda name: (ranks.get(name, len(ranks)), name))


def _index(name: str) -> int | None:
    place = name.partition("__")[2]
    return int(place) if place.isdecimal() else None


def _place_of(config: ModelConfig) -> Callable[[str], int]:
    """The position of an output: by `<name>__<position>` if all names have that form, else as configured."""
    names = [spec.name for spec in config.outputs]
    indices = {name: _index(name) for name in names}
    if all(index is not None for index in indices.values()):
        return lambda name: _index(name) or 0
    return lambda name: names.index(name) if name in names else len(names)


def _leaves(returned: object) -> dict[str | int, Any]:
    """A model's return values by position, and by key if it returned a mapping."""
    match returned:
        case dict():
            found: dict[str | int, Any] = dict(returned)
            return found | dict(enumerate(returned.values()))
        case tuple():
            return dict(enumerate(returned))
        case list() if returned and not isinstance(returned[0], str):
            return dict(enumerate(returned))
        case _:
            return {0: returned}


def _array(value: Any) -> Array:
    if isinstance(value, list):
        return as_bytes(np.array(value, object))
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"the model has returned {type(value).__name__} where a tensor or a list of str is expected")
    tensor = _on_cpu(value.detach()).contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    found: Array = tensor.numpy()
    return found


def _locked(parts: Sequence[Array]) -> Array:
    """Concatenate along the first dimension, if it is large in page-locked memory: a GPU reads it there itself.

    From other memory the driver copies it once more, on the CPU. PyTorch keeps page-locked memory for reuse.
    """
    first, size = parts[0], sum(part.nbytes for part in parts)
    if len(parts) == 1 or size < LOCKED_BYTES_MIN or first.dtype.hasobject:
        return joined(parts)
    try:
        room: Array = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:  # there is none left
        return joined(parts)
    rows = sum(len(part) for part in parts)
    return np.concatenate(parts, out=room.view(first.dtype).reshape(rows, *first.shape[1:]))


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on a GPU, if it is large in page-locked memory; others as they are."""
    if tensor.device.type != "cuda" or tensor.nbytes < LOCKED_BYTES_MIN:
        return tensor.cpu()
    try:
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # there is no page-locked memory left
        return tensor.cpu()
    return room.copy_(tensor)


def _threads(config: ModelConfig) -> int:
    """Threads within one call of the model; all instances use as many, so they share the cores."""
    for name in ("INTRA_OP_THREAD_COUNT", "NUM_THREADS"):
        text = config.parameters.get(name, "")
        if text and not text.isdecimal():
            raise BackendFailed(f"model '{config.name}': parameter {name} is {text!r}; it must be a whole number")
        if text and int(text):
            return int(text)
    return max(1, len(os.sched_getaffinity(0)) // config.instance_count)


def _first(error: Exception) -> str:
    """The first line: the rest is the library's own stack, or advice that must not be followed here."""
    if "Weights only load failed" in str(error):
        return "it holds a pickle of more than tensors, which would run code while it is read"
    return str(error).strip().partition("\n")[0] or type(error).__name__
