# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""The language of a text: fastText's 176 languages, the five most likely, as ISO 639 codes."""

from pathlib import Path

import fasttext
import numpy as np
import triton_python_backend_utils as pb

LABELS = 5
PREFIX = "__label__"


class TritonPythonModel:
    """One instance; a text takes microseconds."""

    def initialize(self, args):
        """Load the model."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.model = fasttext.load_model(str(folder / "lid.176.ftz"))

    def execute(self, requests):
        """Answer each request."""
        return [self.answer(pb.get_input_tensor_by_name(request, "INPUT").as_numpy()[:, 0]) for request in requests]

    def answer(self, rows):
        """The most likely languages of each text; bytes that are not UTF-8 are replaced."""
        labels = np.full((len(rows), LABELS), b"", object)
        scores = np.zeros((len(rows), LABELS), np.float32)
        for row, data in enumerate(rows):
            text = " ".join(data.decode(errors="replace").split())
            names, chances = self.model.predict(text, k=LABELS)
            labels[row, : len(names)] = [name.removeprefix(PREFIX).encode() for name in names]
            scores[row, : len(names)] = chances
        return pb.InferenceResponse([pb.Tensor("LABEL", labels), pb.Tensor("SCORE", scores)])
