"""All calls except inference: server and model information, repository, shared memory, settings."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.statistics import Duration, ModelStatistics
from forebay.modelserver.ports import Models
from forebay.modelserver.repository.form.schema import message_of
from forebay.wire.oip.control import CONFIG, FILE, VERSION
from forebay.wire.oip.documents import EXTENSIONS, model_metadata
from forebay.wire.oip.fields import invalid
from forebay.wire.oip.ports import MemoryKind, Region, Regions, Settings

_SETTLED: Final = frozenset({Kind.NOT_FOUND, Kind.UNAVAILABLE})
"""Expected reasons why a model is not ready."""
_LOG_KINDS: Final = {
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}
_DURATIONS: Final = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip
_BATCH_DURATIONS: Final = ("compute_input", "compute_infer", "compute_output")
_RESPONSE_DURATIONS: Final = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


class Administration:
    """Calls, named as in the protocol's service, from request to response message. All raise `Refused`."""

    def __init__(self, models: Models, regions: Regions, settings: Settings, name: str, version: str) -> None:
        self._models = models
        self._regions = regions
        self._settings = settings
        self._metadata = pb.ServerMetadataResponse(name=name, version=version, extensions=EXTENSIONS)

    # --- server and model information

    def server_live(self, _: Any) -> Any:
        """Liveness of the server."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, _: Any) -> Any:
        """Whether the server is ready."""
        return pb.ServerReadyResponse(ready=self._models.ready)

    def server_metadata(self, _: Any) -> Any:
        """Name, version and extensions of the server."""
        return self._metadata

    def model_ready(self, message: Any) -> Any:
        """Whether a model is ready; an unknown one is not."""
        try:
            self._models.view(message.name, message.version)
        except Refused as refused:
            if refused.kind not in _SETTLED:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    def model_metadata(self, message: Any) -> Any:
        """Inputs and outputs of a model."""
        view = self._models.view(message.name, message.version)
        versions = [message.version] if message.version else view.versions
        return pb.ModelMetadataResponse(**_metadata(view.config, versions))

    def model_config(self, message: Any) -> Any:
        """Configuration of a model."""
        view = self._models.view(message.name, message.version)
        return pb.ModelConfigResponse(config=message_of(dict(view.document)))

    def model_statistics(self, message: Any) -> Any:
        """Statistics of models."""
        found = self._models.statistics(message.name, message.version)
        return pb.ModelStatisticsResponse(model_stats=[_statistics(each) for each in found])

    # --- the repository

    async def repository_index(self, message: Any) -> Any:
        """List the repository index."""
        _check_repository(message)
        if not message.ready:
            await self._models.refresh()
        answer = pb.RepositoryIndexResponse()
        for each in self._models.index(message.ready):
            answer.models.add(name=each.name, version=each.version, state=str(each.state), reason=each.reason)
        return answer

    async def repository_model_load(self, message: Any) -> Any:
        """Load or reload a model."""
        _check_repository(message)
        parameters: dict[str, str | bytes | int | bool] = {}
        for name, value in message.parameters.items():
            if name == VERSION:
                parameters[name] = _version(value)
            elif name == CONFIG:
                parameters[name] = _load_parameter(name, value, "string_param")
            elif name.startswith(FILE):
                parameters[name] = _load_parameter(name, value, "bytes_param")
            else:
                raise invalid(f"unrecognized load parameter '{name}'.")
        await self._models.load(message.model_name, parameters)
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(self, message: Any) -> Any:
        """Unload a model, or one version of it."""
        _check_repository(message)
        dependents = message.parameters.get("unload_dependents")
        if dependents is not None and dependents.WhichOneof("parameter_choice") != "bool_param":
            raise invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        version = message.parameters.get(VERSION)
        await self._models.unload(
            message.model_name,
            dependents is not None and dependents.bool_param,
            "" if version is None else _version(version),
        )
        return pb.RepositoryModelUnloadResponse()

    # --- shared memory

    def system_shared_memory_status(self, message: Any) -> Any:
        """Registered regions of system memory."""
        answer = pb.SystemSharedMemoryStatusResponse()
        for each in self._regions.status(MemoryKind.SYSTEM, message.name):
            region = answer.regions[each.name]
            region.name, region.key, region.offset, region.byte_size = each.name, each.key, each.offset, each.size
        return answer

    def system_shared_memory_register(self, message: Any) -> Any:
        """Register a region of system memory."""
        region = Region(MemoryKind.SYSTEM, message.name, message.byte_size, message.offset, message.key)
        if not region.name:
            raise invalid("'region name' is necessary to register system shared memory region")
        self._regions.register(region)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_shared_memory_unregister(self, message: Any) -> Any:
        """Unregister a region of system memory, or all."""
        self._regions.unregister(MemoryKind.SYSTEM, message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_shared_memory_status(self, message: Any) -> Any:
        """Registered regions of GPU memory."""
        answer = pb.CudaSharedMemoryStatusResponse()
        for each in self._regions.status(MemoryKind.CUDA, message.name):
            region = answer.regions[each.name]
            region.name, region.device_id, region.byte_size = each.name, each.device, each.size
        return answer

    def cuda_shared_memory_register(self, message: Any) -> Any:
        """Register a region of GPU memory."""
        self._regions.register(
            Region(
                MemoryKind.CUDA,
                message.name,
                message.byte_size,
                device=message.device_id,
                handle=message.raw_handle,
            )
        )
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_shared_memory_unregister(self, message: Any) -> Any:
        """Unregister a region of GPU memory, or all."""
        self._regions.unregister(MemoryKind.CUDA, message.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    # --- settings

    def trace_setting(self, message: Any) -> Any:
        """Show or change trace settings."""
        model = message.model_name
        if message.settings:
            self._settings.trace(model)  # reject unknown models before anything changes
            self._settings.change_trace(model, _trace_changes(message.settings))
        answer = pb.TraceSettingResponse()
        for name, value in self._settings.trace(model).items():
            answer.settings[name].value.extend([value] if isinstance(value, str) else value)
        return answer

    def log_settings(self, message: Any) -> Any:
        """Show or change log settings."""
        if message.settings:
            self._settings.change_logging(_log_changes(message.settings))
        answer = pb.LogSettingsResponse()
        for name, value in self._settings.logging().items():
            kind = _LOG_KINDS.get(name, ("string_param", ""))[0]
            setattr(answer.settings[name], kind, value)
        return answer


def _metadata(config: ModelConfig, versions: Sequence[str]) -> dict[str, Any]:
    """The message's fields are named as in the JSON document."""
    return {**model_metadata(config, versions), "versions": versions}


def _statistics(model: ModelStatistics) -> Any:
    message = pb.ModelStatistics(
        name=model.name,
        version=model.version,
        last_inference=model.last_inference_ms,
        inference_count=model.inference_count,
        execution_count=model.execution_count,
    )
    _set_durations(message.inference_stats, model, _DURATIONS)
    for size, batch in sorted(model.batches.items()):
        _set_durations(message.batch_stats.add(batch_size=size), batch, _BATCH_DURATIONS)
    for index, response in model.responses.items():
        _set_durations(message.response_stats[index], response, _RESPONSE_DURATIONS)
    return message


def _set_durations(message: Any, source: object, names: Sequence[str]) -> None:
    for name in names:
        duration: Duration = getattr(source, name)
        field = getattr(message, name)
        field.count, field.ns = duration.count, duration.ns
        field.SetInParent()


def _check_repository(message: Any) -> None:
    if message.repository_name:
        raise Refused(Kind.UNSUPPORTED, "'repository_name' specification is not supported")


def _load_parameter(name: str, value: Any, kind: str) -> Any:
    if value.WhichOneof("parameter_choice") != kind:
        raise invalid(f"invalid value type for load parameter '{name}', expected {kind}.")
    return getattr(value, kind)


def _version(value: Any) -> str:
    """A version number, given as a string or an integer."""
    if value.WhichOneof("parameter_choice") == "int64_param":
        return str(value.int64_param)
    text: str = _load_parameter(VERSION, value, "string_param")
    return text


def _trace_changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As in the JSON document: no value resets to the default."""
    changes: dict[str, Any] = {}
    for name in sorted(settings):
        values = list(settings[name].value)
        if name == "trace_level":
            changes[name] = values or None
        elif len(values) > 1:
            raise invalid(f"expect only 1 value for '{name}'")
        else:
            changes[name] = values[0] if values else None
    return changes


def _log_changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in sorted(settings):
        value = settings[name]
        kind = value.WhichOneof("parameter_choice")
        wanted, what = _LOG_KINDS.get(name, (kind, ""))
        if kind != wanted:
            raise invalid(f"expect {what} for '{name}'")
        changes[name] = getattr(value, kind) if kind else None
    return changes
