"""The protocol's documents about servers and models, as JSON in Triton's field order."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from forebay.core.serving.config import VARIABLE, ModelConfig, TensorSpec
from forebay.core.serving.statistics import Duration, ModelStatistics
from forebay.wire.oip.ports import MemoryKind, Region

EXTENSIONS: Final = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "binary_tensor_data", "parameters", "statistics", "trace",
    "logging",
)  # fmt: skip
"""The protocol extensions that a server announces."""
ERROR_CHARS_MAX: Final = 2000
"""Errors may quote names and shapes from a request, and those may be as long as the request."""

encode = msgspec.json.Encoder().encode


def error(text: str) -> bytes:
    """The body of an error response."""
    return encode({"error": text[:ERROR_CHARS_MAX]})


def server_metadata(name: str, version: str) -> bytes:
    """The metadata of the server."""
    return encode({"name": name, "version": version, "extensions": EXTENSIONS})


def model_metadata(config: ModelConfig, versions: Sequence[str]) -> dict[str, Any]:
    """The inputs and outputs of a model, and those of its versions that are meant."""
    batches = config.max_batch > 0
    return {
        "name": config.name,
        "versions": versions,
        "platform": config.platform or config.backend,
        "inputs": [_tensor(spec, batches) for spec in config.inputs],
        "outputs": [_tensor(spec, batches) for spec in config.outputs],
    }


def statistics(models: Sequence[ModelStatistics]) -> dict[str, Any]:
    """The statistics of models."""
    return {"model_stats": [_model_statistics(each) for each in models]}


def index_entry(name: str, version: str, state: str, reason: str) -> dict[str, str]:
    """A model (version) of the repository index; empty fields are left out."""
    entry = {"name": name}
    if version:
        entry["version"] = version
    if state:
        entry["state"] = state
    if reason:
        entry["reason"] = reason
    return entry


def regions(known: Sequence[Region]) -> list[dict[str, Any]]:
    """The registered shared memory regions."""
    return [_region(each) for each in known]


def _tensor(spec: TensorSpec, batches: bool) -> dict[str, Any]:
    shape = [VARIABLE, *spec.dims] if batches else spec.dims
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}


def _region(region: Region) -> dict[str, Any]:
    if region.kind is MemoryKind.CUDA:
        return {"name": region.name, "device_id": region.device, "byte_size": region.size}
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.size}


def _model_statistics(model: ModelStatistics) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference_ms,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": _durations(
            {
                "success": model.success,
                "fail": model.fail,
                "queue": model.queue,
                "compute_input": model.compute_input,
                "compute_infer": model.compute_infer,
                "compute_output": model.compute_output,
                "cache_hit": model.cache_hit,
                "cache_miss": model.cache_miss,
            }
        ),
        "response_stats": {
            index: _durations(
                {
                    "compute_infer": each.compute_infer,
                    "compute_output": each.compute_output,
                    "success": each.success,
                    "fail": each.fail,
                    "empty_response": each.empty_response,
                    "cancel": each.cancel,
                }
            )
            for index, each in model.responses.items()
        },
        "batch_stats": [
            {
                "batch_size": size,
                **_durations(
                    {
                        "compute_input": each.compute_input,
                        "compute_infer": each.compute_infer,
                        "compute_output": each.compute_output,
                    }
                ),
            }
            for size, each in sorted(model.batches.items())
        ],
        "memory_usage": [],
    }


def _durations(named: Mapping[str, Duration]) -> dict[str, dict[str, int]]:
    return {name: {"count": each.count, "ns": each.ns} for name, each in named.items()}
