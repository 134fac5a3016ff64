"""The interface between TensorFlow's intercepted internals and who decides what happens there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any, Protocol


class Interception(Protocol):
    """What intercepted TensorFlow code calls back into."""

    def active(self) -> bool:
        """Whether anything is cast here now."""

    def concerns(self, op: str) -> bool:
        """Whether `adjust` may change this op's inputs here now; asked for every op."""

    def adjust(self, op: str, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the inputs an op is to run with, or None to leave them."""

    def cast(self, tensor: Any, dtype: Any, run: Callable[[], Any]) -> Any:
        """Returns the result of a cast of a tensor; `run` does it."""

    def kept(self, tensor: Any) -> Any:
        """Returns the result of a cast to the dtype a tensor has."""

    def convert(self, value: Any, dtype: Any, asker: FrameType) -> tuple[Any, Any]:
        """Returns the value and the dtype (None: its own) for a conversion to a tensor."""

    def stacked(self, values: Any, dtype: Any) -> tuple[Any, Any]:
        """Returns the values, nested in lists, that are to be one tensor, and its dtype."""

    def recast(self, value: Any, dtype: str) -> Any:
        """Returns a value in a dtype, if both are ones that ops are cast between."""

    def align(self, outputs: Any, like: Any) -> Any:
        """Returns a loop body's outputs in the dtypes of `like`."""

    def common_dtype(self, values: Sequence[Any]) -> str:
        """The dtype that the outputs of several branches are to have; "" if they can stay."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which nothing is cast; gradients are computed in it."""

    def custom_gradient(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that `tf.custom_gradient` decorates, fit for the mode here."""

    def python_function(self, function: Callable[..., Any], dtypes: Any) -> Callable[..., Any]:
        """Returns the function an op is to run that runs Python and was declared these dtypes."""

    def recording_changed(self) -> None:
        """Called when a tape or an accumulator here begins to record or to watch."""

    def trace_key(self) -> Hashable:
        """What a trace of a `tf.function` depends on, None where on nothing."""

    def finished_graph(self, function: Any) -> None:
        """Called with a function whose graph is finished, before it runs."""

    def cross_entropy_input(self, logits: Any) -> Any:
        """Returns the logits a cross-entropy function is to work on."""
