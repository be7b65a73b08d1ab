"""Known hardware: step times from data/steps.json, memory capacity, and start times."""

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from forebay.sim.engine.step import StepTime

GIB: Final = 1 << 30
MEMORY_BYTES: Final = {"a100_sxm": 80 * GIB, "h100_sxm": 80 * GIB, "h200_sxm": 141 * GIB}
"""Memory of one GPU."""
MEMORY_SHARE: Final = 0.9
"""Share of it that vLLM uses by default (`gpu_memory_utilization`)."""
OVERHEAD_BYTES: Final = 2_500_000_000
"""Per GPU, for activations, CUDA graphs and communication."""
KV_TOKEN_BYTES: Final = {"8B": 131_072, "70B": 327_680}
"""Over all layers in BF16, for Llama 3.1; with FP8 weights the cache stays BF16."""
WEIGHTS_BYTES: Final = {
    ("8B", "bf16"): 16_100_000_000,
    ("8B", "fp8"): 8_000_000_000,
    ("70B", "bf16"): 141_000_000_000,
    ("70B", "fp8"): 70_600_000_000,
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of one replica, and its model."""

    gpu: str
    model: str
    """`8B` or `70B`, with Llama 3.1's shapes."""
    gpus: int
    """Tensor parallel size."""
    precision: str
    """Precision of the weights: `bf16` or `fp8`."""
    step: StepTime
    weights_bytes: int
    """Over all its GPUs."""
    kv_tokens: int
    """Capacity of its KV cache."""

    @property
    def name(self) -> str:
        """Such as `h100_sxm/70B/tp4/fp8`."""
        return _name(self.gpu, self.model, self.gpus, self.precision)

    def scaled(self, factor: float) -> "Hardware":
        """A copy whose steps take `factor` times as long."""
        return replace(self, step=self.step.scaled(factor))


def hardware(gpu: str, model: str, gpus: int, precision: str = "bf16") -> Hardware:
    """One of `rows()`. Raises ValueError, which lists them, for any other."""
    wanted = _name(gpu, model, gpus, precision)
    found = _rows().get(wanted)
    if found is None:
        raise ValueError(f"no step times are known for {wanted}; known:  {', '.join(_rows())}")
    return found


def rows() -> tuple[Hardware, ...]:
    """All hardware with known step times, by name."""
    return tuple(_rows().values())


def kv_tokens(gpu: str, model: str, gpus: int, precision: str) -> int:
    """KV cache capacity, tokens: 0.9·memory - weights - overhead."""
    free_bytes = (MEMORY_SHARE * MEMORY_BYTES[gpu] - OVERHEAD_BYTES) * gpus - WEIGHTS_BYTES[model, precision]
    return int(free_bytes / KV_TOKEN_BYTES[model])


class Start(StrEnum):
    """What a starting replica finds prepared."""

    STANDBY = "standby"
    """It is already running, without traffic."""
    PREWARMED = "prewarmed"
    """The process runs, and the weights are in host memory."""
    LOCAL = "local"
    """Image, weights and compilation caches are on a local disk."""
    COLD = "cold"
    """Nothing is prepared: image and weights are downloaded, everything is compiled."""


class StartTimes(NamedTuple):
    """A start takes place_s + weights / bytes_per_s + init_s."""

    place_s: float
    """Scheduling and image."""
    bytes_per_s: float
    init_s: float
    """Imports, compilation and CUDA graphs."""


START_TIMES: Final = {
    Start.PREWARMED: StartTimes(0.0, 13e9, 2.0),
    Start.LOCAL: StartTimes(10.0, 6e9, 64.0),
    Start.COLD: StartTimes(30.0, 2e9, 200.0),
}
"""Loading at 6 to 13 GB/s as measured by ServerlessLLM, 2 GB/s for a cloud volume with a streaming loader; vLLM
starts with and without caches as measured by Tensorfuse. Placement times are assumed."""


def start_s(row: Hardware, start: Start) -> float:
    """Time until a replica on such hardware is ready, seconds."""
    if start is Start.STANDBY:
        return 0.0
    times = START_TIMES[start]
    return times.place_s + row.weights_bytes / times.bytes_per_s + times.init_s


def _name(gpu: str, model: str, gpus: int, precision: str) -> str:
    return f"{gpu}/{model}/tp{gpus}/{precision}"


@cache
def _rows() -> dict[str, Hardware]:
    data = json.loads((resources.files("forebay.sim.engine") / "data" / "steps.json").read_text())
    found = [
        Hardware(
            gpu=row["gpu"], model=row["model"], gpus=row["gpus"], precision=row["precision"],
            step=StepTime(
                fixed_s=row["fixed_ms"] / 1e3,
                weights_s=row["weights_ms"] / 1e3,
                token_s=row["ktoken_ms"] / 1e6,
                power=row["power"],
                square_s=row["msquare_ms"] / 1e9,
                context_s=row["kcontext_ms"] / 1e6,
                sequence_s=row["sequence_ms"] / 1e3,
            ),
            weights_bytes=WEIGHTS_BYTES[row["model"], row["precision"]],
            kv_tokens=kv_tokens(row["gpu"], row["model"], row["gpus"], row["precision"]),
        )
        for row in data["rows"]
    ]  # fmt: skip
    return {row.name: row for row in sorted(found, key=lambda row: row.name)}
