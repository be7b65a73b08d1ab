"""The engines of the cluster file: each one's settings with default, unit, bounds and description."""

from typing import Annotated, Any, Literal

from pydantic import Field

from forebay.core.model import Task
from forebay.core.section import Section


class OpenVinoSettings(Section):
    """LLMs on CPU through OpenVINO GenAI: continuous batching, prefix cache."""

    name: Literal["openvino"] = "openvino"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Inference threads; 0: all cores."""
    kv_cache_tokens: Annotated[int, Field(ge=256, le=100_000_000)] = 32_768
    """Size of the KV cache, tokens."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 32
    """Sequences that run at once; more wait in the worker."""
    prefix_cache: bool = True
    """Keep the KV blocks of finished requests for prompts with the same prefix."""
    convert: Literal["auto", "never"] = "auto"
    """`auto`: GGUF files of a type that OpenVINO computes inexactly (Q4_1) are converted to Q8_0 once and cached."""


class LlamaCppSettings(Section):
    """Any GGUF through llama.cpp (package xllamacpp)."""

    name: Literal["llamacpp"] = "llamacpp"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Inference threads; 0: all cores."""
    kv_cache_tokens: Annotated[int, Field(ge=256, le=100_000_000)] = 32_768
    """Size of the KV cache, tokens, shared by all slots."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Slots: sequences that run at once; more wait in the worker."""


class OnnxSettings(Section):
    """Embedding models through ONNX Runtime with dynamic batching."""

    name: Literal["onnx"] = "onnx"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Inference threads; 0: all cores."""
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Largest batch; fewer if inputs are long, about 512 tokens per thread. In an int8 model whose activations are
    quantised dynamically, a text's vector depends a little on its batch; 1 avoids that, more slowly."""
    max_delay_ms: Annotated[float, Field(ge=0, le=10_000)] = 2.0
    """How long a partial batch waits for more inputs, milliseconds."""
    queue_max: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Most inputs that may wait for a batch."""
    pooling: Literal["auto", "cls", "mean"] = "auto"
    """How token vectors become one vector; `auto` reads 1_Pooling/config.json, else `cls`."""
    normalize: bool = True
    """Normalize vectors to length 1."""


class SyntheticSettings(Section):
    """An engine without a model: deterministic text or vectors with configurable timing. For tests and dry runs."""

    name: Literal["synthetic"] = "synthetic"
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Sequences that run at once."""
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 50_000.0
    """Prompt tokens processed per second."""
    step_ms: Annotated[float, Field(ge=0)] = 1.0
    """Duration of a decode step, milliseconds."""
    kv_cache_tokens: Annotated[int, Field(ge=256, le=100_000_000)] = 262_144
    """Size of the simulated KV cache, tokens."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Dimensions of the embeddings."""
    error_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of requests that fail, 0..1: to try out rollouts with a bad revision."""


class ModelServerSettings(Section):
    """Any model of a Triton model repository, with dynamic batching: ONNX, OpenVINO, PyTorch, Python, ensembles."""

    name: Literal["modelserver"] = "modelserver"
    model: str = ""
    """The repository's model to serve under the name in this file; default: the one of the same name, or the only
    one."""
    load: Literal["needed", "all"] = "needed"
    """`needed`: load that model and the steps of its ensemble. `all`: load the whole repository, for a model that
    calls others while it runs."""
    grpc_port_first: Annotated[int, Field(ge=0, le=65535)] = 0
    """Replicas also serve gRPC, bypassing the gateway, each on the first free port at or above this one; 0: no
    gRPC."""


EngineSettings = Annotated[
    OpenVinoSettings | LlamaCppSettings | OnnxSettings | SyntheticSettings | ModelServerSettings,
    Field(discriminator="name"),
]


ENGINES_OF: dict[Task, tuple[str, ...]] = {
    Task.CHAT: ("openvino", "llamacpp", "synthetic"),
    Task.EMBED: ("onnx", "synthetic"),
    Task.TENSOR: ("modelserver",),
}
"""Engines that support a task."""


def named(value: Any) -> Any:
    """`engine: llamacpp` is short for `engine: {name: llamacpp}`."""
    return {"name": value} if isinstance(value, str) else value
