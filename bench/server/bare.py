"""The runtime alone: full batches, one after the other, nothing in between. Prints `window` when it begins to count,
and one JSON line at the end.

python bench/server/bare.py FILES INPUT BATCH SECONDS ROW PATTERN

FILES: separated by colons; they run one after the other. BATCH: rows at once, or with `-8` the power of two up to 8
that is fastest. ROW: whole numbers, separated by commas. PATTERN: `1` is the runtime's default; with `0` it does not
plan its memory by the shapes that it has seen, as Forebay's model processes have it.
"""

import json
import sys
import time
from typing import Any, Final

import numpy as np
from peers.chain import Chain

TRIALS: Final = 15
"""Of each number of rows, in turn: the speed of a shared machine changes within seconds."""
QUARTILE: Final = 3
"""What counts of their times, in order: only the slow ones are chance."""
TRIAL_S: Final = 0.02
"""At least, and as long as one largest batch."""


def fastest(chain: Chain, name: str, row: Any, most: int) -> int:
    """The number of rows that is fastest at once."""
    sizes = [1 << exponent for exponent in range(most.bit_length())]
    costs: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(TRIALS):
        for size, found in costs.items():
            rows, done = np.repeat(row, size, axis=0), 0
            chain.run({name: rows})
            begun = time.perf_counter()
            while done < most or time.perf_counter() - begun < TRIAL_S:
                chain.run({name: rows})
                done += size
            found.append((time.perf_counter() - begun) / done)
    return min(sizes, key=lambda size: sorted(costs[size])[QUARTILE])


def main() -> None:
    """Run for so long, and say how many rows that were."""
    files, name, batch, seconds, row, pattern = sys.argv[1:]
    chain = Chain(files.split(":"), pattern=pattern == "1")
    one, size = np.array([[int(number) for number in row.split(",")]]), int(batch)
    if size < 0:
        size = fastest(chain, name, one, -size)
    rows = np.repeat(one, size, axis=0)
    for _ in range(3):
        chain.run({name: rows})
    print("window", flush=True)
    runs = 0
    begun, begun_cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < float(seconds):
        chain.run({name: rows})
        runs += 1
    done = runs * size
    print(json.dumps({"rows": size, "done": done, "cpu_us": (time.process_time() - begun_cpu) / done * 1e6}))


if __name__ == "__main__":
    main()
