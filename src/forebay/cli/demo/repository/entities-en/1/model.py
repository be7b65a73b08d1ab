# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Names in English texts: people, places, organisations, dates, sums of money and more; by spaCy.

Each row has as many places as the row with most entities; the rest of it has empty labels.
"""

from pathlib import Path

import numpy as np
import spacy
import triton_python_backend_utils as pb

CHARS_MAX = 100_000
UNUSED = ("tagger", "parser", "senter", "attribute_ruler", "lemmatizer")
"""Parts of the pipeline that entity recognition does not need."""


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        """Load the pipeline."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.pipeline = spacy.load(folder / "en_core_web_sm", exclude=UNUSED)

    def execute(self, requests):
        """Answer each request; one with an invalid text gets an error."""
        batches = [self.texts(pb.get_input_tensor_by_name(request, "INPUT")) for request in requests]
        documents = self.pipeline.pipe([text for batch in batches if isinstance(batch, list) for text in batch])
        return [
            self.answer([next(documents).ents for _ in batch])
            if isinstance(batch, list)
            else pb.InferenceResponse(error=batch)
            for batch in batches
        ]

    def texts(self, tensor):
        """The texts of a request, or what is wrong with them."""
        texts = []
        for row, data in enumerate(tensor.as_numpy()[:, 0]):
            try:
                texts.append(data.decode())
            except UnicodeDecodeError as error:
                return pb.TritonError(f"input[{row}]: it is not UTF-8: {error}", pb.TritonError.INVALID_ARG)
            if len(texts[row]) > CHARS_MAX:
                text = f"input[{row}]: it has {len(texts[row])} characters; this model takes at most {CHARS_MAX}"
                return pb.TritonError(text, pb.TritonError.INVALID_ARG)
        return texts

    def answer(self, rows):
        """The entities of each row."""
        shape = len(rows), max(map(len, rows))
        labels = np.full(shape, b"", object)
        starts, ends = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, entities in enumerate(rows):
            for place, entity in enumerate(entities):
                labels[row, place] = entity.label_.encode()
                starts[row, place], ends[row, place] = entity.start_char, entity.end_char
        return pb.InferenceResponse([pb.Tensor("LABEL", labels), pb.Tensor("START", starts), pb.Tensor("END", ends)])
