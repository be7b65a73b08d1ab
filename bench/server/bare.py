"""The runtime alone: full batches, one after the other, nothing in between. Prints `window` when it begins to count,
and one JSON line at the end.

python bench/server/bare.py FILE INPUT BATCH SECONDS ROW PATTERN

ROW: whole numbers, separated by commas. PATTERN: `1` is the runtime's default; with `0` it does not plan its memory
by the shapes that it has seen, as Forebay's model processes have it.
"""

import json
import sys
import time

import numpy as np
import onnxruntime


def main() -> None:
    """Run for so long, and say how many rows that were."""
    file, name, batch, seconds, row, pattern = sys.argv[1:]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")  # as ours: the same numbers everywhere
    options.enable_mem_pattern = pattern == "1"
    session = onnxruntime.InferenceSession(file, options)
    rows = np.array([[int(number) for number in row.split(",")]] * int(batch))
    for _ in range(3):
        session.run(None, {name: rows})
    print("window", flush=True)
    runs = 0
    begun, begun_cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < float(seconds):
        session.run(None, {name: rows})
        runs += 1
    done = runs * int(batch)
    print(json.dumps({"rows": done, "cpu_us": (time.process_time() - begun_cpu) / done * 1e6}))


if __name__ == "__main__":
    main()
