"""Memory of a serving process: what requests free is there for the next ones."""

import resource
import subprocess
import sys

REQUESTS = """
import resource
from forebay.modelserver.tuning import tune_memory

tune_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    buffers = [bytearray(100_000) for _ in range(4)]
    del buffers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_buffers_that_are_freed_stay_with_the_process() -> None:
    run = subprocess.run([sys.executable, "-c", REQUESTS], check=True, capture_output=True, text=True)
    pages = 4 * 100_000 // resource.getpagesize()
    assert int(run.stdout) < 10 * pages  # 200 times as many if they went back to the kernel
