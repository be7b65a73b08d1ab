"""The simulated cluster: hardware, replicas, gateways, and objectives."""

from typing import Annotated

from pydantic import Field

from forebay.core.scaling.settings import ScaleSettings
from forebay.core.section import Section

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Promise(Section):
    """A request counts as good if it meets both."""

    ttft_s: Seconds = 5.0
    """Time to the first token, from when the client sends the request, seconds."""
    tpot_s: Seconds = 0.1
    """Mean time per token after the first, seconds."""


class SimCluster(Section):
    """Replicas of one model behind gateways."""

    gpu: str = "h100_sxm"
    """`a100_sxm`, `h100_sxm` or `h200_sxm`."""
    model: str = "70B"
    """`8B` or `70B`, of the Llama 3 family."""
    tensor_parallel: int = 4
    """GPUs per replica. `forebay simulate --calibration` lists the known combinations."""
    precision: str = "bf16"
    """Precision of the weights: `bf16` or `fp8`."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 8
    """Number of replicas; with `scale`, the initial number."""
    scale: ScaleSettings | None = None
    """Autoscaling, as `scale` of a model in a cluster file; none: a constant number."""
    start_s: Seconds | None = None
    """Start time of a replica, seconds; none: estimated for weights on a local disk, a present image and an engine
    with its caches."""
    speeds: Annotated[tuple[Annotated[float, Field(gt=0, le=100)], ...], Field(min_length=1)] = (1.0,)
    """Speed of replicas relative to the model; the list is repeated for all of them."""
    kv_tokens: Annotated[int, Field(ge=1024)] | None = None
    """KV cache of a replica, tokens; default: what its GPUs have left beside the weights."""
    sequences_max: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most requests that a replica runs at once."""
    step_tokens_max: Annotated[int, Field(ge=64)] = 8192
    """Most new tokens per step; longer prompts are prefilled in chunks."""
    gateways: Annotated[int, Field(ge=1, le=64)] = 1
    report_every_s: Seconds = 0.25
    """Interval at which gateways poll the load of replicas, seconds."""
    reports_blocks: bool = True
    """Whether replicas report their prefix caches."""
    queue_max: Annotated[int, Field(ge=0)] = 10_000
    """Most requests queued in each gateway; more are rejected."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait in that queue, seconds."""
    slo: Promise = Promise()
    """Objectives."""
    gpu_hour_price: Annotated[float, Field(ge=0)] | None = None
    """Price of a GPU hour, in any unit; the report shows the cost in the same unit."""

    @property
    def speeds_of_all(self) -> tuple[float, ...]:
        """One per replica."""
        return tuple(self.speeds[at % len(self.speeds)] for at in range(self.replicas))
