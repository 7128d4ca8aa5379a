"""Threads behind one another: one reads, another hashes and writes what it has read, each file's bytes in order.

Neither holds Python's lock for long.  What is hashed is still in the processor's cache when it is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, Semaphore
from types import TracebackType
from typing import Any

from torch import Tensor

from tpconvert.checkpoint.files.tensorfile import TensorFileWriter
from tpconvert.spec.manifest import File

AHEAD = 24
"""Steps that wait at most, each on a piece of about a MiB."""
READERS = 2
RELEASE_EVERY = 256 << 20
"""Bytes written between two releases of what is open."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class Stopped(Exception):  # noqa: N818 - not an error: another thread has one
    """Ends a thread whose sibling failed."""


class Meter:
    """Counts bytes for all threads, tells the caller, and frees what is held now and then."""

    def __init__(self, total: int, progress: Progress | None, release: Callable[[], None]) -> None:
        self.total = total
        self._progress = progress
        self._release = release
        self._lock = Lock()
        self._done = 0
        self._released = 0

    def add(self, count: int) -> None:
        """Count bytes as done."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self.total)
            if self._done - self._released >= RELEASE_EVERY:
                self._released = self._done
                self._release()


class Pipe:
    """Runs the readers it is given; the first error of any thread ends all of them."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._error: BaseException | None = None
        self._readers = ThreadPoolExecutor(READERS)
        self._lanes = [ThreadPoolExecutor(1) for _ in range(min(max(os.cpu_count() or 1, 2), 16))]
        self._last = ThreadPoolExecutor(4)
        self._room = Semaphore(AHEAD)
        self._lock = Lock()
        self._outlets: list[Outlet] = []

    def run(self, readers: Iterable[Callable[[], Any]], beside: Iterable[Callable[[], Any]] = ()) -> None:
        """Run all readers, and what goes on ``beside`` them, to their end."""
        jobs = [self._readers.submit(self.guard, job) for job in readers]
        jobs += [self._last.submit(self.guard, job) for job in beside]
        for job in jobs:
            job.result()
        for outlet in self._outlets:
            outlet.wait()
        self.check()

    def open(self, make: Callable[[], TensorFileWriter]) -> Outlet:
        """A file to write, by one of the threads."""
        writer = make()
        with self._lock:
            outlet = Outlet(self, writer, self._lanes[len(self._outlets) % len(self._lanes)])
            self._outlets.append(outlet)
        self.meter.add(writer.header.data)
        return outlet

    def submit(self, lane: ThreadPoolExecutor, step: Callable[[], Any]) -> None:
        """Let a lane take one more step, when there is room."""
        while not self._room.acquire(timeout=0.1):
            self.check()
        self.check()
        lane.submit(self._step, step)

    def last(self, step: Callable[[], Any]) -> Future[Any]:
        """Start what a file ends with, which may wait for the disk."""
        return self._last.submit(self.guard, step)

    def check(self) -> None:
        """Raise if a thread has failed."""
        if self._error is not None:
            raise Stopped

    def guard(self, step: Callable[[], Any]) -> Any:
        """Run a step unless a thread has failed, and keep its error."""
        try:
            self.check()
            return step()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the first error."""
        with self._lock:
            self._error = self._error or error

    def _step(self, step: Callable[[], Any]) -> None:
        try:
            self.guard(step)
        finally:
            self._room.release()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        for threads in (self._readers, *self._lanes, self._last):
            threads.shutdown(wait=True, cancel_futures=error is not None)
        for outlet in self._outlets:
            outlet.writer.abandon()
        if isinstance(error, Stopped) and self._error is not None:
            raise self._error from None


class Outlet:
    """One file that is written by the threads of a pipe."""

    def __init__(self, pipe: Pipe, writer: TensorFileWriter, lane: ThreadPoolExecutor) -> None:
        self.writer = writer
        self._pipe = pipe
        self._lane = lane
        self._file: Future[Any] | None = None

    def put(self, runs: Sequence[Tensor]) -> None:
        """Append runs of elements."""
        self._pipe.submit(self._lane, lambda: self._pipe.meter.add(sum(map(self.writer.write, runs))))

    def end(self) -> None:
        """No more pieces come: the file is forced to the disk and closed."""
        mark = self._lane.submit(lambda: None)

        def close() -> File:
            mark.result()
            self._pipe.check()
            return self.writer.close()

        self._file = self._pipe.last(close)

    def wait(self) -> None:
        """Wait until the file is closed."""
        if self._file is not None:
            self._file.result()

    @property
    def file(self) -> File:
        """Size and hash of the closed file."""
        assert self._file is not None
        closed: File = self._file.result()
        return closed
