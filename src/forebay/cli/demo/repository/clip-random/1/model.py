# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Which of some texts an image shows: Hugging Face's CLIP, two towers. Its weights are random, so are its answers.

It shows how such a model is served. `from_pretrained` reads this folder: with the files of a trained CLIP in it
(configuration, weights, tokenizer.json; dimensions as in config.pbtxt) the answers make sense.
"""

from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb
from PIL import Image
from transformers import CLIPModel, PreTrainedTokenizerFast

from .imaging import BadImage, decode

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
"""Mean and deviation of CLIP's training images."""


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        """Load both towers."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.model = CLIPModel.from_pretrained(folder).eval()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.tokenizer.add_special_tokens({"pad_token": "<pad>"})
        self.size = self.model.config.vision_config.image_size
        self.tokens_max = self.model.config.text_config.max_position_embeddings

    def execute(self, requests):
        """Answer each request; one with an invalid image gets an error."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Compare each image of a request with the texts of its row."""
        images, texts = (pb.get_input_tensor_by_name(request, name).as_numpy() for name in ("IMAGE", "TEXT"))
        try:
            if not texts.size:
                raise ValueError("TEXT: there is none")
            pixels = np.stack([self.pixels(data) for data in images[:, 0]])
            words = [each.decode() for each in texts.ravel()]
        except ValueError as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error), pb.TritonError.INVALID_ARG))
        tokens = self.tokenizer(
            words, return_tensors="pt", padding=True, truncation=True, max_length=self.tokens_max,
            return_token_type_ids=False,
        )  # fmt: skip
        with torch.inference_mode():
            found = self.model(pixel_values=torch.from_numpy(pixels), **tokens)
        rows, count = texts.shape
        closeness = found.logits_per_image.reshape(rows, rows, count)[range(rows), range(rows)]
        outputs = {
            "PROBABILITY": closeness.softmax(-1),
            "IMAGE_VECTOR": found.image_embeds,
            "TEXT_VECTOR": found.text_embeds.reshape(rows, count, -1),
        }
        return pb.InferenceResponse([pb.Tensor(name, value.numpy()) for name, value in outputs.items()])

    def pixels(self, data):
        """Preprocess an image: centre crop, scaled."""
        try:
            picture = decode(data, self.size).pixels
        except BadImage as error:
            raise ValueError(f"IMAGE: {error}") from None
        height, width, _ = picture.shape
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        middle = (left, top, left + side, top + side)
        scaled = Image.fromarray(picture).resize((self.size, self.size), Image.Resampling.BICUBIC, middle)
        return ((np.asarray(scaled, np.float32) / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)
