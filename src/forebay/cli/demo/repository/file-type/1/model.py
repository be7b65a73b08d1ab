# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Detects the type of files: Magika's network, its five most likely labels.

The input is the first and the last 1,024 bytes of the content after stripping surrounding white space (within its
first and last 4,096 bytes); positions beyond the content have the value 256. These are the features that its package
documents. Labels are the network's own: the package's thresholds per label are left to the client.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb

LABELS = 5


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        """Load the network."""
        folder = Path(args["model_repository"]) / args["model_version"]
        settings = json.loads((folder / "config.min.json").read_text())
        self.sizes = settings["beg_size"], settings["end_size"]
        self.block, self.padding = settings["block_size"], settings["padding_token"]
        self.labels = np.array([label.encode() for label in settings["target_labels_space"]], object)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
        self.input = self.session.get_inputs()[0].name

    def execute(self, requests):
        """Answer all requests in one run."""
        batches = [pb.get_input_tensor_by_name(request, "INPUT").as_numpy()[:, 0] for request in requests]
        features = np.stack([self.features(data) for batch in batches for data in batch])
        chances = self.session.run(None, {self.input: features})[0]
        best = np.argsort(-chances, axis=1, kind="stable")[:, :LABELS]
        labels, scores = self.labels[best], np.take_along_axis(chances, best, 1).astype(np.float32)
        ends = np.cumsum([len(batch) for batch in batches])[:-1]
        return [
            pb.InferenceResponse([pb.Tensor("LABEL", label), pb.Tensor("SCORE", score)])
            for label, score in zip(np.split(labels, ends), np.split(scores, ends), strict=True)
        ]

    def features(self, data):
        """The network's input for a file."""
        first, last = self.sizes
        found = np.full(first + last, self.padding, np.int32)
        begin = np.frombuffer(data[: self.block].lstrip()[:first], np.uint8)
        end = np.frombuffer(data[-self.block :].rstrip()[-last:], np.uint8)
        found[: len(begin)] = begin
        found[first + last - len(end) :] = end
        return found
