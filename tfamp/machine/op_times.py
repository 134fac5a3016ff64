"""The times of ops on this machine: those that are known, and those that are measured now.

They are kept beside the machine's profile, in one small JSON file for each machine and TensorFlow
version, which is replaced as a whole: processes can read and write at once, and at worst measure
something twice. What cannot be read counts as not there.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.machine import gpu_sharing, op_timing
from tfamp.machine.file_replacing import replace_text
from tfamp.machine.op_timing import OpWork, Turns
from tfamp.machine.profile_choice import (
    MEASURING,
    VARIABLE,
    cache_folder,
    check_folder,
    file_of_machine,
    machine_key,
)
from tfamp.machine.progress import progress
from tfamp.machine.timing import in_own_thread

# Raised when what a time means, or how it is measured, changes.
_FORMAT = 1
# About 60 bytes each; a train step has a few hundred. The oldest are dropped.
MOST_KEPT = 10_000
# A work is not begun where less than this many times its estimate is left.
_RUNS = 8
# Works are timed until two times are this near to each other, so often at most.
_MOST_TURNS = 6
_FIRST_TURNS = 0.6
_AGREEMENT = 0.05
_LEAST_SECONDS = 1e-7
# Two times are needed to agree. A bar on terminals counts so many of each work.
_LEAST_TURNS = 2
_SILENT_SECONDS = 1.0
# What is said to take longer is damage.
_MOST_SECONDS = 1e4

# Seconds by the key of a work; None where there is no kernel that does it.
Known: TypeAlias = dict[str, float | None]


def measuring_is_off() -> bool:
    """Whether the environment says that nothing is to be measured."""
    return os.environ.get(VARIABLE, "") == "builtin"


def op_times(wanted: Sequence[Turns], seconds: float) -> dict[OpWork, float]:
    """Returns times of works on this machine, measured before or now.

    Args:
        wanted: The works, the most important first.
        seconds: About how long to measure; what is not reached then has no time.

    Returns:
        The seconds of the works that have a kernel.
    """
    if measuring_is_off():
        return {}
    folder = None if os.environ.get(VARIABLE) == "measure" else cache_folder()
    with MEASURING:
        store = _store(tuple(machine_key().items()), folder)
        missing = [turns for turns in wanted if not store.has(turns)]
        if missing and seconds > 0 and not _is_in_use():
            stop = threading.Event()
            store.add(in_own_thread(lambda: _measured(missing, seconds, stop), stop.set))
        found = {work: store.known.get(work.key()) for turns in wanted for work in turns.works}
    return {work: each for work, each in found.items() if each is not None}


def _is_in_use() -> bool:
    if not (use := gpu_sharing.used_by_others()):
        return False
    text = f"Another job uses the GPU: {use}. No times of ops are measured, they are estimated."
    warnings.warn(text, TfampWarning, stacklevel=2)
    return True


def _measured(wanted: Sequence[Turns], seconds: float, stop: threading.Event) -> Known:
    """Times works until their times are sure or the seconds are over, the first ones first.

    All are timed once before any is timed again: what slows the machine for a while then slows
    another one the next time. The best times count. Some of the seconds are left for that.
    """
    begin = time.perf_counter()
    gpu_sharing.let_memory_grow()
    tf.config.list_logical_devices()  # Starts eager mode, whose threads a session shares.
    found: dict[Turns, _Best] = {turns: _Best() for turns in wanted}
    move_on = progress(_LEAST_TURNS * len(wanted), "op", after=_SILENT_SECONDS)
    for number in range(_MOST_TURNS):
        end = begin + seconds * (1.0 if number else _FIRST_TURNS)
        for turns, best in found.items():
            if stop.is_set():
                return {}
            if not best.is_sure and time.perf_counter() + _RUNS * turns.estimate < end:
                best.time(turns)
                move_on()
    return {work.key(): each for best in found.values() for work, each in best.times.items()}


class _Best:
    """The best times of works that are timed by turns."""

    def __init__(self) -> None:
        self.times: op_timing.Times = {}
        self.is_sure = False

    def time(self, turns: Turns) -> None:
        """Times them once more; they are sure if two times agree, or cannot be told."""
        try:
            times = op_timing.time_by_turns(turns)
        except tf.errors.OpError:  # For want of memory, for instance: they keep their estimates.
            self.is_sure = True
            return
        before, self.times = self.times, dict(times)
        self.is_sure = True
        for work, seconds in times.items():
            known = before.get(work, math.inf)
            if seconds is not None and known is not None:
                self.times[work] = min(known, seconds)
                self.is_sure &= _agree(known, seconds)


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= max(_AGREEMENT * min(one, other), _LEAST_SECONDS)


@functools.cache
def _store(key: tuple[tuple[str, str], ...], folder: Path | None) -> _Store:
    """One for each machine and folder, so that a process measures everything once."""
    return _Store(dict(key), folder)


class _Store:
    """What is known about a machine, in this process and in its file."""

    def __init__(self, key: Mapping[str, str], folder: Path | None) -> None:
        self._key, self._folder = key, folder
        self.known = self._read()

    def has(self, turns: Turns) -> bool:
        """Whether all these works were measured."""
        return all(work.key() in self.known for work in turns.works)

    def add(self, measured: Known) -> None:
        """Adds what was measured, to the file too."""
        # What other processes wrote meanwhile stays; in theirs, these become the newest.
        self.known = _newest({**self.known, **self._read(), **measured})
        if self._folder is None or not measured:
            return
        fields = {"format": _FORMAT, "key": self._key, "seconds": self.known}
        try:
            check_folder(self._folder)
            replace_text(self._file(self._folder), json.dumps(fields, indent=0))
        except OSError as error:
            text = (
                "The measured times of ops cannot be kept, so every process measures them again: "
                f'{error}. Make {self._folder} writable, or set {VARIABLE} to "builtin", with '
                "which nothing is measured."
            )
            warnings.warn(text, TfampWarning, stacklevel=2)

    def _file(self, folder: Path) -> Path:
        return file_of_machine(folder, "ops", self._key)

    def _read(self) -> Known:
        if self._folder is None:
            return {}
        try:
            found = json.loads(self._file(self._folder).read_text(encoding="utf-8"))
            if (found["format"], found["key"]) != (_FORMAT, self._key):
                return {}
            times = dict(found["seconds"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        return {name: each for name, each in times.items() if _is_time(each)}


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return value is None or (is_number and 0 <= value <= _MOST_SECONDS)


def _newest(known: Known) -> Known:
    return dict(list(known.items())[-MOST_KEPT:])
