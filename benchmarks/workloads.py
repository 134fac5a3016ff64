"""The workloads as values: sizes, data and learning rates. No framework is imported.

The models are in `benchmarks.models` and, for PyTorch, in `benchmarks.torch_models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks import data

Sizes = Mapping[str, int]
SIZES = ("full", "reduced", "small")
# Of a GPU with 80 GB, on which eight systems are at once. Others have their full sizes there.
_GPU_SIZES: Mapping[str, Sizes] = {
    "mlp": {"layers": 6, "width": 4096, "batch": 4096},
    "transformer": {
        **{"layers": 12, "width": 1024, "heads": 16},
        **{"tokens": 512, "vocabulary": 8000, "batch": 8},
    },
    "resnet50": {"pixels": 224, "batch": 64},
}


@dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
        name: Its name on the command line.
        learning_rate: For SGD with momentum 0.9. With it runs that differ by roundings stay
            together for 200 steps: deep networks with BatchNormalization do at small ones only.
        batch: Makes the batch of a number in some dimensions.
        sizes: The dimensions, "batch" among them: "full" is timed, "reduced" is what several
            hundred steps are taken of, "small" is for tests.
    """

    name: str
    learning_rate: float
    batch: Callable[[Sizes, int], data.Batch]
    sizes: Mapping[str, Sizes]

    def size(self, name: str) -> Sizes:
        """The dimensions of a size, one of `SIZES` or "gpu"."""
        return _GPU_SIZES.get(self.name, self.sizes["full"]) if name == "gpu" else self.sizes[name]


def _sizes(**dimensions: tuple[int, int, int]) -> Mapping[str, Sizes]:
    """Dimensions of each of `SIZES`."""
    return {
        size: {name: values[number] for name, values in dimensions.items()}
        for number, size in enumerate(SIZES)
    }


def _characters_and_class(size: Sizes, number: int) -> data.Batch:
    return data.characters_and_class(size["batch"], size["width"], number)


def _characters(size: Sizes, number: int) -> data.Batch:
    return data.characters(size["batch"], size["tokens"], number)


def _words(size: Sizes, number: int) -> data.Batch:
    return data.words(size["batch"], size["tokens"], size["vocabulary"], number)


def _hidden_words(size: Sizes, number: int) -> data.Batch:
    return data.hidden_words(size["batch"], size["tokens"], size["vocabulary"], number)


def _images(size: Sizes, number: int) -> data.Batch:
    return data.digit_images(size["batch"], size["pixels"], number)


def _masks(size: Sizes, number: int) -> data.Batch:
    return data.digit_masks(size["batch"], size["pixels"], number)


_ALL = (
    Workload(
        *("mlp", 0.01, _characters_and_class),
        _sizes(layers=(6, 6, 2), width=(2048, 1024, 256), batch=(256, 128, 32)),
    ),
    Workload(
        *("transformer", 0.03, _words),
        _sizes(
            **{"layers": (4, 2, 2), "width": (512, 256, 128), "heads": (8, 4, 4)},
            **{"tokens": (128, 64, 32), "vocabulary": (8000, 2000, 500), "batch": (16, 8, 8)},
        ),
    ),
    Workload("resnet50", 3e-5, _images, _sizes(pixels=(128, 40, 32), batch=(16, 16, 2))),
    Workload(
        *("convnext", 0.01, _images),
        _sizes(blocks=(2, 1, 1), channels=(96, 32, 8), pixels=(96, 48, 32), batch=(16, 16, 2)),
    ),
    Workload(
        *("unet", 0.01, _masks),
        _sizes(levels=(4, 3, 2), channels=(32, 16, 8), pixels=(64, 32, 16), batch=(16, 16, 2)),
    ),
    Workload(
        *("lstm", 0.1, _characters),
        _sizes(layers=(2, 2, 1), width=(512, 128, 32), tokens=(32, 32, 8), batch=(32, 32, 8)),
    ),
    Workload(
        *("bert", 0.03, _hidden_words),
        _sizes(
            **{"layers": (4, 2, 1), "width": (256, 128, 32), "heads": (4, 2, 2)},
            **{"tokens": (128, 64, 16), "vocabulary": (4000, 1000, 200), "batch": (16, 8, 2)},
        ),
    ),
    Workload(
        *("vit", 0.01, _images),
        _sizes(
            **{"layers": (12, 4, 1), "width": (192, 96, 32), "heads": (3, 3, 2)},
            **{"patch": (16, 8, 8), "pixels": (128, 40, 16), "batch": (16, 16, 2)},
        ),
    ),
    Workload("efficientnet_b0", 1e-4, _images, _sizes(pixels=(128, 64, 32), batch=(16, 16, 2))),
    Workload(
        *("conv1d", 0.03, _characters),
        _sizes(layers=(6, 4, 1), channels=(256, 64, 16), tokens=(256, 64, 16), batch=(16, 16, 2)),
    ),
)
WORKLOADS = {each.name: each for each in _ALL}
