"""The runtime alone: full batches, one after the other, nothing in between. Prints `window` when it begins to count,
and one JSON line at the end.

python bench/server/bare.py FILES INPUT BATCH SECONDS ROW PATTERN

FILES: separated by colons; they run one after the other. ROW: whole numbers, separated by commas. PATTERN: `1` is
the runtime's default; with `0` it does not plan its memory by the shapes that it has seen, as Forebay's model
processes have it.
"""

import json
import sys
import time

import numpy as np
from peers.chain import Chain


def main() -> None:
    """Run for so long, and say how many rows that were."""
    files, name, batch, seconds, row, pattern = sys.argv[1:]
    chain = Chain(files.split(":"), pattern=pattern == "1")
    rows = np.array([[int(number) for number in row.split(",")]] * int(batch))
    for _ in range(3):
        chain.run({name: rows})
    print("window", flush=True)
    runs = 0
    begun, begun_cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < float(seconds):
        chain.run({name: rows})
        runs += 1
    done = runs * int(batch)
    print(json.dumps({"rows": done, "cpu_us": (time.process_time() - begun_cpu) / done * 1e6}))


if __name__ == "__main__":
    main()
