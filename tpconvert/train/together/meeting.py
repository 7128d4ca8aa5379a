"""Where the ranks of one start of a run find one another, apart from those of the starts before it.

torchrun starts a run again with the same store, in which the last start has left its keys, and counts the starts on
each machine by itself: where one rank fails, its machine counts one more, and another machine may not.  So rank 0
makes up a name, and gives it to each rank that asks by a word that nobody else has ever used.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from tpconvert.errors import TrainError

PATIENCE = 600.0
"""Seconds within which all ranks have to come: as long as torchrun waits for a machine."""
ANSWER = 30.0
"""Seconds after which a rank asks again: who answered may have been of a start that was over."""
PAUSE = 0.05


def meet(store: Any, rank: int, world: int, restarted: bool) -> tuple[str, bool]:
    """``(a name that all ranks of this start and no others have, whether any of them was ``restarted``)``."""
    deadline = time.monotonic() + PATIENCE
    if rank == 0:
        return _receive(store, world, restarted, deadline)
    while time.monotonic() < deadline:
        word = uuid.uuid4().hex
        store.set(f"word/{rank}", word)
        if not _wait(store, f"name/{word}", deadline):
            break
        name = store.get(f"name/{word}").decode()
        store.set(f"here/{name}/{rank}", str(int(restarted)))
        if _wait(store, f"go/{name}", min(deadline, time.monotonic() + ANSWER)):
            return name, store.get(f"go/{name}") == b"1"
    raise TrainError(f"Rank {rank} has waited {PATIENCE / 60:.0f} minutes for the others.")


def _receive(store: Any, world: int, restarted: bool, deadline: float) -> tuple[str, bool]:
    """As rank 0: answer whoever asks, until all have said that they know the name."""
    name, answered = uuid.uuid4().hex, set()
    words, here = ([f"{key}/{rank}" for rank in range(1, world)] for key in ("word", f"here/{name}"))
    while world > 1 and not store.check(here):
        if time.monotonic() > deadline:
            missing = [key.rpartition("/")[2] for key in here if not store.check([key])]
            raise TrainError(f"Ranks {', '.join(missing)} did not come within {PATIENCE / 60:.0f} minutes.")
        for word in store.multi_get(words) if store.check(words) else ():
            if word not in answered:  # of this start or an earlier one; who is no more does not mind
                answered.add(word)
                store.set(f"name/{word.decode()}", name)
        time.sleep(PAUSE)
    again = restarted or (world > 1 and b"1" in store.multi_get(here))
    store.set(f"go/{name}", str(int(again)))
    return name, again


def _wait(store: Any, key: str, deadline: float) -> bool:
    """Whether the key is there in time."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)
    return True
