"""Small multimodal models with random weights, from Hugging Face's classes.

No package with weights of such a model was found. These show how the classes are served; the files of a trained model
can replace those written here.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from forebay.cli.repository.demos.vision.models import IMAGING
from forebay.cli.repository.demos.writing import DemoModel, Made

SEED: Final = 7
BYTES: Final = 256
SPECIAL: Final = ("<s>", "</s>", "<pad>", "<image>")
"""Tokens besides one per byte."""
IMAGE_SIZE: Final = 32
PATCH_SIZE: Final = 8
VECTOR: Final = 16
_LAYERS: Final = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION: Final = {**_LAYERS, "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE}
_WORDS: Final = {
    **_LAYERS,
    "vocab_size": BYTES + len(SPECIAL),
    "bos_token_id": BYTES,
    "eos_token_id": BYTES + 1,
    "pad_token_id": BYTES + 2,
}


def clip() -> Any:
    """A tiny CLIP."""
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(text_config=_WORDS, vision_config=_VISION, projection_dim=VECTOR))


def llava() -> Any:
    """A tiny LLaVA: CLIP's vision tower in front of a Llama."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION),
        text_config=LlamaConfig(**_WORDS, num_key_value_heads=2, max_position_embeddings=1024),
        image_token_id=BYTES + SPECIAL.index("<image>"),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def _save(build: Callable[[], Any], name: str, target: Path, _: Sequence[Path]) -> None:
    """Write one of the files of a saved model."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        torch.manual_seed(SEED)
        build().save_pretrained(folder)
        target.write_bytes((Path(folder) / name).read_bytes())


def _tokenizer(target: Path, _: Sequence[Path]) -> None:
    """Write a byte-level tokenizer; CLIP texts are enclosed in two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    found.add_special_tokens(list(SPECIAL))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    ends = [(name, BYTES + i) for i, name in enumerate(SPECIAL[:2])]
    found.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $A {SPECIAL[1]}", special_tokens=ends)
    found.save(str(target))


def _model(name: str, about: str, build: Callable[[], Any]) -> DemoModel:
    files: dict[str, Made] = {
        f"1/{file}": Made(partial(_save, build, file)) for file in ("config.json", "model.safetensors")
    }
    files["1/tokenizer.json"], files["1/imaging.py"] = Made(_tokenizer), IMAGING
    return DemoModel(name, "", about, files, ("transformers", "torch", "PIL"), "hf")


MODELS: Final = (
    _model("clip-random", "CLIP with random weights: how a model of two towers is served", clip),
    _model("llava-random", "LLaVA with random weights: how a model that tells of images is served", llava),
)
