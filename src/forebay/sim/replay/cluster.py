"""What a simulation assumes of a cluster: hardware, replicas, gateways, and what was promised to clients."""

from typing import Annotated

from pydantic import Field

from forebay.core.scaling.settings import ScaleSettings
from forebay.core.section import Section

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Promise(Section):
    """A request counts as good if it keeps both."""

    ttft_s: Seconds = 5.0
    """Time to the first token, from the client's sending on."""
    tpot_s: Seconds = 0.1
    """Mean time for each token after the first one."""


class SimCluster(Section):
    """Replicas of one model behind gateways."""

    gpu: str = "h100_sxm"
    """`a100_sxm`, `h100_sxm` or `h200_sxm`."""
    model: str = "70B"
    """`8B` or `70B`, of the Llama 3 family."""
    tensor_parallel: int = 4
    """GPUs of one replica. `forebay simulate --calibration` lists what is known."""
    precision: str = "bf16"
    """Of the weights: `bf16` or `fp8`."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 8
    """How many there are; with `scale`, how many at the beginning."""
    scale: ScaleSettings | None = None
    """How many replicas there are follows from the load: as `scale` of a model in a cluster file."""
    start_s: Seconds | None = None
    """What a replica takes to start; none: as its weights on a local disk, an image that is there and an engine with
    its caches take."""
    speeds: Annotated[tuple[Annotated[float, Field(gt=0, le=100)], ...], Field(min_length=1)] = (1.0,)
    """How fast replicas are against what the model says; the list is repeated for all of them."""
    kv_tokens: Annotated[int, Field(ge=1024)] | None = None
    """KV memory of a replica, tokens; by default what its GPUs have left beside the weights."""
    sequences_max: Annotated[int, Field(ge=1, le=4096)] = 256
    """How many requests a replica runs at once."""
    step_tokens_max: Annotated[int, Field(ge=64)] = 8192
    """New tokens in one step: prompts are read in pieces of this size at most."""
    gateways: Annotated[int, Field(ge=1, le=64)] = 1
    report_every_s: Seconds = 0.25
    """How often gateways ask replicas for their load."""
    reports_blocks: bool = True
    """Whether replicas say what their prefix caches hold."""
    queue_max: Annotated[int, Field(ge=0)] = 10_000
    """How many requests may wait in each gateway; more are refused."""
    queue_timeout_s: Seconds = 60.0
    """How long a request waits there before it is refused."""
    slo: Promise = Promise()
    """What was promised to clients."""
    gpu_hour_price: Annotated[float, Field(ge=0)] | None = None
    """What one GPU costs for an hour, in any unit; the report tells the cost in the same."""

    @property
    def speeds_of_all(self) -> tuple[float, ...]:
        """One for each replica."""
        return tuple(self.speeds[at % len(self.speeds)] for at in range(self.replicas))
