"""Hugging Face models for images and text; weights are random, as only serving is tested."""

import base64
import io
import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
from tests.e2e.tasks.served import Served, at_once, serving
from tritonclient.utils import InferenceServerException

from forebay.cli.repository.demos.multimodal import BYTES, SPECIAL

pytest.importorskip("transformers")
pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

TEXTS = (b"a cat", b"a red square", b"nothing at all")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(Path(tmp_path_factory.mktemp("multimodal")), ("clip-random", "llava-random")) as served:
        yield served


def png(colour: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (60, 40), colour).save(data, "PNG")
    return data.getvalue()


def tensor(name: str, values: "np.ndarray[Any, Any]", kind: str = "BYTES") -> over_grpc.InferInput:
    made = over_grpc.InferInput(name, list(values.shape), kind)
    made.set_data_from_numpy(values)
    return made


def shown(served: Served, image: bytes, texts: tuple[bytes, ...] = TEXTS) -> over_grpc.InferResult:
    inputs = [tensor("IMAGE", np.array([[image]], object)), tensor("TEXT", np.array([texts], object))]
    with over_grpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        return client.infer("clip-random", inputs)


def told(served: Served, image: bytes, text: str, tokens: int) -> list[bytes]:
    """The pieces of a stream."""
    inputs = [
        tensor("image", np.array([image], object)),
        tensor("text_input", np.array([text.encode()], object)),
        tensor("max_tokens", np.array([tokens], np.int32), "INT32"),
    ]
    found: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with over_grpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer("llava-random", inputs, enable_empty_final_response=True)
        pieces = []
        while True:
            result, error = found.get(timeout=60)
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return pieces
            pieces.append(result.as_numpy("text_output")[0])


def test_dual_encoder_scores_each_text_for_an_image(served: Served) -> None:
    alone = [shown(served, png(colour)) for colour in ("red", "green", "blue", "white") * 2]
    chances = np.array([each.as_numpy("PROBABILITY")[0] for each in alone])
    assert chances.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert len({each.as_numpy("IMAGE_VECTOR").tobytes() for each in alone}) == 4
    assert alone[0].as_numpy("TEXT_VECTOR").shape == (1, 3, 16)
    together = at_once(lambda i: shown(served, png(("red", "green", "blue", "white")[i % 4])))
    assert np.array([each.as_numpy("PROBABILITY")[0] for each in together]) == pytest.approx(chances, abs=1e-5)


def test_an_invalid_image_is_a_client_error(served: Served) -> None:
    with pytest.raises(InferenceServerException, match="IMAGE: not an image that can be read"):
        shown(served, b"no image")
    with pytest.raises(InferenceServerException, match="image: not an image that can be read"):
        told(served, base64.b64encode(b"no image"), "what is it?", 1)
    wide = io.BytesIO()
    Image.new("1", (29_000, 2000)).save(wide, "PNG")
    with pytest.raises(InferenceServerException, match="IMAGE: 29000 x 2000 pixels; at most 40 megapixels"):
        shown(served, wide.getvalue())
    with pytest.raises(InferenceServerException, match="image: 29000 x 2000 pixels; at most 40 megapixels"):
        told(served, wide.getvalue(), "what is it?", 1)


def test_an_image_without_texts_is_a_client_error(served: Served) -> None:
    with pytest.raises(InferenceServerException, match="TEXT: there is none"):
        shown(served, png("red"), ())


def test_image_to_text_streams_token_by_token(served: Served) -> None:
    red, blue = (told(served, png(colour), "what is it?", 12) for colour in ("red", "blue"))
    assert len(red) <= 12
    assert red == told(served, png("red"), "what is it?", 12)
    assert red != blue
    assert at_once(lambda _: told(served, png("red"), "what is it?", 12), 4) == [red] * 4


def test_image_to_text_streams_the_same_text_as_events(served: Served) -> None:
    image = base64.b64encode(png("red")).decode()
    body = {"text_input": "what is it?", "image": image, "max_tokens": 5}
    answer = httpx.post(f"{served.url}/v2/models/llava-random/generate_stream", json=body, timeout=60)
    said = [json.loads(line[6:])["text_output"] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [each.encode() for each in said] == told(served, png("red"), "what is it?", 5)
    refused = httpx.post(
        f"{served.url}/v2/models/llava-random/generate_stream", json={**body, "max_tokens": 0}, timeout=60
    )
    assert "max_tokens is 0" in refused.text


def test_pieces_of_a_tokenizer_of_words_add_up_to_its_text(tmp_path: Path) -> None:
    """As of Llama: a token carries the space before it, and a text's first space is dropped."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"\u2581w{i}": i for i in range(BYTES)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.add_special_tokens(list(SPECIAL))
    steps = (tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Fuse())
    made.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    folder = tmp_path / "repository" / "llava-random" / "1"
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    with serving(tmp_path, ("llava-random",)) as served:
        pieces = told(served, png("red"), "what is it?", 12)
    assert len(pieces) > 1
    assert re.fullmatch(r"w\d+( w\d+)*", b"".join(pieces).decode())
