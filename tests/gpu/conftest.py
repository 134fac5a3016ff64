"""The acceptance suite: checks that need a GPU, with a report. See docs/gpu.md.

    python -m pytest -m gpu tests/gpu --report gpu.json

--quick leaves out the checks that are marked `long`. With --on-cpu all run on the CPU at toy size.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

# Before CUDA starts, so that TensorFlow numbers GPUs as nvidia-smi does.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

import pytest
import tensorflow as tf

from helpers import acceptance, acceptance_report

# The order of checks and reports: correctness before speed.
ORDER = (
    "detection",
    "updates",
    "sums",
    "faults",
    "accuracy",
    "compiled",
    "copies",
    "normalization",
    "recurrent",
    "kernels",
    "several_gpus",
    "speed",
)
_HERE = Path(__file__).parent
_CHECK = pytest.StashKey[acceptance.Check]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("acceptance suite")
    group.addoption(
        "--report",
        type=acceptance_report.report_path,
        metavar="FILE",
        help="write the report of the checks to FILE, as JSON",
    )
    group.addoption(
        "--on-cpu",
        action="store_true",
        help="run the checks at toy size on the CPU, which shows that the suite itself works",
    )
    group.addoption("--quick", action="store_true", help="leave out the checks that take minutes")


def _on_cpu(config: pytest.Config) -> bool:
    # In a run of all tests pytest reads this file too late to register options.
    return config.getoption("on_cpu", default=False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: --quick leaves it out of the acceptance suite")
    if _on_cpu(config):
        tf.config.set_visible_devices([], "GPU")
    elif all(Path(each).resolve().is_relative_to(_HERE) for each in config.args):
        # No other tests run, whose settings these would change.
        # TensorFlow's own settings: with few threads a GPU waits for the host.
        tf.config.threading.set_intra_op_parallelism_threads(0)
        tf.config.threading.set_inter_op_parallelism_threads(0)
    path = config.getoption("report", default=None)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(path, _on_cpu(config)), "acceptance-report")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick", default=False):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # Tests outside this folder keep their positions.
    here = [number for number, item in enumerate(items) if item.path.parent == _HERE]
    checks = sorted((items[number] for number in here), key=_place)
    for number, item in zip(here, checks, strict=True):
        items[number] = item
        item.user_properties.append(("title", acceptance_report.title(item)))
        item.user_properties.append(("group", ORDER[_place(item)]))


def _place(item: pytest.Item) -> int:
    return ORDER.index(item.path.stem.removeprefix("test_"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    result = yield
    check = pyfuncitem.stash.get(_CHECK, None)
    if check is not None and check.failures:
        pytest.fail("\n".join(check.failures), pytrace=False)
    return result


@pytest.fixture
def check(request: pytest.FixtureRequest, device: acceptance.Device):
    """Records figures with limits: `check(what, figure, at_most=...)`."""
    request.node.stash[_CHECK] = found = acceptance.Check(device.toy)
    yield found
    request.node.user_properties += [("figure", dataclasses.asdict(f)) for f in found.figures]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> acceptance.Device:
    """The device under test, with the sizes for it."""
    return acceptance.find_device(_on_cpu(request.config))


@pytest.fixture(scope="session")
def strategy(device: acceptance.Device, request: pytest.FixtureRequest):
    """A MirroredStrategy over all GPUs; with --on-cpu over two logical CPUs.

    One for the session: the collectives of a second one would reuse the first one's keys.
    """
    if device.count < 2:
        pytest.skip("there is one GPU")
    if device.toy:
        return request.getfixturevalue("two_replicas")
    return tf.distribute.MirroredStrategy()


@pytest.fixture
def as_users_have_it(device: acceptance.Device, monkeypatch: pytest.MonkeyPatch):
    """Enables TF32 for the float32 baseline, and a measured profile for rewrites."""
    if not device.toy:
        monkeypatch.setenv("TFAMP_PROFILE", "measure")
    tf.config.experimental.enable_tensor_float_32_execution(True)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(False)


class Reporter:
    """Collects the recorded figures, from xdist's workers too, and writes the report."""

    def __init__(self, path: Path, on_cpu: bool) -> None:
        self._path, self._on_cpu = path, on_cpu
        self._rows: dict[str, acceptance_report.Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._rows.setdefault(report.nodeid, acceptance_report.Row(report.nodeid))
        row.add(report)

    def pytest_sessionfinish(self) -> None:
        # xdist's workers finish in any order, and other tests may have run.
        rows = [row for group in ORDER for row in self._rows.values() if row.group == group]
        found = acceptance_report.report_of(rows, on_cpu=self._on_cpu)
        self._path.write_text(json.dumps(found, indent=1), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_sep("-", f"report: {self._path}")
