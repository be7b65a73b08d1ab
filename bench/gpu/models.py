"""The models of the GPU benchmark, with random weights: what is measured does not depend on what they have learned.

`encoder` is a transformer of BERT-base's size over 128 tokens, whose requests are a kilobyte. `image` is a ResNet-50
over pictures of 224 x 224 in FP32, whose requests are 602 kilobytes. Both compute in FP16.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS: Final = 128
VOCABULARY: Final = 30_522
WIDTH: Final = 768
HEADS: Final = 12
LAYERS: Final = 12
SIDE: Final = 224
STAGES: Final = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Of ResNet-50 (He et al. 2015, table 1): width, blocks and first stride of each stage."""
CLASSES: Final = 1000
BATCH: Final = 32


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        split = self.qkv(self.before(x)).view(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(split[0], split[1], split[2])
        x = x + self.out(seen.transpose(1, 2).reshape(size, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class Encoder(nn.Module):
    """[batch, tokens] INT64 → [batch, width] FP32, of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, INPUT__0: Tensor) -> Tensor:  # noqa: N803 - a name of the protocol
        return functional.normalize(self.layers(self.words(INPUT__0) + self.places).mean(1).float(), dim=1)


def _conv(entering: int, leaving: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(entering, leaving, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(leaving))


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        relu = nn.ReLU()
        self.path = nn.Sequential(
            _conv(entering, width, 1), relu, _conv(width, width, 3, stride), relu, _conv(width, 4 * width, 1)
        )
        same = entering == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else _conv(entering, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


class Image(nn.Module):
    """[batch, 3, 224, 224] FP32 → [batch, 1000] FP32."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        entering = 64
        for width, count, stride in STAGES:
            for number in range(count):
                blocks.append(Bottleneck(entering, width, stride if number == 0 else 1))
                entering = 4 * width
        self.blocks, self.classify = nn.Sequential(*blocks), nn.Linear(entering, CLASSES)

    def forward(self, INPUT__0: Tensor) -> Tensor:  # noqa: N803 - a name of the protocol
        x = INPUT__0.half().contiguous(memory_format=torch.channels_last)
        return self.classify(self.blocks(x).mean((2, 3))).float()


@dataclass(frozen=True)
class Model:
    """One model and one row of its input."""

    name: str
    module: type[nn.Module]
    datatype: str
    row: np.ndarray
    width: int
    """Elements of a row of its output."""

    @property
    def shape(self) -> list[int]:
        """Of a request."""
        return [1, *self.row.shape]

    def write(self, repository: Path, name: str, instances: int) -> Path:
        """Add it to a repository; tells its file."""
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        dims = ", ".join(map(str, self.row.shape))
        (folder / "config.pbtxt").write_text(f"""backend: "pytorch"
max_batch_size: {BATCH}
input {{ name: "INPUT__0" data_type: TYPE_{self.datatype} dims: [ {dims} ] }}
output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ {self.width} ] }}
instance_group {{ kind: KIND_GPU count: {instances} }}
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
""")
        torch.manual_seed(3)
        module = self.module().eval().half().to(memory_format=torch.channels_last)
        file = folder / "1/model.pt"
        torch.jit.script(module).save(str(file))
        return file


MODELS: Final = (
    Model("encoder", Encoder, "INT64", np.arange(TOKENS, dtype=np.int64) + 2000, WIDTH),
    Model("image", Image, "FP32", np.full((3, SIDE, SIDE), 0.25, np.float32), CLASSES),
)
