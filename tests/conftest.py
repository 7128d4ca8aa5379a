"""A pool of gloo ranks that lives as long as the test run, so that a test with ranks costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(pool: Pool) -> Callable[..., list[Any]]:
    """``run_ranks(fn, degree, *args, dp=1, timeout=60)``: what ``fn(mesh, *args)`` returns on each rank.

    ``fn`` is a module-level function.  A failing or hanging rank fails the test with that rank's traceback.
    """
    return pool.run
