"""LitServe with its fast queue. Started by servers.py in an environment of its own."""

import os
from typing import Any

import litserve
import numpy as np
from chain import Chain


class Api(litserve.LitAPI):
    """JSON `{"row": [...]}` in, the outputs as lists out."""

    def setup(self, device: str) -> None:
        """Load the model."""
        self.chain = Chain(os.environ["BENCH_FILES"].split(os.pathsep))

    def decode_request(self, request: dict[str, Any]) -> Any:
        """One row."""
        return request["row"]

    def batch(self, inputs: list[Any]) -> Any:
        """The rows as one array."""
        return np.array(inputs, np.int64)

    def predict(self, x: Any) -> list[Any]:
        """All outputs."""
        return self.chain.run({os.environ["BENCH_INPUT"]: x})

    def unbatch(self, output: list[Any]) -> list[Any]:
        """The outputs of each row."""
        return list(zip(*output, strict=True))

    def encode_response(self, output: Any) -> dict[str, Any]:
        """Lists by name."""
        return {name: row.tolist() for name, row in zip(self.chain.names, output, strict=True)}


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
