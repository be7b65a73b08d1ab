"""BentoML with adaptive batching in its one worker. Started by servers.py in an environment of its own."""

import os

import bentoml
import numpy as np
from chain import Chain


@bentoml.service(
    workers=1, traffic={"timeout": 60, "max_concurrency": 10_000}, logging={"access": {"enabled": False}}
)
class Bench:
    """JSON `{"rows": [[...]]}` in; of all outputs, side by side, one array out."""

    def __init__(self) -> None:
        self.chain = Chain(os.environ["BENCH_FILES"].split(os.pathsep))

    @bentoml.api(batchable=True, max_batch_size=int(os.environ["BENCH_BATCH"]), max_latency_ms=10_000)
    def predict(self, rows: np.ndarray) -> np.ndarray:
        """Run a batch."""
        found = self.chain.run({os.environ["BENCH_INPUT"]: rows.astype(np.int64)})
        return np.concatenate(found, axis=1)
