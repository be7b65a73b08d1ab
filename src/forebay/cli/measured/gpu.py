"""The model server on a GPU compared with PyTorch alone: the results of `bench/gpu/run.py`."""

from typing import Final

import msgspec

from forebay.cli.measured.tables import Table, figure, machine

LOADS: Final = {"http": "over HTTP", "shared": "in system shared memory"}
COLUMNS: Final = (
    "model, instances, inputs",
    "PyTorch alone",
    "through Forebay",
    "ratio",
    "p50 at 70 % load, ms",
    "p99 at 70 % load, ms",
)
ABOUT: Final = (
    "`encoder` is a transformer of BERT-base's size over 128 tokens (1 KB per request), `image` a ResNet-50 over "
    "pictures in FP32 (602 KB per request); both are TorchScript in FP16, in batches of up to 32. PyTorch alone runs "
    "full batches of one array, one after the other; batches of two instances overlap. Pictures are limited by "
    "the processes that copy them from the network to the GPU: a second instance and shared memory help, as do "
    "smaller inputs. Large batches go to the GPU through page-locked memory: in turns with a build that does "
    "without, 2.2 times as many pictures were served over HTTP and 1.4 times as many in shared memory with one "
    "instance, 1.5 and 1.1 times as many with two (medians of two turns, without one in which the machine loaded "
    "CUDA's libraries for the first time). Other benchmarks ran on other cores of the machine meanwhile. Measured "
    "by `python bench/gpu/run.py`, which needs a GPU and is not part of `make bench`."
)


class _Result(msgspec.Struct):
    """bench/gpu/results.json: scenario → figure."""

    rounds: int
    figures: dict[str, dict[str, float]]
    machine: dict[str, int | str]
    versions: dict[str, str]


def tables(document: bytes) -> list[Table]:
    """One table. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    rows = []
    for scenario, f in result.figures.items():
        model, instances, load = scenario.split("_")
        spread = f"{f['ratio']:.2f} ({f['ratio_min']:.2f} to {f['ratio_max']:.2f})"
        cells = (figure(f[key]) for key in ("bare_per_s", "per_s"))
        late = (figure(f[key]) for key in ("p50_ms", "p99_ms"))
        rows.append((f"{model}, {instances}, {LOADS[load]}", *cells, spread, *late))
    how = f"{result.machine['gpu']}, PyTorch {result.versions['torch']}, {machine(result.machine, result.rounds)}"
    return [Table(f"**Model server on a GPU, requests per second** ({how}):", COLUMNS, rows, ABOUT)]
