"""Training steps of PyTorch, written as its documentation does.

In float32 and under autocast, each eager and compiled by `torch.compile`.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import torch_models
from benchmarks.data import Batch
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import Sizes, Workload

_MOMENTUM = 0.9


class Trainer:
    """Trains models with one system.

    Args:
        system: The name of one of PyTorch's systems.
        dtype: The low dtype.
    """

    rewrite_seconds = 0.0

    def __init__(self, system: str, dtype: str) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        # As TensorFlow does: TF32 for float32 on GPUs, and the fastest of cuDNN's kernels.
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        self._dtype = getattr(torch, dtype)
        self._low, self._compiles = "autocast" in system, SYSTEMS[system].compiled
        # The first optimizer imports much, which is not a model's memory.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)

    def build(self, workload: Workload, size: Sizes) -> None:
        """Makes the model and its optimizer."""
        model = torch_models.make(workload.name, size).to(self._device)
        # Channels last is the layout its documentation recommends, on CPUs and GPUs.
        model = model.to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(
            model.parameters(), workload.learning_rate, momentum=_MOMENTUM
        )
        self._model = torch.compile(model) if self._compiles else model
        scales = self._low and self._dtype == torch.float16
        self._scaler = torch.amp.GradScaler(self._device, enabled=scales)

    def first_step(self, batch: Any) -> float:
        """Takes the first step."""
        return self.step(batch)

    def put(self, batch: Batch) -> Any:
        """Brings a batch to the device; the axis of channels is first, last in memory."""
        x, y = (torch.from_numpy(each) for each in batch)
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2)
        on_device = x.to(self._device), y.long().to(self._device)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return on_device

    def step(self, batch: Any) -> float:
        """Takes a step and waits until it is done; returns the loss."""
        x, y = batch
        self._optimizer.zero_grad()
        with torch.autocast(self._device, self._dtype, enabled=self._low):
            logits = self._model(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    def casts(self, batch: Any) -> None:
        """Autocast has no graph to count in."""
        del batch


def device_bytes() -> dict[str, int] | None:
    """The "current" and "peak" bytes of the GPU's allocator; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return {
        "current": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
    }


def reset_device_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
