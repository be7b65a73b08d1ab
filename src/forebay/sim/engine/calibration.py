"""Errors of the engine model against end-to-end measurements: data/measured.csv, whose source is in NOTICE.txt.

Two predictions are compared: the formula of a step alone, as if all clients' sequences decoded at an average context
and each step paid its share of the prompts; and the replica as simulations run it, with a closed loop of clients.
"""

import csv
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from statistics import fmean, median, quantiles
from typing import Final, NamedTuple

from forebay.sim.engine.hardware import Hardware, hardware
from forebay.sim.engine.replica import Replica
from forebay.sim.engine.values import Job, Kind

SEQUENCES_MAX: Final = 1024
"""More than the clients of any measured loop."""
REQUESTS: Final = 10
"""Requests per client; all clients start at once."""
SPREAD: Final = 0.2
"""Response lengths vary evenly by this share around the mean: with equal lengths all clients would stay in step."""
GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""The fractional parts of its multiples fill 0..1 evenly."""
OVERLAP: Final = 0.7
"""Share of the weight-loading time that a decoding step spends anyway, so that a prompt in it does not add it."""

CAVEATS: Final = (
    "The measured points come with the operator tables to which the constants were fitted: their authors may have "
    "tuned one against the other.",
    "Nothing measured end to end is here for A100, nor for 70B with BF16 weights.",
    "8B is not validated as 70B is: vLLM's few points are far off where answers are short, and why is not known. "
    "Believe a claim about 8B only if it holds at step times x0.6 to x1.3.",
    "The step times are vLLM's: TensorRT-LLM needs about four fifths of them on 70B, and waits less for its cache.",
    "For 8B on TensorRT-LLM the source states no precision, and the name of the model is that of the BF16 weights. "
    "It is compared with BF16; with FP8 the time per token would be 23 % off instead of 3 %.",
    "How many requests a client sent, and how lengths varied, is not stated. Ten each, all clients beginning at once,"
    " is what the times to the first token look like; without that first wave they come out 43 % off, too short.",
)
"""To be shown with the errors."""


class Point(NamedTuple):
    """A measured closed loop of clients against one replica."""

    engine: str
    gpu: str
    model: str
    gpus: int
    precision: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    """Number of clients, each of which sends its next request after the previous response."""
    ttft_s: float
    """Mean time to the first token."""
    tpot_s: float
    """Mean time per output token."""


class Errors(NamedTuple):
    """Errors of one prediction over a set of points."""

    subset: str
    what: str
    """The predicted quantity and the method."""
    points: int
    error_mean: float
    """Mean absolute relative error."""
    error_p95: float
    ratio_median: float
    """Median of measured / predicted: below 1, reality was faster."""


SUBSETS: Final[tuple[tuple[str, Callable[[Point], bool]], ...]] = (
    ("70B FP8, vLLM", lambda point: point.model == "70B" and point.engine == "vllm"),
    (
        "70B FP8, vLLM, H100",
        lambda point: (point.model, point.engine, point.gpu) == ("70B", "vllm", "h100_sxm"),
    ),
    (
        "70B FP8, vLLM, H200",
        lambda point: (point.model, point.engine, point.gpu) == ("70B", "vllm", "h200_sxm"),
    ),
    ("70B FP8, TensorRT-LLM, H200", lambda point: point.model == "70B" and point.engine == "trtllm"),
    ("8B FP8, vLLM, H200", lambda point: point.model == "8B" and point.engine == "vllm"),
    ("8B FP8, SGLang, H200", lambda point: point.model == "8B" and point.engine == "sglang"),
    ("8B BF16, TensorRT-LLM, H100", lambda point: point.model == "8B" and point.engine == "trtllm"),
    ("all", lambda point: True),
)


@cache
def points() -> tuple[Point, ...]:
    """All measured points. A precision that the source does not state is that of the original weights, BF16."""
    text = (resources.files("forebay.sim.engine") / "data" / "measured.csv").read_text()
    return tuple(
        Point(
            row["engine"], row["gpu"], row["model"], int(row["gpus"]), row["precision"] or "bf16",
            int(row["prompt_tokens"]), int(row["output_tokens"]), int(row["concurrency"]),
            float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3,
        )
        for row in csv.DictReader(text.splitlines())
    )  # fmt: skip


def formula_tpot_s(point: Point) -> float:
    """Time of a step in which every client decodes halfway through its response, plus a step's share of the
    prompts."""
    step, clients, prompt = _row(point).step, point.concurrency, point.prompt_tokens
    context = clients * (prompt + point.output_tokens // 2)
    prompt_s = step.step_s(prompt, prompt * prompt / 2, 0, 0) - OVERLAP * (step.fixed_s + step.weights_s)
    return step.step_s(clients, 0.0, context, clients) + clients / point.output_tokens * prompt_s


class Times(NamedTuple):
    """Means over the requests of a loop."""

    ttft_s: float
    tpot_s: float


@cache
def simulated(point: Point) -> Times:
    """The times that the loop's clients see at a simulated replica."""
    replica = Replica(_row(point), sequences_max=SEQUENCES_MAX)
    total = point.concurrency * REQUESTS
    offered_at: list[float] = []
    first_at: dict[int, float] = {}
    ttft_s = tpot_s = 0.0

    def offer(now: float) -> None:
        id = len(offered_at)
        longer = SPREAD * (2 * (id * GOLDEN % 1.0) - 1)
        replica.offer(Job(id, point.prompt_tokens, round(point.output_tokens * (1 + longer))), now)
        offered_at.append(now)

    for _ in range(point.concurrency):
        offer(0.0)
    while replica.next_at < math.inf:
        for event in replica.advance(replica.next_at):
            if event.kind is Kind.FIRST:
                first_at[event.id] = event.at
                ttft_s += event.at - offered_at[event.id]
                continue
            tpot_s += (event.at - first_at[event.id]) / (event.tokens - 1)
            if len(offered_at) < total:
                offer(event.at)
    return Times(ttft_s / total, tpot_s / total)


def errors() -> tuple[Errors, ...]:
    """Errors of the formula and of a simulated replica for each subset; takes some seconds."""
    found = []
    for name, belongs in SUBSETS:
        some = [point for point in points() if belongs(point)]
        tpots_s, ttfts_s = [point.tpot_s for point in some], [point.ttft_s for point in some]
        times = [simulated(point) for point in some]
        found += [
            _errors(name, "time per token, formula", tpots_s, [formula_tpot_s(point) for point in some]),
            _errors(name, "time per token, replica", tpots_s, [each.tpot_s for each in times]),
            _errors(name, "time to first token, replica", ttfts_s, [each.ttft_s for each in times]),
        ]
    return tuple(found)


def _errors(subset: str, what: str, measured: Sequence[float], said: Sequence[float]) -> Errors:
    off = [abs(one / other - 1) for one, other in zip(said, measured, strict=True)]
    ratios = [other / one for one, other in zip(said, measured, strict=True)]
    p95 = quantiles(off, n=20, method="inclusive")[-1]
    return Errors(subset, what, len(off), fmean(off), p95, median(ratios))


def _row(point: Point) -> Hardware:
    return hardware(point.gpu, point.model, point.gpus, point.precision)
