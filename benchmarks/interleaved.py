"""Interleaves systems, each in a separate process, so that a busy machine slows all of them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Measured, WorkloadRun
from benchmarks.rounds import rotated
from benchmarks.systems import BASE, CONTROL, SYSTEMS, why_not
from benchmarks.worker import WARM_UP_STEPS
from benchmarks.workloads import Workload

_ROOT = Path(__file__).parents[1]
# Systems whose second step takes so many times as long as float32's are not timed.
_TOO_SLOW = 10
TIME_IS_UP = "the time was up"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of a measurement.

    Attributes:
        dtype: The low dtype.
        rounds: Timed steps of each system.
        size: Size of the timed workloads.
        loss_steps: Steps after which losses are compared; 0 leaves them out.
        loss_size: Size of the workloads for losses.
        torch_python: Python interpreter with PyTorch.
        end: Time of `time.monotonic` after which nothing begins; None for no limit. First calls
            run at once then, as many as there are cores: they are traces and compilations.
    """

    dtype: str
    rounds: int
    size: str = "full"
    loss_steps: int = 0
    loss_size: str = "reduced"
    torch_python: str = sys.executable
    end: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.end is not None and time.monotonic() > self.end


def _is_torch(system: str) -> bool:
    return system in SYSTEMS and SYSTEMS[system].torch


class WorkerError(RuntimeError):
    """A worker ended before it answered; the message is the last thing it wrote."""


class NoAnswerError(WorkerError):
    """A worker did not answer before the time was up."""


class WorkerProcess:
    """A process that runs `benchmarks.worker`.

    Args:
        system: The system it trains with.
        options: How.
    """

    def __init__(self, system: str, options: Options) -> None:
        python = options.torch_python if _is_torch(system) else sys.executable
        paths = (str(_ROOT), os.environ.get("PYTHONPATH", ""))
        # Stays open until `close`.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", system, options.dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def send(self, do: str, **arguments: Any) -> None:
        """Sends a request; `read` returns the answer."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._last_words()) from error

    def read(self, end: float | None = None) -> dict[str, Any]:
        """Waits for the next answer, until a time of `time.monotonic`."""
        if end is not None:
            # Between two answers nothing is left in the pipe's buffer.
            left = max(0.0, end - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise NoAnswerError(TIME_IS_UP)
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and waits for the answer."""
        self.send(do, **arguments)
        return self.read()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            # The process is gone: unread requests cannot be flushed.
            with suppress(BrokenPipeError):
                pipe.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with code {self._process.returncode}"


class Group:
    """The workers of several systems; one that fails is closed and its reason kept.

    Args:
        systems: Their names.
        options: How they train.

    Attributes:
        workers: Running workers, by system.
        failed: Reasons why the others ended.
        end: Time of `time.monotonic` until which `together` waits for answers; None for no limit.
    """

    def __init__(self, systems: Iterable[str], options: Options) -> None:
        self.end: float | None = None
        self.workers = {name: WorkerProcess(name, options) for name in systems}
        self.failed: dict[str, str] = {}

    def wait(self) -> None:
        """Waits until all have imported what they need."""
        self._each(tuple(self.workers), WorkerProcess.read)

    def close(self) -> None:
        """Ends all."""
        for worker in self.workers.values():
            worker.close()

    def dismiss(self, systems: Iterable[str]) -> None:
        """Ends some."""
        for name in systems:
            self.workers.pop(name).close()

    def in_turn(self, do: str, *, first: int = 0, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Sends a request to one worker after the other, from number `first`; yields answers."""
        names = rotated(tuple(self.workers), first)
        yield from self._each(names, lambda worker: worker.ask(do, **arguments)).items()

    def together(self, do: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Sends a request to as many workers at once as there are cores; for untimed work."""
        names, at_once = tuple(self.workers), os.cpu_count() or 1
        for start in range(0, len(names), at_once):
            chunk = names[start : start + at_once]
            self._each(chunk, lambda worker: worker.send(do, **arguments))
            left = [name for name in chunk if name in self.workers]
            yield from self._each(left, lambda worker: worker.read(self.end)).items()

    def _each(self, names: Sequence[str], action: Callable[[WorkerProcess], Any]) -> dict[str, Any]:
        answers = {}
        for name in names:
            try:
                answers[name] = action(self.workers[name])
            except WorkerError as error:
                is_late = isinstance(error, NoAnswerError)
                if name == BASE and not is_late:
                    raise WorkerError(
                        f"{BASE}, which all are compared with, failed: {error}"
                    ) from error
                self.failed[name] = str(error) if is_late else f"failed: {error}"
                self.workers.pop(name).close()
        return answers


@contextmanager
def workers(systems: Iterable[str], options: Options) -> Iterator[Group]:
    """Yields a group and closes it at exit."""
    with ExitStack() as stack:
        group = Group(systems, options)
        stack.callback(group.close)
        group.wait()
        yield group


def measure(
    workload: Workload, systems: Sequence[str], options: Options, progress: Progress
) -> WorkloadRun:
    """Measures all systems on a workload.

    Args:
        workload: The workload.
        systems: Names of systems, float32 among them.
        options: How to measure.
        progress: Called with a few words before each of `stages` stages.

    Returns:
        The results; systems that cannot run here are in `skipped`, with the reason.
    """
    skipped = {
        name: reason
        for name in systems
        if (reason := why_not(name, workload.name, options.torch_python))
    }
    run = WorkloadRun(workload.name, dict(workload.size(options.size)), skipped=skipped)
    if options.loss_steps:
        run.loss_size = dict(workload.size(options.loss_size))
    if options.is_over:
        run.skipped |= dict.fromkeys((name for name in systems if name not in skipped), TIME_IS_UP)
        return run
    with workers([name for name in systems if name not in skipped], options) as group:
        _first_calls(group, run, options, progress)
        rounds = _rounds(group, run.systems, options, progress) if BASE in group.workers else 0
        progress("Casts")
        group.end = options.end
        for name, found in () if options.is_over else group.together("casts"):
            run.systems[name].casts, run.systems[name].cast_bytes = found["casts"], found["bytes"]
        if options.loss_steps:
            group.dismiss([name for name in group.workers if not SYSTEMS[name].losses])
            progress(f"losses of {options.loss_steps} steps")
            for name, found in _losses(group, run, options.loss_steps).items():
                run.systems[name].losses = found
    if options.loss_steps:
        with workers([CONTROL.name], options) as group:
            progress(f"losses of {CONTROL.title}")
            run.control = _losses(group, run, options.loss_steps).get(CONTROL.name, [])
        run.skipped |= group.failed
    run.skipped |= group.failed
    # A failure after the rounds, as in counting Casts, does not discard the times.
    run.systems = {
        name: each for name, each in run.systems.items() if 0 < len(each.seconds) == rounds
    }
    if not rounds:
        run.skipped |= dict.fromkeys((name for name in systems if name not in skipped), TIME_IS_UP)
    return run


def stages(options: Options) -> int:
    """How often `measure` reports its progress."""
    return 1 + options.rounds + 1 + 2 * bool(options.loss_steps)


def _first_calls(group: Group, run: WorkloadRun, options: Options, progress: Progress) -> None:
    progress("first calls")
    warm = {}
    start = group.in_turn if options.end is None else group.together
    if options.end is not None:  # Those that compile for longer leave the others time for steps.
        now = time.monotonic()
        group.end = now + (options.end - now) / 2
    for name, found in start("start", workload=run.workload, size=run.size):
        parts = {key: found[key] for key in ("build", "first_call", "rewrite")}
        run.systems[name], warm[name] = Measured(**parts), found["warm"]
    for name, seconds in warm.items() if BASE in warm else ():
        if seconds > _TOO_SLOW * warm[BASE]:
            times = f"{seconds / warm[BASE]:.0f} times as long as in {BASE}"
            run.skipped[name] = f"the step after the first takes {times}"
            group.dismiss([name])


def _rounds(
    group: Group, systems: Mapping[str, Measured], options: Options, progress: Progress
) -> int:
    """Times the steps; returns how many rounds the time allowed."""
    for number in range(options.rounds):
        if options.is_over:
            return number
        progress(f"round {number + 1}")
        # Rotate, so that no system always runs after the one that evicts the caches most.
        for name, found in group.in_turn("step", first=number):
            systems[name].seconds.append(found["seconds"])
            systems[name].memory = max(systems[name].memory, found["memory"])
    return options.rounds


def _losses(group: Group, run: WorkloadRun, count: int) -> dict[str, list[float]]:
    start = group.together("start", workload=run.workload, size=run.loss_size)
    losses = {name: found["losses"][:count] for name, found in start}
    if count > WARM_UP_STEPS:
        for name, found in group.together("steps", count=count - WARM_UP_STEPS):
            losses[name] += found["losses"]
    return {name: losses[name] for name in group.workers}
