"""The models of `benchmarks.models` in PyTorch, initialized as Keras does."""

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
    """As in keras.applications: the first convolution of a block has its stride."""
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


class _MobileBlock(nn.Module):
    def __init__(self, given: int, made: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        width, squeezed = expand * given, given // 4
        expansion = [*_silu_convolution(given, width, 1)] if expand > 1 else []
        depthwise = _silu_convolution(width, width, kernel, stride, width)
        self.inner = nn.Sequential(*expansion, *depthwise)
        self.squeeze = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, squeezed, 1), nn.SiLU()),
            *(nn.Conv2d(squeezed, width, 1), nn.Sigmoid()),
        )
        self.project = nn.Sequential(*_silu_convolution(width, made, 1)[:-1])
        self.has_skip = stride == 1 and given == made

    def forward(self, x: Tensor) -> Tensor:
        """An inverted bottleneck with squeeze and excitation."""
        inner = self.inner(x)
        made = self.project(inner * self.squeeze(inner))
        return x + made if self.has_skip else made


def _silu_convolution(
    given: int, made: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    convolution = nn.Conv2d(given, made, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(made, eps=1e-3, momentum=0.01), nn.SiLU()]


def efficientnet_b0(size: Sizes) -> nn.Module:
    """The one of keras.applications, without dropped paths."""
    del size
    parts, given = _silu_convolution(3, 32, 3, 2), 32
    for made, expand, kernel, stride, blocks in (
        *((16, 1, 3, 1, 1), (24, 6, 3, 2, 2), (40, 6, 5, 2, 2), (80, 6, 3, 2, 3)),
        *((112, 6, 5, 1, 3), (192, 6, 5, 2, 4), (320, 6, 3, 1, 1)),
    ):
        for block in range(blocks):
            parts.append(_MobileBlock(given, made, expand, kernel, 1 if block else stride))
            given = made
    parts += [*_silu_convolution(given, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Dropout(0.2), nn.Linear(1280, IMAGE_CLASSES))


class _ConvNextBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-3)
        self.hidden, self.back = (
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A depthwise convolution and a feed-forward part around a skip."""
        normed = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.back(functional.gelu(self.hidden(normed))).permute(0, 3, 1, 2)


def convnext(size: Sizes) -> nn.Module:
    """Three stages of ConvNeXt's blocks, each after a convolution of patches."""
    parts, given = [], 3
    for stage in range(3):
        channels, patch = size["channels"] << stage, 2 if stage else 4
        parts.append(nn.Conv2d(given, channels, patch, patch))
        parts += [_ConvNextBlock(channels) for _ in range(size["blocks"])]
        given = channels
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(given, eps=1e-3))
    return nn.Sequential(*parts, *pooled, nn.Linear(given, data.DIGITS))


class _Level(nn.Module):
    """A level of a U-Net around the lower ones."""

    def __init__(self, given: int, channels: int, lower: int) -> None:
        super().__init__()
        self.down, self.lower = _two_convolutions(given, channels), None
        if lower:
            self.lower = nn.Sequential(
                nn.MaxPool2d(2),
                _Level(channels, 2 * channels, lower - 1),
                nn.ConvTranspose2d(2 * channels, channels, 2, 2),
            )
            self.up = _two_convolutions(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Down, the lower levels, and up, with a skip between."""
        x = self.down(x)
        return x if self.lower is None else self.up(torch.cat([self.lower(x), x], 1))


def _two_convolutions(given: int, channels: int) -> nn.Module:
    parts = []
    for before in (given, channels):
        convolution = nn.Conv2d(before, channels, 3, padding=1, bias=False)
        parts += [convolution, nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01), nn.ReLU()]
    return nn.Sequential(*parts)


class _ClassesLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Moves channels to the last axis, where the loss expects classes."""
        return x.movedim(1, -1)


def unet(size: Sizes) -> nn.Module:
    """Convolutions with BatchNormalization down and, transposed, up again; skips between."""
    channels = size["channels"]
    levels = _Level(1, channels, size["levels"] - 1)
    return nn.Sequential(levels, nn.Conv2d(channels, data.INK_LEVELS, 1), _ClassesLast())


class _Sequences(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        """The output of every token."""
        return super().forward(x)[0]


def lstm(size: Sizes) -> nn.Module:
    """A language model of characters."""
    width, layers = size["width"], size["layers"]
    hidden = _Sequences(width, width, layers, batch_first=True)
    output = nn.Linear(width, data.CHARACTERS)
    return nn.Sequential(nn.Embedding(data.CHARACTERS, width), hidden, output)


class _CausalBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(channels, channels, 5)
        self.norm = nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """A causal convolution around a skip."""
        return x + functional.relu(self.norm(self.convolution(functional.pad(x, (4, 0)))))


def conv1d(size: Sizes) -> nn.Module:
    """A language model of characters: causal convolutions in residual blocks."""
    channels = size["channels"]
    embedding, channels_first = nn.Embedding(data.CHARACTERS, channels), _ClassesLast()
    blocks = [_CausalBlock(channels) for _ in range(size["layers"])]
    output = nn.Linear(channels, data.CHARACTERS)
    return nn.Sequential(embedding, channels_first, *blocks, _ClassesLast(), output)


class _Positions(nn.Module):
    def __init__(self, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(classes, width))
        self.places = nn.Parameter(0.02 * torch.randn(tokens + classes, width))

    def forward(self, x: Tensor) -> Tensor:
        """Prepends learned tokens and adds position embeddings."""
        return torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places


def _encoder(size: Sizes, norm_first: bool) -> list[nn.Module]:
    width = size["width"]
    given = {"activation": "gelu", "batch_first": True, "norm_first": norm_first}
    return [
        nn.TransformerEncoderLayer(width, size["heads"], 4 * width, 0.0, **given)
        for _ in range(size["layers"])
    ]


def bert(size: Sizes) -> nn.Module:
    """A post-norm encoder that predicts the word at every position."""
    width, words = size["width"], size["vocabulary"]
    embedded = nn.Embedding(words, width), _Positions(size["tokens"], width, 0)
    encoder = _encoder(size, norm_first=False)
    return nn.Sequential(*embedded, nn.LayerNorm(width), *encoder, nn.Linear(width, words))


class _FirstToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """The class token of each image."""
        return x[:, 0]


def vit(size: Sizes) -> nn.Module:
    """A Vision Transformer with a classifier on its class token."""
    width, patch = size["width"], size["patch"]
    patches = nn.Conv2d(3, width, patch, patch), nn.Flatten(2), _ClassesLast()
    positions = _Positions((size["pixels"] // patch) ** 2, width, 1)
    encoder = [*_encoder(size, norm_first=True), nn.LayerNorm(width), _FirstToken()]
    return nn.Sequential(*patches, positions, *encoder, nn.Linear(width, IMAGE_CLASSES))


_ALL = (mlp, transformer, resnet50, convnext, unet, lstm, bert, vit, efficientnet_b0, conv1d)
MODELS = {each.__name__: each for each in _ALL}


def initialize(model: nn.Module) -> None:
    """Draws weights from the distributions that Keras's layers have by default."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -0.05, 0.05)


def make(name: str, size: Sizes) -> nn.Module:
    """A model of a name with fresh weights, the same in each process."""
    torch.manual_seed(0)
    model = MODELS[name](size)
    initialize(model)
    return model
