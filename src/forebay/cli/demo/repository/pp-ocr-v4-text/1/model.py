"""The last step of OCR: decodes the recogniser's output along each line to text."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

SCORE_MIN = 0.5
"""Lines with a lower mean score are dropped."""
NOTHING = 0
"""The CTC blank, between two characters."""


class TritonPythonModel:
    """Responds with the lines that have text: texts, scores and boxes."""

    def initialize(self, args):
        """Load the character set of the network."""
        text = (Path(args["model_repository"]) / args["model_version"] / "characters.txt").read_text(encoding="utf-8")
        self.characters = ["", *text.split("\n"), " "]

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        numbers, sure, widths, boxes = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("CHARACTER", "SURE", "WIDTH", "BOX")
        )
        found = [(*self.read(*each), place) for place, each in enumerate(zip(numbers, sure, strict=True))]
        kept = [each for each in found if widths[each[2]] and each[0].strip() and each[1] >= SCORE_MIN]
        tensors = (
            ("TEXT", np.array([text.encode() for text, _, _ in kept], object)),
            ("SCORE", np.array([score for _, score, _ in kept], np.float32)),
            ("CORNERS", boxes[[place for _, _, place in kept]].reshape(-1, 4, 2)),
        )
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])

    def read(self, numbers, sure):
        """The text of a line and its score: repeated characters are merged (CTC)."""
        new = np.append(True, numbers[1:] != numbers[:-1]) & (numbers != NOTHING)
        text = "".join(self.characters[number] for number in numbers[new])
        return text, float(sure[new].mean()) if text else 0.0
