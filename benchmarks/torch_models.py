"""PyTorch models like those of `benchmarks.models`; initial values as Keras's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import data
from benchmarks.workloads import Sizes

IMAGE_CLASSES = 1000


def mlp(size: Sizes) -> nn.Module:
    """Linear layers of one width."""
    width = size["width"]
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(size["layers"])]
    return nn.Sequential(*hidden, nn.Linear(width, data.CLASSES_OF_CHARACTERS))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention, self.before_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.hidden, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a feed-forward part, each added to what it is given."""
        normed = self.before_attention(x)
        parts = (self._split(layer(normed)) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.back(functional.relu(self.hidden(self.before_hidden(x))))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self._heads, -1)).transpose(1, 2)


def transformer(size: Sizes) -> nn.Module:
    """A language model: pre-norm blocks of causal attention and a feed-forward part."""
    width = size["width"]
    return nn.Sequential(
        nn.Embedding(size["vocabulary"], width),
        *(_Block(width, size["heads"]) for _ in range(size["layers"])),
        nn.LayerNorm(width),
        nn.Linear(width, size["vocabulary"]),
    )


class _Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int, projects: bool) -> None:
        super().__init__()
        made = 4 * width
        self.inner = nn.Sequential(
            *_normed(given, width, 1, stride),
            nn.ReLU(),
            *_normed(width, width, 3, 1),
            nn.ReLU(),
            *_normed(width, made, 1, 1),
        )
        self.skip = nn.Sequential(*_normed(given, made, 1, stride)) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Three convolutions around a skip."""
        return functional.relu(self.skip(x) + self.inner(x))


def _normed(given: int, made: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    # Keras's ResNet has biases before BatchNormalization too.
    convolution = nn.Conv2d(given, made, kernel, stride, kernel // 2)
    return convolution, nn.BatchNorm2d(made, eps=1.001e-5, momentum=0.01)


def resnet50(size: Sizes) -> nn.Module:
    """As that of keras.applications: strides are in the first convolution of a block."""
    del size
    parts = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    given = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            stride = 2 if block == 0 and width > 64 else 1
            parts.append(_Bottleneck(given, width, stride, projects=block == 0))
            given = 4 * width
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, IMAGE_CLASSES)
    )


MODELS = {"mlp": mlp, "transformer": transformer, "resnet50": resnet50}


def initialize(model: nn.Module) -> None:
    """Draws weights from the distributions that Keras's layers have by default."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -0.05, 0.05)


def make(name: str, size: Sizes) -> nn.Module:
    """A model of a name with fresh weights, the same in each process."""
    torch.manual_seed(0)
    model = MODELS[name](size)
    initialize(model)
    return model
