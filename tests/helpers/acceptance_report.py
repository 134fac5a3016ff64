"""The report of tests/gpu as JSON: the machine, the checks and their figures."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tfamp
from helpers.acceptance import describe_gpu

_DRIVER = Path("/proc/driver/nvidia/version")
_OUTCOMES = ("passed", "failed", "skipped")


def report_path(text: str) -> Path:
    """Checks the path of `--report` before anything runs."""
    path = Path(text).absolute()
    if path.suffix != ".json":
        raise pytest.UsageError(f"--report takes a file ending in .json; got {text!r}.")
    if not path.parent.is_dir():
        raise pytest.UsageError(f"--report: the folder {path.parent} does not exist.")
    return path


def title(item: pytest.Item) -> str:
    """Returns the title of a check: the first line of its docstring, and its parameters."""
    text = (getattr(item, "function", None).__doc__ or item.name).strip().partition("\n")[0]
    parameters = re.search(r"\[(.+)\]$", item.name)
    return text.replace("`", "").removesuffix(".") + (f" ({parameters[1]})" if parameters else "")


@dataclass
class Row:
    """One check: a test and what it recorded.

    Attributes:
        check: The test's name.
        title: The first line of its docstring.
        group: The part of the suite it belongs to.
        outcome: "passed", "failed" or "skipped".
        why: The failure, or the reason for skipping.
        seconds: How long it took.
        figures: Its figures, as dictionaries of `Figure`.
    """

    check: str
    title: str = ""
    group: str = ""
    outcome: str = "passed"
    why: str = ""
    seconds: float = 0.0
    figures: list[dict] = field(default_factory=list)

    def add(self, report: pytest.TestReport) -> None:
        """Adds one phase of the test: set-up, call or teardown."""
        self.seconds += report.duration
        if report.outcome != "passed" and self.outcome != "failed":
            self.outcome, self.why = report.outcome, _reason(report)
        # Tests outside the suite have no title and no group.
        if report.when == "teardown" and report.user_properties:
            found = collections.defaultdict(list)
            for name, value in report.user_properties:
                found[name].append(value)
            self.title, self.group = "".join(found["title"]), "".join(found["group"])
            self.figures = found["figure"]


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # Skipped: file, line, reason.
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash is not None else str(report.longrepr)


def report_of(checks: list[Row], *, on_cpu: bool) -> dict:
    """Returns the machine, counts of outcomes, and the checks, for JSON."""
    found = collections.Counter(each.outcome for each in checks)
    return {
        "machine": _machine(on_cpu),
        "counts": {outcome: found[outcome] for outcome in _OUTCOMES},
        "checks": [dataclasses.asdict(each) for each in checks],
    }


def _machine(on_cpu: bool) -> dict[str, str]:
    build = tf.sysconfig.get_build_info()
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": _cpu_name() if on_cpu else ", ".join(_gpu_names()) or "no GPU",
        "driver": _driver(),
        "CUDA": str(build.get("cuda_version") or "none"),
        "cuDNN": str(build.get("cudnn_version") or "none"),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "tfamp": tfamp.__version__,
        "Python": platform.python_version(),
    }
    if on_cpu:
        found["sizes"] = "toy, on the CPU: times are recorded, and held to no limit"
    return found


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", path.read_text() if path.exists() else "", re.M)
    return f"CPU {names[0]}" if names else f"CPU {platform.processor()}".strip()


def _gpu_names() -> Iterable[str]:
    for gpu in tf.config.list_physical_devices("GPU"):
        name, capability = describe_gpu(gpu)
        version = ".".join(str(each) for each in capability or "?")
        yield f"{name} (compute capability {version})"


def _driver() -> str:
    if not _DRIVER.exists():
        return "none"
    found = re.search(r"(\d+\.[\d.]+)", _DRIVER.read_text(encoding="utf-8"))
    return found[1] if found else "unknown"
