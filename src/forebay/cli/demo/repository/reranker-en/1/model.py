# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Scores how well documents answer a query: a cross-encoder whose single logit is the score.

Pairs of a batch run in parallel, each by itself: int8 quantisation scales activations by what they are run with, so
that in one array a pair's score would depend on its neighbours. It is also faster, as nothing is padded. A pair that
is too long for the model loses the end of its longer text, which `TRUNCATED` tells.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb
from tokenizers import Tokenizer

TOKENS_MAX = 512
"""Maximum number of positions of the model."""
CHARS_MAX = 20_000
"""How much of a text is tokenized: far more than so many tokens usually have, and the rest would cost memory too."""


class TritonPythonModel:
    """One instance: a thread per CPU."""

    def initialize(self, args):
        """Load tokenizer and network."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(TOKENS_MAX, strategy="longest_first")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # without VNNI, sums of 8-bit products overflow (by a quarter, say); no effect on other processors
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.enable_mem_pattern = False  # patterns are cached per shape, and every pair has a different one
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def execute(self, requests):
        """Answer each request."""
        return [finish() for finish in [self.start(request) for request in requests]]

    def start(self, request):
        """Submit the pairs of a request; returns a function that waits for the scores."""
        queries, documents = (
            pb.get_input_tensor_by_name(request, name).as_numpy()[:, 0] for name in ("QUERY", "DOCUMENT")
        )
        try:
            pairs = [(query.decode(), document.decode()) for query, document in zip(queries, documents, strict=True)]
        except UnicodeDecodeError as error:
            refused = pb.TritonError(f"a text is not UTF-8: {error}", pb.TritonError.INVALID_ARG)
            return lambda: pb.InferenceResponse(error=refused)
        encodings = [self.tokenizer.encode(query[:CHARS_MAX], document[:CHARS_MAX]) for query, document in pairs]
        truncated = [
            bool(encoding.overflowing) or max(map(len, pair)) > CHARS_MAX
            for encoding, pair in zip(encodings, pairs, strict=True)
        ]
        running = [self.threads.submit(self.score, each) for each in encodings]
        return lambda: pb.InferenceResponse(
            [
                pb.Tensor("SCORE", np.array([[each.result()] for each in running], np.float32)),
                pb.Tensor("TOKENS", np.array([[len(each)] for each in encodings], np.int32)),
                pb.Tensor("TRUNCATED", np.array([[each] for each in truncated])),
            ]
        )

    def score(self, encoding):
        """The score of a pair."""
        values = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        feed = {name: np.array([values[name]], np.int64) for name in self.inputs}
        return self.session.run(None, feed)[0][0, 0]
