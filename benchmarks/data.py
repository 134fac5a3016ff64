"""Training data of the benchmarks: real, on every machine, learnable and never used up.

Text is the source code of Python's standard library; images are scikit-learn's digits, enlarged,
shifted and with noise. A batch follows from its number alone, so that all systems see the same.
No framework is imported here.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
CHARACTERS = 128
CLASSES_OF_CHARACTERS = 10
INK_LEVELS = 4
DIGITS = 10
_TEXT_BYTES = 3_000_000
_NOISE = 0.5


def characters_and_class(batch: int, width: int, number: int) -> Batch:
    """One-hot characters, `width` values for each row, and what kind of character comes next."""
    windows = _windows(_text(), batch, width // CHARACTERS + 1, number)
    one_hot = np.eye(CHARACTERS, dtype="float32")[windows[:, :-1]]
    centred = (one_hot - 1 / CHARACTERS) * np.sqrt(CHARACTERS)
    return centred.reshape(batch, -1).astype("float32"), _kinds()[windows[:, -1]]


def characters(batch: int, tokens: int, number: int, held_out: bool | None = None) -> Batch:
    """Sequences of characters, and the character after each.

    With `held_out` they are of the last tenth of the text, or of what is before it.
    """
    text = _text()
    (chosen,) = _part(held_out, len(text) * 9 // 10, text)
    windows = _windows(chosen, batch, tokens + 1, number)
    return windows[:, :-1], windows[:, 1:]


def words(batch: int, tokens: int, vocabulary: int, number: int) -> Batch:
    """Sequences of words, spaces and signs by number, and the one after each."""
    windows = _windows(_words(vocabulary), batch, tokens + 1, number)
    return windows[:, :-1], windows[:, 1:]


def hidden_words(batch: int, tokens: int, vocabulary: int, number: int) -> Batch:
    """Sequences of words by number with about every seventh replaced by 0, and without."""
    found = _windows(_words(vocabulary), batch, tokens, number)
    hidden = np.random.default_rng((2, number)).random(found.shape) < 0.15
    return np.where(hidden, 0, found).astype("int32"), found


def digit_images(batch: int, pixels: int, number: int, held_out: bool | None = None) -> Batch:
    """Pictures of digits with three channels, and which digit each is.

    With `held_out` they are of the last third of the digits, or of those before it.
    """
    clean, digits, random = _digits(batch, pixels, number, held_out)
    shape = (*clean.shape, 3)
    return clean[..., None] + _NOISE * random.standard_normal(shape, "float32"), digits


def digit_masks(batch: int, pixels: int, number: int) -> Batch:
    """Pictures of digits with noise, and for every pixel how much ink is there, in levels."""
    clean, _, random = _digits(batch, pixels, number)
    noisy = clean + _NOISE * random.standard_normal(clean.shape, "float32")
    levels = np.clip((clean + 1) / 3 * INK_LEVELS, 0, INK_LEVELS - 1)
    return noisy[..., None], levels.astype("int32")


def _part(held_out: bool | None, end: int, *series: np.ndarray) -> tuple[np.ndarray, ...]:
    """All of some series; or what is held out, from `end` on; or what is learnt from."""
    if held_out is None:
        return series
    return tuple(each[end:] if held_out else each[:end] for each in series)


def _windows(series: np.ndarray, batch: int, length: int, number: int) -> np.ndarray:
    starts = np.random.default_rng((0, number)).integers(0, len(series) - length, batch)
    return series[starts[:, None] + np.arange(length)]


@functools.cache
def _text() -> np.ndarray:
    found = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        found += path.read_bytes()
        if len(found) > _TEXT_BYTES:
            break
    text = np.frombuffer(bytes(found[:_TEXT_BYTES]), "uint8").astype("int32")
    return np.where(text < CHARACTERS, text, ord("?"))


@functools.cache
def _words(vocabulary: int) -> np.ndarray:
    """The text as numbers of words; 0 is every word that is not among the most frequent."""
    found = re.findall(r"\w+|\s+|[^\w\s]", _text().astype("uint8").tobytes().decode("ascii"))
    frequent = Counter(found).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
    return np.array([numbers.get(word, 0) for word in found], "int32")


@functools.cache
def _kinds() -> np.ndarray:
    def kind(character: str) -> int:
        tests = (str.islower, str.isupper, str.isdigit)
        for number, test in enumerate(tests):
            if test(character):
                return number
        groups = (" \t", "\n\r", "_", "()[]{}", "'\"", ".,:;")
        for number, group in enumerate(groups, start=len(tests)):
            if character in group:
                return number
        return CLASSES_OF_CHARACTERS - 1

    return np.array([kind(chr(code)) for code in range(CHARACTERS)], "int32")


def _digits(
    batch: int, pixels: int, number: int, held_out: bool | None = None
) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Enlarged, shifted digits from -1 (paper) to 2 (ink), and the generator for their noise."""
    images, labels = _all_digits()
    images, labels = _part(held_out, len(images) * 2 // 3, images, labels)
    random = np.random.default_rng((1, number))
    chosen = random.integers(0, len(images), batch)
    places = np.linspace(-1, 8, pixels)  # A margin on every side, for the shift.
    shifted = places[None] + random.uniform(-1, 1, (batch, 2))[:, :, None]
    rows, columns = (_interpolation(shifted[:, axis]) for axis in (0, 1))
    large = rows @ images[chosen] @ columns.transpose(0, 2, 1)
    return (3 * large - 1).astype("float32"), labels[chosen], random


def _interpolation(places: np.ndarray) -> np.ndarray:
    """Matrices that interpolate 8 values linearly at each place, with nothing beyond the ends."""
    return np.clip(1 - np.abs(places[:, :, None] - np.arange(8)), 0, 1)


@functools.cache
def _all_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "The benchmarks on images need scikit-learn's digits: pip install scikit-learn."
        ) from error
    found = load_digits()
    return found.images / 16, found.target.astype("int32")
