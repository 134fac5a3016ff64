"""The checks of tests/gpu: figures with limits, the device, memory and interleaved timing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config

import tfamp

TESTS = Path(__file__).resolve().parents[1]
TOY_TIMING = "recorded only: times at toy size are not representative"
Value = float | int | bool | str


@dataclass(frozen=True)
class Figure:
    """One figure of a check.

    Attributes:
        what: The measured quantity.
        value: The figure; None where it was left out.
        unit: Its unit, "" for ratios and counts.
        limit: The limit as text; "" for none.
        outcome: "passed", "failed", "recorded" or "skipped".
        why: The reason why the limit was not applied, or the figure is missing.
    """

    what: str
    value: Value | None
    unit: str = ""
    limit: str = ""
    outcome: str = "recorded"
    why: str = ""

    def to_text(self) -> str:
        """The figure and its limit in one line."""
        limit = f", expected {self.limit}" if self.limit else ""
        return f"{self.what}: {show(self.value)} {self.unit}".rstrip() + limit


def show(value: Value | None) -> str:
    """Formats a figure for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass
class Check:
    """Records figures; one beyond its limit fails the test at its end.

    So a run on a borrowed machine reports all figures, not those up to the first failure.
    """

    toy: bool
    figures: list[Figure] = field(default_factory=list)

    def __call__(
        self,
        what: str,
        value: Value,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        equals: Value | None = None,
        unit: str = "",
        timing: bool = False,
    ) -> None:
        """Records a figure; limits of times apply at full size only."""
        value = value.numpy() if hasattr(value, "numpy") else value
        value = value.item() if hasattr(value, "item") else value
        limits = {"at most": at_most, "at least": at_least, "": equals}
        given = {word: limit for word, limit in limits.items() if limit is not None}
        limit = " and ".join(f"{word} {show(each)}".strip() for word, each in given.items())
        # NaN fails every comparison.
        passed = (
            (at_most is None or value <= at_most)
            and (at_least is None or value >= at_least)
            and (equals is None or value == equals)
        )
        outcome, why = "passed" if passed else "failed", ""
        if not given or (timing and self.toy):
            outcome, why = "recorded", TOY_TIMING if given else ""
        # JSON has no inf and no NaN.
        plain = value if not isinstance(value, float) or math.isfinite(value) else str(value)
        self.figures.append(Figure(what, plain, unit, limit, outcome, why))

    def leave_out(self, what: str, why: str) -> None:
        """Records why a figure is not available here."""
        self.figures.append(Figure(what, None, outcome="skipped", why=why))

    @property
    def failures(self) -> list[str]:
        """All figures beyond their limits."""
        return [each.to_text() for each in self.figures if each.outcome == "failed"]


@dataclass(frozen=True)
class Device:
    """The device that is checked.

    Attributes:
        name: As TensorFlow names it: "GPU:0", or "CPU:0" with --on-cpu.
        capability: A GPU's compute capability.
        toy: Whether sizes are small, for a CPU.
        count: How many devices of the kind there are.
    """

    name: str
    capability: tuple[int, int] | None
    toy: bool
    count: int

    @property
    def low(self) -> str:
        """The low-precision dtype that the device multiplies fastest."""
        return "float16" if self.capability and self.capability < (8, 0) else "bfloat16"

    def size(self, real: int, toy: int) -> int:
        """Returns the size for this device."""
        return toy if self.toy else real

    def needs_gpu(self, why: str) -> None:
        """Skips the test on a CPU."""
        if self.toy:
            pytest.skip(why)

    def needs(self, dtype: str) -> None:
        """Skips the test on a GPU without arithmetic in a dtype."""
        if dtype == "bfloat16" and self.capability and self.capability < (8, 0):
            pytest.skip("this GPU has no bfloat16 arithmetic")

    def environment(self, **changes: str) -> dict[str, str]:
        """Returns a user's environment for a process on the same device."""
        removed = ("TF_FORCE_GPU_ALLOW_GROWTH", "TFAMP_PROFILE")
        kept = {name: value for name, value in os.environ.items() if name not in removed}
        hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if self.toy else {}
        path = {"PYTHONPATH": str(Path(tfamp.__file__).parents[1])}
        return kept | path | hidden | changes

    def tfamp(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Runs the command `tfamp` in a process of its own."""
        command = [sys.executable, "-m", "tfamp", *arguments]
        return self._run(command, environment)

    def program(self, text: str, **environment: str) -> subprocess.CompletedProcess:
        """Runs a Python program in a process of its own."""
        return self._run([sys.executable, "-c", text], environment)

    def helper(self, name: str, *arguments: str, **environment: str) -> dict:
        """Runs a module of tests/helpers as a program, which prints RESULT and one JSON object."""
        path = os.pathsep.join([str(Path(tfamp.__file__).parents[1]), str(TESTS)])
        command = [sys.executable, "-m", f"helpers.{name}", *arguments]
        done = self._run(command, {"PYTHONPATH": path} | environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.partition("RESULT")[2])

    def _run(
        self, command: list[str], environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )


def find_device(on_cpu: bool) -> Device:
    """The first GPU, or the CPU with toy sizes."""
    if on_cpu:
        return Device("CPU:0", None, True, len(tf.config.list_logical_devices("CPU")))
    gpus = tf.config.list_physical_devices("GPU")
    return Device("GPU:0", describe_gpu(gpus[0])[1], False, len(gpus))


def describe_gpu(gpu: tf.config.PhysicalDevice) -> tuple[str, tuple[int, int] | None]:
    """Returns a GPU's name and compute capability; TensorFlow itself cannot parse "9.0a"."""
    try:
        details = tf.config.experimental.get_device_details(gpu)
    except RuntimeError as error:
        found = re.search(r"(\d+)\.(\d+)", str(error))
        return gpu.name, (int(found[1]), int(found[2])) if found else None
    return details.get("device_name", "unknown GPU"), details.get("compute_capability")


def first_visible_gpu(environment: Mapping[str, str]) -> str:
    """Returns the index or UUID with which nvidia-smi selects TensorFlow's "GPU:0".

    Both number GPUs alike if CUDA_DEVICE_ORDER is PCI_BUS_ID, as the suite sets it.
    """
    return environment.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"


def used_memory() -> float | None:
    """Returns the MiB in use on the first visible GPU by all processes; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query.append(f"--id={first_visible_gpu(os.environ)}")
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return float(done.stdout) if done.returncode == 0 else None


@contextlib.contextmanager
def deterministic_ops() -> Iterator[None]:
    """Runs a block under `tf.config.experimental.enable_op_determinism`."""
    tf.config.experimental.enable_op_determinism()
    try:
        yield
    finally:
        framework_config.disable_op_determinism()


Ways = Mapping[str, Callable[[], object]]


def interleaved_seconds(ways: Ways, *, rounds: int, calls: int) -> dict[str, list[float]]:
    """Returns seconds per call; every round times all ways, so that load slows all of them."""
    for _ in range(2):
        for call in ways.values():
            call()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            tf.test.experimental.sync_devices()
            start = time.perf_counter()
            for _ in range(calls):
                ways[name]()
            tf.test.experimental.sync_devices()
            found[name].append((time.perf_counter() - start) / calls)
    return found


def ratio(seconds: Mapping[str, list[float]], of: str, to: str) -> float:
    """Returns the median over the rounds of the ratio of two ways' times."""
    return statistics.median(a / b for a, b in zip(seconds[of], seconds[to], strict=True))


def relative_difference(actual: list, expected: list) -> float:
    """Returns the largest difference of any tensor, relative to the tensor's largest value."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        a, b = (tf.cast(tf.convert_to_tensor(each), tf.float64) for each in (a, b))
        largest = float(tf.reduce_max(tf.abs(b)))
        difference = float(tf.reduce_max(tf.abs(a - b)))
        worst = max(worst, difference / largest if largest else difference)
        if math.isnan(difference):
            return math.nan
    return worst
