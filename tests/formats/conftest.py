"""Two ranks that are the whole world: transformers makes its mesh of all there are."""

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()
