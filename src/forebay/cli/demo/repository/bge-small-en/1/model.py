# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Text embeddings: BERT, with the normalised vector of the first token as the embedding.

Rows of a batch run in parallel, each by itself: int8 quantisation scales activations by what they are run with, so
that in one array a text's vector would depend on its neighbours. It is also faster, as nothing is padded.
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
CHARS_MAX = 100_000
"""Far more than so many tokens have: tokens take hundreds of times the memory of their text."""


class TritonPythonModel:
    """One instance: a thread per CPU."""

    def initialize(self, args):
        """Load tokenizer and network."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # without VNNI, sums of 8-bit products overflow (by a quarter, say); no effect on other processors
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.enable_mem_pattern = False  # patterns are cached per shape, and every text has a different one
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def execute(self, requests):
        """Answer each request; one with a text that the model cannot process gets an error."""
        return [finish() for finish in [self.start(request) for request in requests]]

    def start(self, request):
        """Submit the texts of a request; returns a function that waits for the embeddings."""
        try:
            texts = [each.decode() for each in pb.get_input_tensor_by_name(request, "TEXT").as_numpy()[:, 0]]
            encodings = [self.encode(text, row) for row, text in enumerate(texts)]
        except ValueError as error:
            refused = pb.TritonError(str(error), pb.TritonError.INVALID_ARG)
            return lambda: pb.InferenceResponse(error=refused)
        running = [self.threads.submit(self.embed, each) for each in encodings]
        return lambda: pb.InferenceResponse(
            [
                pb.Tensor("EMBEDDING", np.stack([each.result() for each in running])),
                pb.Tensor("TOKENS", np.array([[len(each)] for each in encodings], np.int32)),
            ]
        )

    def encode(self, text, row):
        """Tokenize a text."""
        if len(text) > CHARS_MAX:
            raise ValueError(f"input[{row}]: it has {len(text)} characters; this model takes at most {CHARS_MAX}")
        found = self.tokenizer.encode(text)
        if len(found) > TOKENS_MAX:
            raise ValueError(f"input[{row}]: it has {len(found)} tokens; this model takes at most {TOKENS_MAX}")
        return found

    def embed(self, encoding):
        """The embedding of a text."""
        values = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        feed = {name: np.array([values[name]], np.int64) for name in self.inputs}
        vector = self.session.run(None, feed)[0][0, 0]
        return vector / np.linalg.norm(vector)
