"""BentoML with adaptive batching in its one worker. Started by servers.py in an environment of its own."""

import os

import bentoml
import numpy as np
import onnxruntime


@bentoml.service(
    workers=1, traffic={"timeout": 60, "max_concurrency": 10_000}, logging={"access": {"enabled": False}}
)
class Bench:
    """JSON `{"rows": [[...]]}` in; of all outputs, side by side, one array out."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.x64quantprecision", "1")  # as ours: the same numbers everywhere
        self.session = onnxruntime.InferenceSession(os.environ["BENCH_FILE"], options)

    @bentoml.api(batchable=True, max_batch_size=int(os.environ["BENCH_BATCH"]), max_latency_ms=10_000)
    def predict(self, rows: np.ndarray) -> np.ndarray:
        """Run a batch."""
        found = self.session.run(None, {os.environ["BENCH_INPUT"]: rows.astype(np.int64)})
        return np.concatenate(found, axis=1)
