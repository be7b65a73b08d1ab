"""The last step of the detector: from scores of all anchors to objects."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

OBJECTS_MAX = 100
"""Maximum per image; rows with fewer are padded with empty labels."""
SCORE_MIN = 0.05
"""Minimum score of an object."""
OVERLAP_MAX = 0.6
"""Non-maximum suppression: of two boxes of a class with a higher IoU only the one with the higher score is kept."""


class TritonPythonModel:
    """Responds with labels, scores and boxes (left, top, right, bottom)."""

    def initialize(self, args):
        """Load the class names."""
        text = (Path(args["model_repository"]) / "labels.txt").read_text(encoding="utf-8")
        self.labels = [line.encode() for line in text.splitlines()]

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        boxes, scores, sizes = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("BOX", "SCORE", "SIZE")
        )
        rows = [self.objects(*each) for each in zip(boxes, scores, sizes, strict=True)]
        labels, best, found = (np.stack(each) for each in zip(*rows, strict=True))
        tensors = (("LABEL", labels), ("SCORES", best), ("BOXES", found))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])

    def objects(self, boxes, scores, size):
        """The objects of one image by descending score; always `OBJECTS_MAX` rows."""
        labels = np.full(OBJECTS_MAX, b"", object)
        best = np.zeros(OBJECTS_MAX, np.float32)
        found = np.zeros((OBJECTS_MAX, 4), np.float32)
        kept = []
        for number in np.flatnonzero(scores[:, 1:].max(axis=0) >= SCORE_MIN) + 1:  # 0 is the background
            kept += [(scores[at, number], number, at) for at in separate(boxes, scores[:, number])]
        kept.sort(key=lambda each: (-each[0], each[1], each[2]))
        width, height = size
        for place, (score, number, at) in enumerate(kept[:OBJECTS_MAX]):
            top, left, bottom, right = boxes[at].clip(0, 1)
            labels[place], best[place] = self.labels[number], score
            found[place] = (left * width, top * height, right * width, bottom * height)
        return labels, best, found


def separate(boxes, scores):
    """Anchors of one class after non-maximum suppression, by descending score."""
    waiting = np.flatnonzero(scores >= SCORE_MIN)
    waiting = waiting[np.argsort(-scores[waiting], kind="stable")]
    kept = []
    while waiting.size and len(kept) < OBJECTS_MAX:
        first, waiting = waiting[0], waiting[1:]
        kept.append(int(first))
        waiting = waiting[overlaps(boxes[first], boxes[waiting]) <= OVERLAP_MAX]
    return kept


def overlaps(box, others):
    """The intersection over union of a box with each of the others."""
    common = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    shared = common.clip(0).prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1)
    return shared / np.maximum((box[2:] - box[:2]).prod() + areas - shared, 1e-9)
