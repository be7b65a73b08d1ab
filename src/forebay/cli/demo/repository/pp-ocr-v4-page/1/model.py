"""The first step of OCR: decodes a file to pixels, as they are and as the text detector needs them."""

import math

import numpy as np
import triton_python_backend_utils as pb_utils

from .imaging import BadImage, decode, resized

PAGE_SIDE_MAX = 2000
"""Pages with a longer side are scaled down; print of usual size is still legible."""
STRIP_PIXELS_MAX = PAGE_SIDE_MAX**2 // 4
"""Strips, more than four times as long as they are wide, may be longer: up to this many pixels."""
SIDE_MIN = 736
"""Minimum length of the shorter side for the detector."""
STEP = 32
"""Sides of the detector's input are multiples of this."""


class TritonPythonModel:
    """Responds with the page, the detector's input, and the size of the image."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        file = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)[0]
        try:
            picture = decode(file)
        except BadImage as error:
            refused = pb_utils.TritonError(f"image: {error}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refused)
        page = scaled(picture.pixels, min(1.0, factor_max(picture.pixels.shape[:2])), 1)
        tensors = (
            ("PAGE", page),
            ("PIXELS", seen(page)),
            ("SIZE", np.array([picture.width, picture.height], np.int32)),
        )
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])


def factor_max(sides):
    """How much a picture may be enlarged; below 1, how much it has to be scaled down."""
    longer, shorter = max(sides), max(STEP, min(sides))
    return max(PAGE_SIDE_MAX / longer, math.sqrt(STRIP_PIXELS_MAX / (longer * shorter)))


def scaled(pixels, factor, step):
    """The pixels with both sides scaled by a factor, rounded to multiples of `step`."""
    height, width = (max(step, round(side * factor / step) * step) for side in pixels.shape[:2])
    return pixels if (height, width) == pixels.shape[:2] else resized(pixels, width, height)


def seen(page):
    """The detector's input: FP32 [1, 3, height, width], -1 to 1, BGR."""
    sides = page.shape[:2]
    factor = min(max(1.0, SIDE_MIN / min(sides)), factor_max(sides))
    pixels = scaled(page, factor, STEP)[:, :, ::-1].transpose(2, 0, 1)[np.newaxis]
    return np.ascontiguousarray(pixels.astype(np.float32) / 127.5 - 1)
