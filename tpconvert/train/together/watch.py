"""How ranks end together: who failed says so, who is silent is named, and nobody waits for ever.

Each rank has a thread that says each second, at the store where the ranks met, that it lives.  Rank 0 looks at all
of them and all at rank 0; once something is wrong (a signal, a collective that broke) all look at all.  Time is
counted in these seconds and not by the clock, so that ranks that were all halted a while do not take one another
for dead.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

PATIENCE = 5.0
"""Seconds that ranks wait for one another to say which of them failed first."""
GRACE = 25.0
"""Seconds that a step may still take after a signal; torchrun kills after 30."""
SILENCE = 20
"""Beats without which a rank is gone: more than it can be kept from beating by a call that holds Python's lock."""
SOON = 10
"""The same once this rank was told to stop, since that may be because another is gone."""
BROKEN = 3
"""The same once a collective broke."""
NO_STORE = "error: the store where the ranks met is gone, and with it the machine of rank 0."


class Beats:
    """The signs of life of this rank, and what this rank has seen of others'."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world, self._count = store, rank, world, 0
        self._who = f"{socket.gethostname()}, process {os.getpid()}"
        self._seen: dict[int, tuple[str, int]] = {}
        """Rank -> its last sign, and the beat of this rank at which it came."""

    def beat(self) -> None:
        """Say that this rank lives."""
        self._count += 1
        self._store.set(f"alive/{self._rank}", f"{self._count} {self._who}")

    def silent(self, limit: int, *, all_ranks: bool) -> dict[int, str]:
        """Ranks that have given no sign for ``limit`` beats, and where they were; none before all have begun."""
        ranks = range(self._world) if all_ranks or self._rank == 0 else range(1)
        keys = [f"alive/{r}" for r in ranks]
        if not self._store.check(keys):
            return {}
        for rank, value in zip(ranks, self._store.multi_get(keys), strict=True):
            text = value.decode()
            if self._seen.get(rank, ("", 0))[0] != text:
                self._seen[rank] = (text, self._count)
        late = {r: self._seen[r] for r in ranks if self._count - self._seen[r][1] >= limit and r != self._rank}
        return {rank: text.partition(" ")[2] for rank, (text, _) in late.items()}


class Watch:
    """A thread that ends this rank when another has failed, or when a signal finds it waiting for ever.

    Signals reach Python only between two bytecodes, so a rank that waits in a collective would not notice one.
    That ``parent``, the launcher, is gone is taken for a signal to stop.
    """

    def __init__(self, store: Any, rank: int, world: int, parent: int | None = None) -> None:
        self._store, self._signal, self._done, self._wrong = store, 0, False, False
        self._parent = parent
        self._beats = Beats(store, rank, world)
        self._beats.beat()  # so that a rank which ends within its first second is missed too
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def orphan(self) -> str:
        """Where this rank is, if the process that started it is gone and nobody is left to end it."""
        return socket.gethostname() if self._parent is not None and os.getppid() != self._parent else ""

    def signalled(self) -> bool:
        """Whether this rank was told to stop."""
        return self._signal != 0

    def fail(self, message: str, code: int, *, peer: bool = False) -> None:
        """End this process with ``code``; print ``message`` unless another rank failed first.

        ``peer``: the error may be only that another rank is gone, so that one is given time to speak, or to be missed.
        """
        self._wrong = True
        deadline = time.monotonic() + 2 * PATIENCE
        while peer and not self._failed() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._end(NO_STORE if peer and self._is_store_gone() else message, code)

    def done(self) -> None:
        """The run is over: watch no longer.  A thread that is inside the store when Python ends would abort it."""
        self._done = True
        signal.set_wakeup_fd(-1)
        os.write(self._write, b"\0")
        self._thread.join()

    def _end(self, message: str, code: int = 1) -> None:
        """End this process; the first rank of all that comes here says why."""
        self._done = True
        if self._claim() and message:
            print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    def _claim(self) -> bool:
        try:
            return bool(self._store.add("failed", 1) == 1)
        except Exception:  # the store is gone, so nobody else can speak
            return True

    def _failed(self) -> bool:
        try:
            return bool(self._store.check(["failed"]))
        except Exception:
            return False

    def _is_store_gone(self) -> bool:
        try:
            self._store.check(["failed"])
        except Exception:
            return True
        return False

    def _watch(self) -> None:
        since, lost = 0, 0
        while not self._done:
            until = time.monotonic() + 1.0
            if select.select([self._read], [], [], 1.0)[0]:
                self._signal = os.read(self._read, 1)[0] or self._signal
                if self._done:
                    return
                time.sleep(max(until - time.monotonic(), 0.0))  # a beat a second, however many signals come
            if self.orphan:
                self._signal = self._signal or signal.SIGTERM
            since += self._signal != 0
            try:
                self._beats.beat()
                limit = BROKEN if self._wrong else SOON if self._signal else SILENCE
                silent = self._beats.silent(limit, all_ranks=limit < SILENCE)
                lost = 0
            except Exception:
                silent, lost = {}, lost + 1
            if self._failed() and not self._done:
                time.sleep(PATIENCE)
                self._end_unless_done("")
            if silent:
                self._end_unless_done(_gone(silent))
            if lost > SILENCE:
                self._end_unless_done(NO_STORE)
            if since > GRACE:
                self._end_unless_done("error: told to stop, but a step did not end in time; the last saved step stays.")

    def _end_unless_done(self, message: str) -> None:
        if not self._done:
            self._end(message)


def _gone(silent: dict[int, str]) -> str:
    """One line about ranks that are missed."""
    ranks: Sequence[str] = [f"rank {rank} ({where})" for rank, where in silent.items()]
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"error: {', '.join(ranks[:3])}{more} gave no sign of life any more: killed, or its machine is gone."
