"""The systems that the benchmarks compare, as values. No framework is imported.

`benchmarks.keras_side` and `benchmarks.torch_side` run them.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from dataclasses import dataclass

BASE = "float32"
KERAS_HUB_WORKLOADS = ("bert", "vit")


@dataclass(frozen=True)
class System:
    """A way to train.

    Attributes:
        name: Its name on the command line and in JSON.
        title: Its name in tables.
        base: The system in float32 that its loss is compared with.
        torch: Whether it is PyTorch's.
        compiled: Whether XLA, or torch.compile, compiles its step.
        placement: Which of tfamp's placements a rewrite is made with; None for no rewrite.
        losses: Whether its losses are compared too, which takes long where it is compiled again.
    """

    name: str
    title: str
    base: str = BASE
    torch: bool = False
    compiled: bool = False
    placement: str | None = None
    losses: bool = True


_COMPILED = {"compiled": True, "losses": False}
_TORCH = {"base": "torch_float32", "torch": True}
_ALL = (
    System("float32", "float32"),
    System("float32_xla", "float32, XLA", **_COMPILED),
    System("keras_policy", "Keras's policy"),
    System("keras_policy_xla", "Keras's policy, XLA", **_COMPILED),
    System("tensorflow_amp", "TensorFlow's auto_mixed_precision"),
    System("tfamp_policy", "tfamp policy"),
    System("tfamp_policy_sums", "tfamp policy, sums"),
    System("tfamp_policy_xla", "tfamp policy, XLA", **_COMPILED),
    System("rewrite_lists", "tfamp.rewrite, lists", placement="lists"),
    System("rewrite", "tfamp.rewrite, min_cut", placement="min_cut"),
    System("rewrite_fused", "tfamp.rewrite, fused", placement="fused"),
    # Whichever of these and float32 is fastest by its own measurement: its losses are theirs.
    System("tune", "tfamp.tune", losses=False),
    System("auto", 'tfamp.prepare, "auto"', losses=False),
    System("torch_float32", "PyTorch, float32", **_TORCH),
    System("torch_float32_compiled", "PyTorch, float32, compiled", **_TORCH | _COMPILED),
    System("torch_autocast", "PyTorch, autocast", **_TORCH),
    System("torch_autocast_compiled", "PyTorch, autocast, compiled", **_TORCH | _COMPILED),
)
SYSTEMS = {each.name: each for each in _ALL}
# The ways that the docs recommend, and the systems without tfamp.
CHOSEN = ("tune", "auto")
PEERS = ("float32", "float32_xla", "keras_policy", "keras_policy_xla", "tensorflow_amp")
MIXED_PRECISION = ("keras_policy", "tensorflow_amp", "torch_autocast")
TORCH = tuple(name for name in SYSTEMS if SYSTEMS[name].torch)
# float32 again, from initial weights rounded to the low dtype: how far that alone takes the loss.
CONTROL = System("float32_rounded", "float32, initial weights rounded")
# TensorFlow's own optimizer of graphs, by dtype.
GRAPPLER = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}


def grappler_options(system: str, dtype: str) -> dict[str, bool]:
    """The optimizers of TensorFlow's that a system switches on."""
    return {GRAPPLER[dtype]: True} if system == "tensorflow_amp" else {}


def why_not(system: str, workload: str, torch_python: str) -> str | None:
    """The reason why a system cannot train a workload here, or None."""
    if not SYSTEMS[system].torch:
        if workload in KERAS_HUB_WORKLOADS and importlib.util.find_spec("keras_hub") is None:
            return "KerasHub is not installed: pip install keras-hub"
        return None
    if torch_version(torch_python) is None:
        return f"{torch_python} has no PyTorch; see --torch-python"
    return None


@functools.cache
def torch_version(python: str) -> str | None:
    """The version of PyTorch that a Python interpreter has, or None."""
    if python == sys.executable and importlib.util.find_spec("torch") is None:
        return None
    command = [python, "-c", "import torch; print(torch.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-1] if done.returncode == 0 else None
