"""Planning copies a module again and again while no collector runs; the copies of a large one are let go."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

from tpconvert.analyze.trace import copies
from tpconvert.analyze.trace.copies import copied
from tpconvert.planning.make import collector_paused


@pytest.fixture
def paused() -> Iterator[None]:
    with collector_paused():
        yield


def left_after_another(module: nn.Module) -> nn.Module | None:
    """A copy that hangs in a cycle, as what was recorded of it makes it do, after the next copy was made."""
    made = copied(module)
    made.__dict__["recorded"] = made
    left = weakref.ref(made)
    del made
    assert left() is not None
    copied(module)
    return left()


@pytest.mark.parametrize(("width", "much", "freed"), [(2048, 2**62, True), (8, 2**62, False), (8, 1, True)])
def test_copies_are_let_go_where_a_module_or_the_process_is_large(paused, monkeypatch, width, much, freed):
    monkeypatch.setattr(copies, "MUCH", much)
    assert (left_after_another(nn.Linear(width, width)) is None) is freed


def test_a_collector_that_runs_is_left_to_itself(monkeypatch):
    monkeypatch.setattr(copies, "MUCH", 1)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("it runs by itself"))
    assert gc.isenabled()
    copied(nn.Linear(2, 2))


def test_the_collector_is_as_it_was_afterwards():
    with pytest.raises(ValueError, match="planned"), collector_paused():
        assert not gc.isenabled() and gc.get_freeze_count()
        raise ValueError("planned")
    assert gc.isenabled() and not gc.get_freeze_count()


def test_what_somebody_else_has_frozen_stays_so(monkeypatch):
    # How many are frozen says nothing: each one that is let go meanwhile leaves the count.
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled() and not calls
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    with collector_paused():
        pass
    assert calls == ["freeze", "unfreeze"]
