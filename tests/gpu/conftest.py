"""The acceptance suite: what only a GPU can show, with a report. docs/gpu.md explains it.

    python -m pytest -m gpu tests/gpu --report gpu.json

With --on-cpu the same checks run on the CPU at toy size.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tensorflow as tf

from helpers import acceptance, acceptance_report

# The order of issues and reports: from what must work to what must be fast.
ORDER = (
    "detection",
    "updates",
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
        help="write what was checked to FILE, as JSON",
    )
    group.addoption(
        "--on-cpu",
        action="store_true",
        help="run the checks at toy size on the CPU, which tells that the suite itself works",
    )


def _on_cpu(config: pytest.Config) -> bool:
    # In a run of all tests pytest reads this file too late to know its options.
    return config.getoption("on_cpu", default=False)


def pytest_configure(config: pytest.Config) -> None:
    if _on_cpu(config):
        tf.config.set_visible_devices([], "GPU")
    path = config.getoption("report", default=None)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(path, _on_cpu(config)), "acceptance-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A run of all tests has others, too: they stay where they are.
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
    """The device that is checked, and the sizes for it."""
    return acceptance.find_device(_on_cpu(request.config))


@pytest.fixture(scope="session")
def strategy(device: acceptance.Device, request: pytest.FixtureRequest):
    """A MirroredStrategy over two GPUs; with --on-cpu over two logical CPUs.

    One for the session, as a second one would reuse the first one's instance numbers.
    """
    if device.count < 2:
        pytest.skip("there is one GPU")
    if device.toy:
        return request.getfixturevalue("two_replicas")
    return tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])


class Reporter:
    """Collects what the checks recorded, from xdist's workers too, and writes the report."""

    def __init__(self, path: Path, on_cpu: bool) -> None:
        self._path, self._on_cpu = path, on_cpu
        self._rows: dict[str, acceptance_report.Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._rows.setdefault(report.nodeid, acceptance_report.Row(report.nodeid))
        row.add(report)

    def pytest_sessionfinish(self) -> None:
        # Workers of xdist end their checks in any order, and other tests may have run, too.
        rows = [row for group in ORDER for row in self._rows.values() if row.group == group]
        found = acceptance_report.Report.of(rows, on_cpu=self._on_cpu)
        self._path.write_text(found.to_json(), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_sep("-", f"report: {self._path}")
