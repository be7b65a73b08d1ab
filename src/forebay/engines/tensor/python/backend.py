"""Runs a model in a Python file, by the rules of Triton's Python backend (its README, and its observed responses)."""

import asyncio
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.engines.tensor.arrays import DATATYPES, made_by, mismatch
from forebay.engines.tensor.measures import Family
from forebay.engines.tensor.protocol import (
    Array,
    BackendFailed,
    CallModel,
    Emit,
    Loaded,
    Request,
    Response,
)
from forebay.engines.tensor.python import metrics, triton_api
from forebay.engines.tensor.python.calls import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    SenderReaper,
)
from forebay.engines.tensor.python.config import FILE_DEFAULT, completed, document, instance_name
from forebay.engines.tensor.python.config import ModelConfig as Completing
from forebay.engines.tensor.python.host import Host, current
from forebay.engines.tensor.python.tensors import Tensor, TritonModelException

MODULES: Final = ("triton_python_backend_utils", "c_python_backend_utils")
"""Module names under which models import the API."""
IMPORTABLE: Final = str(Path(__file__).parent / "importable")
"""Where processes that `multiprocessing` starts anew find the API: they inherit `sys.path`, but no modules."""
COMPLETE: Final = "forebay.complete"
"""Model parameter set by the operator: the configuration is complete, so the model is not asked."""
STOP_TIMEOUT_S: Final = 5.0
"""Time for the event loop of an `async def execute` to stop."""
_OUR_FILES: Final = (*(str(Path(each).parent) for each in (__file__, asyncio.__file__, futures.__file__)), "<frozen")
"""Frames of these files are hidden from model authors."""


class PythonBackend:
    """One instance of a `TritonPythonModel`; one per process, since a process has one interpreter."""

    _told: dict[str, Any] | None = None
    """The configuration document from the server."""

    def tell(self, document: str) -> None:
        self._told = json.loads(document)

    def load(self, config: ModelConfig, folder: Path, instance: int, call: CallModel) -> Loaded:
        file = folder / (config.model_file or FILE_DEFAULT)
        if "EXECUTION_ENV_PATH" in config.parameters:
            raise BackendFailed(
                f"model '{config.name}': EXECUTION_ENV_PATH is not supported: models run in the server's own Python "
                "environment; install what the model needs there and remove the parameter"
            )
        if not file.is_file():
            raise BackendFailed(f"Python model file not found in '{file}'")
        for name in MODULES:
            sys.modules[name] = triton_api
        current.host = Host(config.name, str(folder), administer=call)
        self._before = (list(sys.path), frozenset(sys.modules))
        # bytecode caches are validated by the source's size and time in seconds: too coarse for a quick reload
        self._wrote_bytecode, sys.dont_write_bytecode = not sys.dont_write_bytecode, True
        self._file, self._loop, self._reaper = file, _Loop(), SenderReaper()
        self._model: Any = None
        try:
            made = _imported(file)
            changed = _completed(made, config, self._told)
            self._configure(changed or config, instance)
            self._model = made()
            if hasattr(self._model, "initialize"):
                _in_model(self._model.initialize, _arguments(self._config, self._told, file, instance))
        except BaseException as error:  # SystemExit too: a model may do anything
            self._forget()
            raise BackendFailed(f"model '{config.name}': {_error_text(error)}") from error
        current.host.call = call
        return Loaded(threads=False, measures=True, config=changed)

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response | None]:
        decoupled = self._config.decoupled
        served = []
        senders = []
        for index, request in enumerate(requests):
            sender = InferenceResponseSender(
                request, index, emit,
                decoupled=decoupled, names=tuple(self._made), check=self._checked, reaper=self._reaper,
            )  # fmt: skip
            senders.append(sender)
            inputs = [Tensor.of(name, array, self._datatype(name, array)) for name, array in request.inputs.items()]
            served.append(InferenceRequest.served(request, inputs, sender))
        try:
            if not hasattr(self._model, "execute"):
                raise TritonModelException(f"Python model {self._file} does not implement `execute` method.")
            returned = _in_model(self._model.execute, served)
            if asyncio.iscoroutine(returned):
                future = self._loop.run(returned)
                if decoupled and not self._iterative:
                    future.add_done_callback(lambda done: self._settle(done, served, senders, emit))
                    return [None] * len(requests)
                returned = future.result()
            answers = self._answers(served, senders, returned)
        except BaseException as error:  # SystemExit too: a model may do anything
            return self._failed(error, senders)
        if decoupled:
            _reschedule(served, senders, emit)
        return answers

    def measured(self) -> tuple[Family, ...]:
        return metrics.measured()

    def close(self) -> None:
        current.host.call = None
        self._loop.stop()
        try:
            if hasattr(self._model, "finalize"):
                _in_model(self._model.finalize)
        except BaseException as error:  # the model is being closed either way
            triton_api.Logger.log_error(_error_text(error))
        current.host.administer = None
        self._forget()

    def _configure(self, config: ModelConfig, instance: int) -> None:
        self._config = config
        self._made = made_by(config)
        self._iterative = config.sequences is not None and config.sequences.iterative
        """Rescheduled requests are reported when `execute` ends."""
        self._bf16 = config.bf16_inputs
        self._instance_name = instance_name(config, instance)

    def _datatype(self, name: str, array: Array) -> Datatype:
        return Datatype.BF16 if name in self._bf16 else DATATYPES[array.dtype]

    def _answers(
        self, served: list[InferenceRequest], senders: list[InferenceResponseSender], returned: object
    ) -> list[Response | None]:
        if returned is None:
            return [None] * len(served)
        name = self._instance_name
        if self._config.decoupled:
            raise _InvalidReturn(
                f"Python model '{name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(returned, list):
            raise _InvalidReturn(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(served):
            raise _InvalidReturn(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(served)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for request, each in zip(served, returned, strict=True):
            _check_returned(request, each)  # before a sender is closed, whose request `_failed` would not answer
        return [self._answer(*each) for each in zip(served, senders, returned, strict=True)]

    def _answer(
        self, request: InferenceRequest, sender: InferenceResponseSender, returned: InferenceResponse | None
    ) -> Response | None:
        if returned is None:
            if not request.rescheduled:
                return None  # the sender has sent the response, or will
            sender.close()
            return Response(reschedule=True)
        try:
            response = self._checked(returned.values(sender.names))
            sender.count(returned, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except BaseException as error:  # an output may hold objects of the model, whose text it makes
            (failed,) = self._failed(error, [sender])
            return failed
        return response

    def _checked(self, response: Response) -> Response:
        """The response, or an error if it contradicts the configuration."""
        for name, array in response.outputs.items():
            spec = self._made.get(name)
            problem = mismatch(spec, array, self._config.name, self._config.max_batch > 0) if spec else ""
            if problem:
                return Response(error=problem)
        return response

    def _failed(self, error: BaseException, senders: list[InferenceResponseSender]) -> list[Response | None]:
        """The same error for all requests of the batch without a response."""
        text = f"Failed to process the request(s) for model '{self._instance_name}', message: {_error_text(error)}"
        return [Response(error=text) if sender.close() else None for sender in senders]

    def _settle(
        self,
        done: "Future[Any]",
        served: list[InferenceRequest],
        senders: list[InferenceResponseSender],
        emit: Emit,
    ) -> None:
        """Completion of a decoupled model's `async def execute`."""
        error = done.exception()
        if error is None:
            _reschedule(served, senders, emit)
            return
        for index, response in enumerate(self._failed(error, senders)):
            if response is not None:
                emit(index, response, True)

    def _forget(self) -> None:
        """Drop the model and the modules that it imported from its own folders."""
        self._model = None
        self._loop.stop()
        self._reaper.stop()
        before, modules = self._before
        sys.dont_write_bytecode = not self._wrote_bytecode
        sys.path[:] = before
        own = str(self._file.parent.parent)
        for name in sorted(sys.modules.keys() - modules):
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if origin.startswith(own) or name == self._file.parent.name:
                del sys.modules[name]


class _InvalidReturn(Exception):  # noqa: N818 - never leaves this file
    """The return value of `execute` is invalid."""


class _LoopExit(Exception):  # noqa: N818 - never leaves this file
    """Wraps, as its cause, an exception of a coroutine that would not just be that of its future."""


async def _guarded(coroutine: Coroutine[Any, Any, object]) -> object:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise _LoopExit from error


class _Loop:
    """The event loop of a model with `async def execute`, in a thread of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, object]) -> "Future[Any]":
        """Start a coroutine in the loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="execute", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(_guarded(coroutine), self._loop)

    def stop(self) -> None:
        """Stop the loop; a coroutine that blocks it is abandoned."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None


def _in_model(method: Callable[..., Any], *given: Any) -> Any:
    """Call the model. A copy of this process that the model forks ends instead of coming back: it must not answer."""
    process = os.getpid()
    status = 0
    try:
        return method(*given)
    except SystemExit as error:
        status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        raise
    except BaseException:
        status = 1
        if os.getpid() != process:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != process:
            os._exit(status)


def _imported(file: Path) -> Any:
    """The model's class. Its module is called `<version>.model`, as in Triton, so that relative imports work."""
    folder = file.parent
    for path in (str(folder), str(folder.parent), IMPORTABLE):
        if path not in sys.path:
            sys.path.append(path)
    package = ModuleType(folder.name)
    package.__path__ = [str(folder)]
    sys.modules[folder.name] = package
    importlib.invalidate_caches()
    module = importlib.import_module(f"{folder.name}.{file.stem}")
    return module.TritonPythonModel


def _completed(made: Any, config: ModelConfig, told: dict[str, Any] | None) -> ModelConfig | None:
    """The configuration as completed by the model; None: the model does not complete it."""
    if COMPLETE in config.parameters or not hasattr(made, "auto_complete_config"):
        return None
    given = made.auto_complete_config(Completing(json.dumps(document(config, told))))
    if not isinstance(given, Completing):
        raise _InvalidReturn(
            f"auto_complete_config function in model '{config.name}' must return a valid pb.ModelConfig object."
        )
    return completed(config, given.as_dict())


def _arguments(config: ModelConfig, told: dict[str, Any] | None, file: Path, instance: int) -> dict[str, str]:
    """The arguments of `initialize`."""
    return {
        "model_config": json.dumps(document(config, told)),
        "model_instance_kind": config.group_of(instance).kind.removeprefix("KIND_"),
        "model_instance_name": instance_name(config, instance),
        "model_instance_device_id": "0",  # a GPU instance's process sees no other device
        "model_repository": str(file.parent.parent),
        "model_version": file.parent.name,
        "model_name": config.name,
    }


def _check_returned(request: InferenceRequest, returned: object) -> None:
    """Raises `_InvalidReturn` if the request may not have that in the list that `execute` returns."""
    if returned is None:
        return
    if request.rescheduled:
        raise _InvalidReturn(
            "Expected a None object in the execute function return list for reschduled request, found type "
            f"'{type(returned)}'."
        )
    if not isinstance(returned, InferenceResponse):
        raise _InvalidReturn(
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            f"'{type(returned)}'."
        )


def _reschedule(served: list[InferenceRequest], senders: list[InferenceResponseSender], emit: Emit) -> None:
    for index, (request, sender) in enumerate(zip(served, senders, strict=True)):
        if request.rescheduled and sender.close():
            emit(index, Response(reschedule=True), True)


def _error_text(error: BaseException) -> str:
    """An exception as Triton shows it: type, text, and the frames of the model, innermost first."""
    if isinstance(error, _InvalidReturn):
        return str(error)
    if isinstance(error, _LoopExit) and error.__cause__:
        error = error.__cause__
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_OUR_FILES):
            frames.append(f"  {code.co_filename}({trace.tb_lineno}): {code.co_name}\n")
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}"
    return f"{text}\n\nAt:\n{''.join(reversed(frames))}" if frames else text
