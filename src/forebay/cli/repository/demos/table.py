"""All demo models by name."""

from collections.abc import Mapping
from typing import Final

from forebay.cli.repository.demos import audio, multimodal, tabular, text
from forebay.cli.repository.demos.vision import models as vision
from forebay.cli.repository.demos.writing import DemoModel

DEMO: Final[Mapping[str, DemoModel]] = {
    model.name: model for model in (*text.MODELS, *tabular.MODELS, *audio.MODELS, *vision.MODELS, *multimodal.MODELS)
}
