"""From the probability map of text to images of the text lines.

The conversion of maps to boxes is described in "Real-time Scene Text Detection with Differentiable Binarization"
(arXiv 1911.08947); the thresholds are the defaults of PP-OCRv4.
"""

import math

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

TEXT_MIN = 0.3
"""Probability from which on a pixel counts as text."""
BOX_MIN = 0.5
"""Mean probability within an outline from which on it is a line."""
GROWTH = 1.6
"""The map shows the core of lines; boxes grow by area / perimeter times this on every side."""
CORE_MIN, BOX_SIDE_MIN = 3, 5
"""Minimum length of the shorter side in pixels, before and after growing."""
LINES_MAX = 256
"""Maximum number of lines per page, from the top."""
COLUMNS_MAX = 640_000
"""Maximum total width of all lines, padded to the widest, to bound the memory: longer lines are squeezed."""
LENGTH_MAX = 20_000
"""Maximum width of a line: the memory that the recogniser needs grows with its square."""
HEIGHT, WIDTH_MIN = 48, 320
"""Minimum width, as in the recogniser's training."""
BEGINNING, SQUEEZED = 192, 2
"""Width of the start of a line for the check whether it is upside down; how far it may be squeezed for that."""
UPRIGHT = 1.5
"""A box with this ratio of height to width has vertical text, downwards (or upwards: see the next step)."""


class TritonPythonModel:
    """Responds with line images of one size, padded on the right."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        scores, page, size = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("MAP", "PAGE", "SIZE")
        )
        page = np.ascontiguousarray(page[:, :, ::-1])  # BGR, as the networks were trained
        shares = in_reading_order(boxes(scores[0, 0]))[:LINES_MAX]  # relative to width and height
        lines = [cut(page, each * (page.shape[1], page.shape[0])) for each in shares]
        width = max([WIDTH_MIN, *(line.shape[1] for line in lines)])
        width = max(WIDTH_MIN, min(width, COLUMNS_MAX // max(1, len(lines))))
        count = max(1, len(lines))
        tensors = {
            "LINE": np.zeros((count, HEIGHT, width, 3), np.uint8),
            "WIDTH": np.zeros(count, np.int32),
            "BEGINNING": np.zeros((count, 3, HEIGHT, BEGINNING), np.float32),
            "BOX": np.zeros((count, 4, 2), np.float32),
        }
        for place, line in enumerate(lines):
            used = min(line.shape[1], width)
            tensors["LINE"][place, :, :used] = squeezed(line, width)
            tensors["WIDTH"][place] = used
            start = squeezed(line[:, : BEGINNING * SQUEEZED], BEGINNING)
            tensors["BEGINNING"][place, :, :, : start.shape[1]] = start.transpose(2, 0, 1) / 127.5 - 1
            tensors["BOX"][place] = shares[place] * size
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def boxes(scores):
    """Boxes of lines on a map: corners clockwise from the top left, relative to width and height."""
    height, width = scores.shape
    core = cv2.dilate((scores > TEXT_MIN).astype(np.uint8), np.ones((2, 2), np.uint8))
    found = []
    for outline in cv2.findContours(core, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)[0]:
        middle, (across, along), angle = cv2.minAreaRect(outline)
        if min(across, along) < CORE_MIN or mean_within(scores, outline[:, 0]) < BOX_MIN:
            continue
        grown = GROWTH * across * along / (across + along)  # twice the distance: one half on each side
        if min(across, along) + grown >= BOX_SIDE_MIN:
            box = corners((middle, (across + grown, along + grown), angle))
            found.append((box / (width, height)).clip(0, 1))
    return found


def corners(rectangle):
    """The corners of a rotated rectangle: top left, top right, bottom right, bottom left in reading direction."""
    points = sorted(cv2.boxPoints(rectangle).tolist())
    (top_left, bottom_left), (top_right, bottom_right) = (
        sorted(each, key=lambda point: point[1]) for each in (points[:2], points[2:])
    )
    return np.array([top_left, top_right, bottom_right, bottom_left])


def mean_within(scores, outline):
    """The mean of a map within an outline: curved lines fill only a part of their boxes."""
    low, high = outline.min(axis=0), outline.max(axis=0)
    mask = np.zeros((high - low + 1)[::-1], np.uint8)
    cv2.fillPoly(mask, [outline - low], 1)
    return cv2.mean(np.ascontiguousarray(scores[low[1] : high[1] + 1, low[0] : high[0] + 1]), mask)[0]


def in_reading_order(found):
    """Boxes from top to bottom, and from left to right within a row."""
    waiting = sorted(found, key=lambda box: (box[:, 1].mean(), box[:, 0].mean()))
    ordered = []
    while waiting:
        first = waiting[0]
        limit = first[:, 1].mean() + (first[3, 1] - first[0, 1]) / 2
        row = [box for box in waiting if box[:, 1].mean() <= limit]
        ordered += sorted(row, key=lambda box: box[:, 0].mean())
        waiting = waiting[len(row) :]
    return ordered


def cut(page, box):
    """The line within a box of the page, rotated upright and `HEIGHT` pixels high."""
    width = max(math.dist(box[0], box[1]), math.dist(box[2], box[3]), 1.0)
    height = max(math.dist(box[0], box[3]), math.dist(box[1], box[2]), 1.0)
    if height / width >= UPRIGHT:
        box, width, height = np.roll(box, -1, axis=0), height, width
    length = min(LENGTH_MAX, max(1, math.ceil(HEIGHT * width / height)))
    target = np.array([[0, 0], [length, 0], [length, HEIGHT], [0, HEIGHT]], np.float32)
    turn = cv2.getPerspectiveTransform(box.astype(np.float32), target)
    return cv2.warpPerspective(page, turn, (length, HEIGHT), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)


def squeezed(line, width):
    """The line, squeezed to this width at most."""
    return line if line.shape[1] <= width else cv2.resize(line, (width, HEIGHT))
