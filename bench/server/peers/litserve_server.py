"""LitServe with its fast queue. Started by servers.py in an environment of its own."""

import os
from typing import Any

import litserve
import numpy as np
import onnxruntime


class Api(litserve.LitAPI):
    """JSON `{"row": [...]}` in, the outputs as lists out."""

    def setup(self, device: str) -> None:
        """Load the model on one thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.x64quantprecision", "1")  # as ours: the same numbers everywhere
        self.session = onnxruntime.InferenceSession(os.environ["BENCH_FILE"], options)
        self.names = [output.name for output in self.session.get_outputs()]

    def decode_request(self, request: dict[str, Any]) -> Any:
        """One row."""
        return request["row"]

    def batch(self, inputs: list[Any]) -> Any:
        """The rows as one array."""
        return np.array(inputs, np.int64)

    def predict(self, x: Any) -> list[Any]:
        """All outputs."""
        return self.session.run(None, {os.environ["BENCH_INPUT"]: x})

    def unbatch(self, output: list[Any]) -> list[Any]:
        """The outputs of each row."""
        return list(zip(*output, strict=True))

    def encode_response(self, output: Any) -> dict[str, Any]:
        """Lists by name."""
        return {name: row.tolist() for name, row in zip(self.names, output, strict=True)}


if __name__ == "__main__":
    api = Api(max_batch_size=int(os.environ["BENCH_BATCH"]), batch_timeout=float(os.environ["BENCH_DELAY_S"]))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
