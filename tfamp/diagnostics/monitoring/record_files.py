"""Records of a monitor in files: JSON lines, and TensorBoard's event files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

_SHARES = ("under_2**-24", "under_2**-14", "over_65504", "zeros")


def append_line(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Appends a record to a file of JSON lines; the file ends with a complete line at any time.

    Args:
        path: The file; it and its folder are made if need be.
        record: The record.
    """
    line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Opened for each line: a run may end at any time, and nothing is to be lost or left open then.
    with open(path, "ab") as file:
        file.write(line.encode())


class EventWriter:
    """Writes records as scalars and histograms for TensorBoard.

    Args:
        folder: Where the event file goes; it is made if need be.

    Raises:
        OSError: The file cannot be made there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            self._writer = tf.summary.create_file_writer(os.fspath(folder))
        except tf.errors.OpError as error:
            raise OSError(
                f"No event file can be made in {os.fspath(folder)!r}: {error.message}. Give a "
                "folder that can be written to."
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one record; it is in the file when this returns."""
        with self._writer.as_default(step=record["step"]), tf.summary.record_if(True):
            for name in ("loss_scale", "suggested_scale", "skipped_steps"):
                if record[name] is not None:
                    _scalar(f"numerics/{name}", record[name])
            for name in _SHARES:
                _scalar(f"numerics/gradients/{name}", record["gradients"][name])
            for kind in ("variables", "activations"):
                for name, described in record.get(kind, {}).items():
                    _exponents(f"numerics/{kind}/{name}", described["exponents"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _scalar(tag: str, value: float) -> None:
    # As tf.summary.scalar, which needs the package tensorboard.
    tf.summary.write(tag, np.float32(value), metadata=_metadata("scalars", 1))


def _exponents(tag: str, counts: Mapping[int, int]) -> None:
    # tf.summary.histogram makes bins of its own, from values; these are the bins already: left
    # edge, right edge, number.
    if counts:
        exponents = range(min(counts), max(counts) + 1)
        bins = np.array([(e, e + 1, counts.get(e, 0)) for e in exponents], "float64")
        tf.summary.write(tag, bins, metadata=_metadata("histograms", 2))


def _metadata(plugin: str, data_class: int) -> Any:
    metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
    metadata.plugin_data.plugin_name = plugin
    return metadata
