"""MediaPipe's selfie segmentation on LiteRT: computes the mask of the person in an image."""

import io
import os
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from ai_edge_litert.interpreter import Interpreter
from PIL import Image

from .imaging import BadImage, squares

SIDE = 256
"""Width and height of the network's input in pixels."""
THREADS_MAX = 2
"""More threads do not help a network of this size."""
COMPRESSION = 1
"""PNG's fastest compression level: masks are small at any."""


class TritonPythonModel:
    """Responds with one mask per image."""

    def initialize(self, args):
        """Load the network."""
        file = Path(args["model_repository"]) / args["model_version"] / "model.tflite"
        threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self.network = Interpreter(str(file), num_threads=threads)
        self.network.allocate_tensors()
        self.input = self.network.get_input_details()[0]["index"]
        self.output = self.network.get_output_details()[0]["index"]

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)
        try:
            pixels, sizes = squares(files, SIDE)
        except BadImage as error:
            refused = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refused)
        masks = [self.mask(each) for each in pixels]
        areas = np.array([[(mask > 0.5).mean()] for mask in masks], np.float32)
        files = [[png(mask, *size)] for mask, size in zip(masks, sizes.tolist(), strict=True)]
        tensors = (
            ("LABEL", np.array([[b"person"]] * len(masks), object)),
            ("AREA", areas),
            ("MASK", np.array(files, object)),
            ("SIZE", sizes),
        )
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])

    def mask(self, pixels):
        """The probability of each pixel to belong to a person: FP32 [256, 256], 0 to 1."""
        self.network.set_tensor(self.input, pixels[np.newaxis].astype(np.float32) / 255)
        self.network.invoke()
        return self.network.get_tensor(self.output)[0, :, :, 0]


def png(mask, width, height):
    """The mask in the size of the image, as a file."""
    image = Image.fromarray((mask * 255).round().astype(np.uint8))
    file = io.BytesIO()
    image.resize((width, height), Image.Resampling.BILINEAR).save(file, "PNG", compress_level=COMPRESSION)
    return file.getvalue()
