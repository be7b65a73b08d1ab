"""The step of OCR that turns lines upright and calls the recogniser in small batches, so that long pages take no more
memory."""

import numpy as np
import triton_python_backend_utils as pb_utils

READER = "pp-ocr-v4-read"
TURNED_MIN = 0.9
"""Score from which on a line counts as upside down and is turned."""
CERTAIN_MIN = 0.8
"""Mean score of the characters of a turned line below which it is also read as it was: the check may be wrong."""
LINES_MAX, COLUMNS_MAX = 6, 8192
"""Batch limits: number of lines, and total width in pixels."""
WIDTH_MIN = 320
"""Minimum width, as in the recogniser's training."""


class TritonPythonModel:
    """Responds with the recogniser's output for each line, padded with 0: no character."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        lines, widths, sides = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("LINE", "WIDTH", "SIDE")
        )
        turned = {place for place in range(len(lines)) if sides[place, 1] > TURNED_MIN}
        found = best(read, lines, widths.tolist(), turned)
        places = max(len(numbers) for numbers, _ in found.values())
        characters = np.zeros((len(lines), places), np.int64)
        sure = np.zeros((len(lines), places), np.float32)
        for place, (numbers, chances) in found.items():
            characters[place, : len(numbers)] = numbers
            sure[place, : len(chances)] = chances
        tensors = (("CHARACTER", characters), ("SURE", sure))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])


def best(reader, lines, widths, turned):
    """The recogniser's output for each line, by place. Turned lines that read badly are read as they were, too."""
    found = recognised(reader, lines, widths, range(len(lines)), turned)
    doubtful = [place for place in turned if certainty(*found[place]) < CERTAIN_MIN]
    for place, other in recognised(reader, lines, widths, doubtful, ()).items():
        found[place] = max(found[place], other, key=lambda each: certainty(*each))
    return found


def recognised(reader, lines, widths, places, turned):
    """The recogniser's output for these lines, by place; those in `turned` are turned before."""
    found = {}
    for numbers in groups([widths[place] for place in places]):
        group = [places[number] for number in numbers]
        width = max(WIDTH_MIN, *(widths[place] for place in group))
        pixels = np.zeros((len(group), 3, lines.shape[1], width), np.float32)
        for row, place in enumerate(group):
            used = lines[place, :, : widths[place]]
            if place in turned:
                used = used[::-1, ::-1]
            pixels[row, :, :, : widths[place]] = used.transpose(2, 0, 1) / 127.5 - 1
        found.update(zip(group, zip(*reader(pixels), strict=True), strict=True))
    return found


def certainty(numbers, chances):
    """The mean score of a line's characters; 0 if there are none."""
    return float(chances[numbers != 0].mean()) if numbers.any() else 0.0


def groups(widths):
    """Batches of lines of about the same width, to minimise padding."""
    found = [[]] if widths else []
    for place in sorted(range(len(widths)), key=lambda place: widths[place]):
        together = len(found[-1]) + 1
        if found[-1] and (together > LINES_MAX or together * widths[place] > COLUMNS_MAX):
            found.append([])
        found[-1].append(place)
    return found


def read(pixels):
    """The recogniser's output: character numbers and their scores."""
    names = ["CHARACTER", "SURE"]
    call = pb_utils.InferenceRequest(
        model_name=READER, requested_output_names=names, inputs=[pb_utils.Tensor("PIXELS", pixels)]
    )
    response = call.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return tuple(pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in names)
