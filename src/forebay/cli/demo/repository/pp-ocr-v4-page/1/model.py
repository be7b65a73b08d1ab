"""The first step of OCR: a file becomes pixels, once as they are and once as the detector of text wants them."""

import numpy as np
import triton_python_backend_utils as pb_utils

from .imaging import BadImage, decode, resized

PAGE_SIDE_MAX = 2000
"""Pages with a longer side are made smaller; print of any size that people read is still legible."""
SIDE_MIN = 736
"""What the detector likes the shorter side to have at least."""
STEP = 32
"""Sides that the detector sees are multiples of this."""


class TritonPythonModel:
    """Answers with the page, the detector's pixels, and the size of the file's picture."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        file = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)[0]
        try:
            picture = decode(file)
        except BadImage as error:
            refused = pb_utils.TritonError(f"image: {error}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refused)
        page = scaled(picture.pixels, min(1.0, PAGE_SIDE_MAX / max(picture.pixels.shape[:2])), 1)
        tensors = (
            ("PAGE", page),
            ("PIXELS", seen(page)),
            ("SIZE", np.array([picture.width, picture.height], np.int32)),
        )
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])


def scaled(pixels, factor, step):
    """The pixels with both sides longer by a factor, rounded to multiples of `step`."""
    height, width = (max(step, round(side * factor / step) * step) for side in pixels.shape[:2])
    return pixels if (height, width) == pixels.shape[:2] else resized(pixels, width, height)


def seen(page):
    """What the detector sees: FP32 [1, 3, height, width], -1 to 1, in the order blue, green, red."""
    sides = page.shape[:2]
    factor = min(max(1.0, SIDE_MIN / min(sides)), PAGE_SIDE_MAX / max(sides))
    pixels = scaled(page, factor, STEP)[:, :, ::-1].transpose(2, 0, 1)[np.newaxis]
    return np.ascontiguousarray(pixels.astype(np.float32) / 127.5 - 1)
