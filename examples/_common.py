"""Shared by the examples: the command line, the digits and a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits as sklearn_digits
from sklearn.model_selection import train_test_split

DTYPES = ("float16", "bfloat16", "float32")


def make_parser(doc: str, *, epochs: int, small_epochs: int) -> argparse.ArgumentParser:
    """Returns a parser of the options every example has, with `doc` as its help text."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float16", help="compute dtype to compare with float32"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and shuffling")
    parser.add_argument(
        "--epochs", type=int, help=f"default: {epochs}; with --small {small_epochs}"
    )
    parser.add_argument("--small", action="store_true", help="run for a few seconds only")
    parser.set_defaults(default_epochs=(epochs, small_epochs))
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed options, `epochs` filled in."""
    args = parser.parse_args(argv)
    if args.epochs is None:
        args.epochs = args.default_epochs[args.small]
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1; got {args.epochs}")
    return args


def policies(dtype: str) -> list[str]:
    """Returns the names of the policies to compare: float32, then the mixed one of `dtype`."""
    return ["float32"] if dtype == "float32" else ["float32", f"mixed_{dtype}"]


class Digits(NamedTuple):
    """Handwritten digits, 8 x 8 pixels in [0, 1]: 1198 to train on, 599 to test with."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_digits() -> Digits:
    """Returns scikit-learn's digits, always split in the same way; nothing is downloaded."""
    data = sklearn_digits()
    x = (data.images / 16.0).astype("float32")[..., None]
    x_train, x_test, y_train, y_test = train_test_split(
        x, data.target.astype("int32"), test_size=1 / 3, random_state=0, stratify=data.target
    )
    return Digits(x_train, y_train, x_test, y_test)


def progress(console: Console) -> Progress:
    """Returns a progress display; outside a terminal it prints only its last state."""
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


class ProgressBar(keras.callbacks.Callback):
    """Keras callback that moves one bar of a rich progress display, once an epoch.

    Args:
        display: A running progress display.
        name: Text in front of the bar.
        metric: Name of the metric shown behind it.
    """

    def __init__(self, display: Progress, name: str, metric: str = "loss") -> None:
        super().__init__()
        self.display = display
        self.name = name
        self.metric = metric

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Adds the bar."""
        self.task = self.display.add_task(self.name, total=self.params["epochs"], note="")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Moves the bar and shows the metric."""
        note = f"{self.metric} {(logs or {}).get(self.metric, float('nan')):.3f}"
        self.display.update(self.task, advance=1, note=note)
