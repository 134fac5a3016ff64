"""What the benchmarks train, as values: sizes, data and learning rates. No framework is imported.

The models are in `benchmarks.models`, those of them that PyTorch is compared on in
`benchmarks.torch_models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks import data

Sizes = Mapping[str, int]
SIZES = ("full", "reduced", "small")


@dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
        name: What it is called on the command line.
        about: What it is, for people.
        sizes: Its dimensions, "batch" among them: "full" is timed, "reduced" is what several
            hundred steps are taken of, "small" is for tests.
        batch: Makes the batch of a number in these dimensions.
        learning_rate: That of SGD with momentum 0.9. With it runs that differ by roundings stay
            together for 200 steps: deep networks with BatchNormalization do at small ones only.
        smallest: Where the scaling table starts, in the dimensions it scales; others are the same
            in the whole table.
    """

    name: str
    about: str
    sizes: Mapping[str, Sizes]
    batch: Callable[[Sizes, int], data.Batch]
    learning_rate: float
    smallest: Sizes | None = None


def _mlp() -> Workload:
    return Workload(
        "mlp",
        "Dense layers; the data: which kind of character follows others",
        {
            "full": {"layers": 6, "width": 2048, "batch": 256},
            "reduced": {"layers": 6, "width": 1024, "batch": 128},
            "small": {"layers": 2, "width": 256, "batch": 32},
        },
        lambda size, number: data.characters_and_class(size["batch"], size["width"], number),
        0.01,
        {"width": 512, "batch": 32},
    )


def _transformer() -> Workload:
    full = {"layers": 4, "width": 512, "heads": 8, "tokens": 128, "vocabulary": 8000, "batch": 16}
    reduced = {"layers": 2, "width": 256, "heads": 4, "tokens": 64, "vocabulary": 2000, "batch": 8}
    small = {"layers": 2, "width": 128, "heads": 4, "tokens": 32, "vocabulary": 500, "batch": 8}
    return Workload(
        "transformer",
        "pre-norm blocks with causal attention; the data: the next word of Python's library",
        {"full": full, "reduced": reduced, "small": small},
        lambda size, number: data.words(size["batch"], size["tokens"], size["vocabulary"], number),
        0.03,
        {"width": 128, "batch": 2, "layers": 2},
    )


def _images(name: str, about: str, reduced_pixels: int, learning_rate: float) -> Workload:
    return Workload(
        name,
        about,
        {
            "full": {"pixels": 128, "batch": 16},
            "reduced": {"pixels": reduced_pixels, "batch": 16},
            "small": {"pixels": 32, "batch": 2},
        },
        lambda size, number: data.digit_images(size["batch"], size["pixels"], number),
        learning_rate,
    )


def _convnext() -> Workload:
    return Workload(
        "convnext",
        "ConvNeXt blocks: depthwise convolutions, LayerNormalization, GELU; the data: as resnet50",
        {
            "full": {"blocks": 2, "channels": 96, "pixels": 96, "batch": 16},
            "reduced": {"blocks": 1, "channels": 32, "pixels": 48, "batch": 16},
            "small": {"blocks": 1, "channels": 8, "pixels": 32, "batch": 2},
        },
        lambda size, number: data.digit_images(size["batch"], size["pixels"], number),
        0.01,
    )


def _unet() -> Workload:
    return Workload(
        "unet",
        "a U-Net with BatchNormalization; the data: how much ink is where in noisy digits",
        {
            "full": {"levels": 4, "channels": 32, "pixels": 64, "batch": 16},
            "reduced": {"levels": 3, "channels": 16, "pixels": 32, "batch": 16},
            "small": {"levels": 2, "channels": 8, "pixels": 16, "batch": 2},
        },
        lambda size, number: data.digit_masks(size["batch"], size["pixels"], number),
        0.01,
    )


def _lstm() -> Workload:
    return Workload(
        "lstm",
        "LSTM layers; the data: the next character of Python's library",
        {
            "full": {"layers": 2, "width": 512, "tokens": 32, "batch": 32},
            "reduced": {"layers": 2, "width": 128, "tokens": 32, "batch": 32},
            "small": {"layers": 1, "width": 32, "tokens": 8, "batch": 8},
        },
        lambda size, number: data.characters(size["batch"], size["tokens"], number),
        0.1,
    )


def _bert() -> Workload:
    full = {"layers": 4, "width": 256, "heads": 4, "tokens": 128, "vocabulary": 4000, "batch": 16}
    reduced = {"layers": 2, "width": 128, "heads": 2, "tokens": 64, "vocabulary": 1000, "batch": 8}
    small = {"layers": 1, "width": 32, "heads": 2, "tokens": 16, "vocabulary": 200, "batch": 2}
    return Workload(
        "bert",
        "KerasHub's BERT; the data: words of Python's library, some of them hidden",
        {"full": full, "reduced": reduced, "small": small},
        lambda size, number: data.hidden_words(
            size["batch"], size["tokens"], size["vocabulary"], number
        ),
        0.03,
    )


def _vit() -> Workload:
    full = {"layers": 12, "width": 192, "heads": 3, "patch": 16, "pixels": 128, "batch": 16}
    reduced = {"layers": 4, "width": 96, "heads": 3, "patch": 8, "pixels": 40, "batch": 16}
    small = {"layers": 1, "width": 32, "heads": 2, "patch": 8, "pixels": 16, "batch": 2}
    return Workload(
        "vit",
        "KerasHub's Vision Transformer; the data: as resnet50",
        {"full": full, "reduced": reduced, "small": small},
        lambda size, number: data.digit_images(size["batch"], size["pixels"], number),
        0.01,
    )


def _conv1d() -> Workload:
    return Workload(
        "conv1d",
        "causal 1-D convolutions with BatchNormalization; the data: as lstm",
        {
            "full": {"layers": 6, "channels": 256, "tokens": 256, "batch": 16},
            "reduced": {"layers": 4, "channels": 64, "tokens": 64, "batch": 16},
            "small": {"layers": 1, "channels": 16, "tokens": 16, "batch": 2},
        },
        lambda size, number: data.characters(size["batch"], size["tokens"], number),
        0.03,
    )


_ALL = (
    _mlp(),
    _transformer(),
    _images(
        "resnet50", "that of keras.applications, 1000 classes; the data: enlarged digits", 40, 3e-5
    ),
    _convnext(),
    _unet(),
    _lstm(),
    _bert(),
    _vit(),
    _images("efficientnet_b0", "that of keras.applications; the data: as resnet50", 64, 1e-4),
    _conv1d(),
    _images("mobilenet_v2", "that of keras.applications, on the same data", 64, 1e-4),
)
WORKLOADS = {each.name: each for each in _ALL}
# MobileNetV2 takes long to trace and is measured where it is asked for.
DEFAULT = tuple(name for name in WORKLOADS if name != "mobilenet_v2")
