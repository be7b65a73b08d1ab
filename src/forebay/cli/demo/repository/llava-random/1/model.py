# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Text about an image, streamed: Hugging Face's LLaVA. Its weights are random, and so is its output.

It shows how such a model is served: decoupled, one response per token, until it is done or the client is gone.
`from_pretrained` reads this folder; the image is a file, or its base64 where the request is JSON.
"""

import base64
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb
from PIL import Image
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from .imaging import BadImage, decode

TOKENS_DEFAULT, TOKENS_MAX = 16, 256
INCOMPLETE = "\ufffd"
"""How a text ends whose last character is not complete."""
PROMPT = "<s>USER: {image}\n{text} ASSISTANT:"
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
"""Mean and deviation of the vision tower's training images."""


class TritonPythonModel:
    """One instance: one conversation at a time."""

    def initialize(self, args):
        """Load the network."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        config = self.model.config
        self.size = config.vision_config.image_size
        self.image = self.tokenizer.convert_ids_to_tokens(config.image_token_id) * config.image_seq_length
        self.end = config.text_config.eos_token_id

    def execute(self, requests):
        """Send the responses; nothing is returned."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.answer(request, sender)
            except ValueError as error:
                sender.send(pb.InferenceResponse(error=pb.TritonError(str(error), pb.TritonError.INVALID_ARG)))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, request, sender):
        """Greedy decoding, token by token."""
        given = {each.name(): each.as_numpy().ravel()[0] for each in request.inputs()}
        wanted = int(given.get("max_tokens", TOKENS_DEFAULT))
        if not 1 <= wanted <= TOKENS_MAX:
            raise ValueError(f"max_tokens is {wanted}; allowed: 1 to {TOKENS_MAX}")
        prompt = PROMPT.format(image=self.image, text=given["text_input"].decode())
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        more = {"pixel_values": self.pixels(given["image"])}
        past, said, sent = None, [], ""
        for _ in range(wanted):
            if request.is_cancelled():
                return
            with torch.inference_mode():
                found = self.model(input_ids=ids, past_key_values=past, use_cache=True, **more)
            past, more, ids = found.past_key_values, {}, found.logits[:, -1:].argmax(-1)
            if ids.item() == self.end:
                break
            said.append(ids.item())
            # all of them together: a token alone may lose the space before it, or be a part of a character
            text = self.tokenizer.decode(said, clean_up_tokenization_spaces=False)
            if len(text) > len(sent) and not text.endswith(INCOMPLETE):
                sender.send(piece(text[len(sent) :]))
                sent = text
        if len(rest := self.tokenizer.decode(said, clean_up_tokenization_spaces=False)) > len(sent):
            sender.send(piece(rest[len(sent) :]))

    def pixels(self, data):
        """Preprocess an image: scaled, ignoring its aspect ratio."""
        if data[:4] not in (b"\x89PNG", b"RIFF", b"GIF8") and data[:2] != b"\xff\xd8":
            try:
                data = base64.b64decode(data, validate=True)
            except ValueError as error:
                raise ValueError(f"image: neither a file nor base64: {error}") from None
        try:
            picture = decode(data, self.size).pixels
        except BadImage as error:
            raise ValueError(f"image: {error}") from None
        scaled = Image.fromarray(picture).resize((self.size, self.size), Image.Resampling.BICUBIC)
        values = (np.asarray(scaled, np.float32) / 255 - MEAN) / DEVIATION
        return torch.from_numpy(values.transpose(2, 0, 1)[None])


def piece(text):
    """A response with the next part of the text."""
    return pb.InferenceResponse([pb.Tensor("text_output", np.array([text.encode()], object))])
