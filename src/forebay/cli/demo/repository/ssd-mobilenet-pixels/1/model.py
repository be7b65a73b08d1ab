"""The first step of image models with a fixed input size: decodes files, and resizes them to that size."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from .imaging import BadImage, squares


class TritonPythonModel:
    """The layout of the pixels is that of the output `PIXELS`: channels last for bytes, channels first for floats."""

    def initialize(self, args):
        """Read the network's input size from the configuration."""
        config = json.loads(args["model_config"])
        self.side = int(config["parameters"]["side"]["string_value"])
        self.as_bytes = next(out for out in config["output"] if out["name"] == "PIXELS")["data_type"] == "TYPE_UINT8"

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)
        try:
            pixels, sizes = squares(files, self.side)
        except BadImage as error:
            refused = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refused)
        if not self.as_bytes:
            # from 0 … 255 to -1 … 1, as the network was trained
            pixels = np.ascontiguousarray(((pixels.astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2))
        return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels), pb_utils.Tensor("SIZE", sizes)])
