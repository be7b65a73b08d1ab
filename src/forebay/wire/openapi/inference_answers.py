"""The shapes of the Open Inference Protocol's documents, for the API description: tests compare real ones with
them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from forebay.core.serving.config import Datatype
from forebay.wire.openapi.answers import Closed, Count

Dims = list[Annotated[int, Meta(ge=-1)]]


class InferenceError(Closed):
    """An error in the protocol's format."""

    error: str


class ServerMetadata(Closed):
    """The server's metadata, with its protocol extensions."""

    name: str
    version: str
    extensions: list[str]


class Live(Closed):
    """Whether the server is running."""

    live: bool


class Ready(Closed):
    """Whether the server or model is ready; `name` for a model."""

    ready: bool
    name: str | UnsetType = UNSET


class TensorMetadata(Closed):
    """An input or an output. -1 is a variable dimension."""

    name: str
    datatype: Datatype
    shape: Dims


class ModelMetadata(Closed):
    """The inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class InferInput(Struct):
    """An input. Its data are here, flat or nested; after the JSON (`binary_data_size`); or in shared memory."""

    name: str
    datatype: Datatype
    shape: list[Count]
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET


class InferOutput(Struct):
    """A requested output. Parameters: `binary_data`, `classification`, `shared_memory_region` with its place."""

    name: str
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET


class InferRequest(Struct):
    """An inference request. Without `outputs`, all are returned."""

    inputs: list[InferInput]
    outputs: list[InferOutput] | UnsetType = UNSET
    id: str | UnsetType = UNSET
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET


class InferredOutput(Closed):
    """An output; without `data` it is after the JSON or in shared memory."""

    name: str
    datatype: Datatype
    shape: list[Count]
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET


class InferAnswer(Closed):
    """An inference response."""

    model_name: str
    model_version: str
    outputs: list[InferredOutput]
    id: str | UnsetType = UNSET
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET


class Generate(Struct):
    """Inputs by name; other fields are parameters of the request."""

    id: str | UnsetType = UNSET
    parameters: dict[str, Any] | UnsetType = UNSET


class Generated(Struct):
    """Outputs and parameters by name."""

    model_name: str
    model_version: str
    id: str | UnsetType = UNSET


class ModelStatistics(Struct):
    """The statistics of a model version; durations are in nanoseconds, `last_inference` in milliseconds since the
    epoch."""

    name: str
    version: str
    last_inference: Count
    inference_count: Count
    execution_count: Count
    inference_stats: dict[str, dict[str, Count]]


class Statistics(Closed):
    """The statistics of models."""

    model_stats: list[ModelStatistics]


class IndexWish(Struct):
    """Whether to list ready models only."""

    ready: bool = False


class IndexEntry(Closed):
    """A model of the repository, or a version of it."""

    name: str
    version: str | UnsetType = UNSET
    state: Literal["UNAVAILABLE", "READY", "LOADING", "UNLOADING"] | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class LoadParameters(Struct):
    """A configuration as JSON instead of the repository's; files are `file:PATH`, base64; `version`: only that."""

    config: str | UnsetType = UNSET
    version: str | int | UnsetType = UNSET


class Load(Struct):
    """Overrides of the repository's configuration and files."""

    parameters: LoadParameters | UnsetType = UNSET


class UnloadParameters(Struct):
    """Whether to unload models that only this ensemble needs, too; `version`: only that."""

    unload_dependents: bool | UnsetType = UNSET
    version: str | int | UnsetType = UNSET


class Unload(Struct):
    """Options for unloading a model."""

    parameters: UnloadParameters | UnsetType = UNSET


class SystemRegion(Struct):
    """A shared memory region: `byte_size` bytes from `offset` on in the object that `shm_open` calls `key`."""

    key: str
    byte_size: Count
    offset: Count = 0


class CudaHandle(Struct):
    """A cudaIpcMemHandle_t in base64."""

    b64: str


class CudaRegion(Struct):
    """A region of a GPU's memory."""

    raw_handle: CudaHandle
    device_id: Count
    byte_size: Count


class Region(Struct):
    """A registered region."""

    name: str
    byte_size: Count
    key: str | UnsetType = UNSET
    offset: Count | UnsetType = UNSET
    device_id: Count | UnsetType = UNSET


class TraceSettings(Struct):
    """The trace settings. null is the server's default."""

    trace_level: list[str] | str | UnsetType | None = UNSET
    trace_rate: str | int | UnsetType | None = UNSET
    trace_count: str | int | UnsetType | None = UNSET
    log_frequency: str | int | UnsetType | None = UNSET
    trace_file: str | UnsetType | None = UNSET
    trace_mode: str | UnsetType | None = UNSET


class LogSettings(Struct):
    """The log settings."""

    log_info: bool | UnsetType = UNSET
    log_warning: bool | UnsetType = UNSET
    log_error: bool | UnsetType = UNSET
    log_verbose_level: Count | UnsetType = UNSET
    log_format: str | UnsetType = UNSET
    log_file: str | UnsetType = UNSET


ModelConfiguration = dict[str, msgspec.Raw]
"""Triton's ModelConfig as JSON."""
