"""Pre- and postprocessing steps of the image models, between the networks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.cli.demos.vision.rig import loaded

Array = np.ndarray[Any, Any]
cv2 = pytest.importorskip("cv2", reason="needs the extra 'vision'")
boxes = loaded("ssd-mobilenet-boxes")
lines = loaded("pp-ocr-v4-lines")
text = loaded("pp-ocr-v4-text")
upright = loaded("pp-ocr-v4-upright")
UNIT = st.floats(0, 1, width=32)


@given(arrays.arrays(np.float32, (12, 4), elements=UNIT), arrays.arrays(np.float32, 12, elements=UNIT))
def test_non_maximum_suppression_keeps_the_most_confident_box(corners: Array, scores: Array) -> None:
    found = np.concatenate(
        [np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])], 1
    )

    kept = boxes.separate(found, scores)

    assert [scores[at] for at in kept] == sorted((scores[at] for at in kept), reverse=True)
    for place, at in enumerate(kept):
        assert (boxes.overlaps(found[at], found[kept[place + 1 :]]) <= boxes.OVERLAP_MAX).all()
    for at in set(range(12)) - set(kept):
        better = [each for each in kept if scores[each] >= scores[at]]
        assert scores[at] < boxes.SCORE_MIN or boxes.overlaps(found[at], found[better]).max() > boxes.OVERLAP_MAX


def test_identical_boxes_have_an_iou_of_one_and_disjoint_ones_zero() -> None:
    box = np.array([0.1, 0.1, 0.3, 0.3])
    others = np.array([box, [0.4, 0.4, 0.5, 0.5], [0.1, 0.1, 0.3, 0.2], [0.2, 0.2, 0.2, 0.2]])

    assert boxes.overlaps(box, others) == pytest.approx([1, 0, 0.5, 0])


def drawn(*rectangles: tuple[int, int, int, int]) -> Array:
    """A map of 200 x 400 with text in these places: left, top, right, bottom."""
    scores = np.zeros((200, 400), np.float32)
    for left, top, right, bottom in rectangles:
        scores[top:bottom, left:right] = 0.9
    return scores


def test_text_lines_are_found_with_a_margin() -> None:
    (box,) = lines.boxes(drawn((50, 80, 250, 100)))

    grown = lines.GROWTH * 200 * 20 / (2 * (200 + 20))
    left, top, right, bottom = (box * (400, 200))[[0, 0, 2, 2], [0, 1, 0, 1]]
    assert [left, top, right, bottom] == pytest.approx([50 - grown, 80 - grown, 250 + grown, 100 + grown], abs=3)


def test_specks_and_low_confidence_regions_are_not_lines() -> None:
    scores = drawn((10, 10, 12, 11))
    scores[50:70, 50:250] = 0.4

    assert lines.boxes(scores) == []


@given(st.permutations([(20, 20, 180, 40), (220, 24, 380, 44), (20, 80, 100, 100), (20, 140, 380, 160)]))
def test_lines_are_in_reading_order(places: list[tuple[int, int, int, int]]) -> None:
    found = lines.in_reading_order(lines.boxes(drawn(*places)))

    middles = [(box.mean(axis=0) * (400, 200)).round(-1).tolist() for box in found]
    assert middles == [[100, 30], [300, 30], [60, 90], [200, 150]]


@pytest.mark.parametrize(
    ("corners", "length"),
    [
        ([(10, 10), (110, 10), (110, 30), (10, 30)], 240),
        ([(10, 10), (30, 10), (30, 110), (10, 110)], 240),
        ([(0, 0), (1, 0), (1, 1), (0, 1)], 48),
        ([(5, 5), (5, 5), (5, 5), (5, 5)], 48),
        ([(0, 0), (500, 0), (500, 1), (0, 1)], lines.LENGTH_MAX),
    ],
)
def test_cropped_lines_have_the_network_height(corners: list[tuple[int, int]], length: int) -> None:
    page = np.zeros((120, 120, 3), np.uint8)

    assert lines.cut(page, np.array(corners, np.float64)).shape == (48, length, 3)


def test_vertical_line_is_rotated_upright() -> None:
    page = np.zeros((120, 40, 3), np.uint8)
    page[10:110, 20:30] = 255  # the right half, which becomes the upper one

    line = lines.cut(page, np.array([(10, 10), (30, 10), (30, 110), (10, 110)], np.float64))

    assert line[6:18, 20:-20].min() > 200
    assert line[30:42, 20:-20].max() < 50


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([0, 0, 0], ""),
        ([], ""),
        ([1, 1, 0, 1, 2], "aab"),
        ([0, 2, 2, 3, 3, 0, 1], "b a"),
    ],
)
def test_repeated_characters_without_a_blank_are_merged(numbers: list[int], wanted: str) -> None:
    model = text.TritonPythonModel()
    model.characters = ["", "a", "b", " "]
    sure = np.full(len(numbers), 0.5, np.float32)

    assert model.read(np.array(numbers, np.int64), sure) == (wanted, 0.5 if wanted else 0.0)


@pytest.mark.parametrize("others", [0, 7])
def test_line_that_the_check_turned_by_mistake_is_read_as_it_was(others: int) -> None:
    """White at the left is the start of a text that can be read."""
    strips = np.zeros((2 + others, 48, 320, 3), np.uint8)
    strips[0, :, -20:] = strips[1:, :, :20] = 255

    def reader(pixels: Array) -> tuple[Array, Array]:
        legible = pixels[:, 0, 0, 0] > 0
        return np.tile([0, 5], (len(pixels), 1)), np.array([[1.0, 0.95 if each else 0.4] for each in legible])

    found = upright.best(reader, strips, [320] * len(strips), {0, 1})

    assert sorted(found) == list(range(len(strips)))
    assert all(upright.certainty(*found[place]) == 0.95 for place in found)


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=300))
def test_lines_are_recognized_in_batches_each_once(widths: list[int]) -> None:
    found = upright.groups(widths)

    assert sorted(place for group in found for place in group) == list(range(len(widths)))
    for group in found:
        columns = len(group) * max(widths[place] for place in group)
        assert len(group) <= upright.LINES_MAX
        assert columns <= upright.COLUMNS_MAX or len(group) == 1
