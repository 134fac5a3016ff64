"""Limits of time for programs that may not end, also where they hang in C++."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends the process, with a traceback, where the block is not left in time."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class NotDoneError(Exception):
    """A call did not return."""


class Child:
    """A process that runs calls of a function, and is replaced where it ends or takes too long.

    Args:
        run: A function of one argument, by its name in a module.
        limit: Seconds a call may take.
    """

    def __init__(self, run: Callable[[Any], Any], limit: float) -> None:
        self.run, self.limit = run, limit
        self._process: Any = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self.run), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()  # Imports do not count.

    def ask(self, argument: Any) -> Any:
        """Returns the result of a call; an exception of it ends the process.

        Raises:
            NotDoneError: The process ended, or was ended at the limit.
        """
        if self._process is None:
            self._start()
        self._pipe.send(argument)
        text = f"not done after {self.limit:g} s"
        if self._pipe.poll(self.limit):
            try:
                return self._pipe.recv()
            except EOFError:
                self._process.join()
                text = f"its process ended with exit code {self._process.exitcode}"
        self.__exit__()
        raise NotDoneError(text)


def _serve(pipe: Connection, run: Callable[[Any], Any]) -> None:
    warnings.simplefilter("ignore")
    pipe.send("started")
    while True:
        pipe.send(run(pipe.recv()))
