"""A Dask scheduler that the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dask_here import Dask


@pytest.fixture(scope="session")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dask]:
    """A scheduler and two workers, once for all tests of a process."""
    from dask_here import Dask

    with closing(Dask(tmp_path_factory.mktemp("dask"))) as started:
        for _ in range(2):
            started.add_worker()
        yield started
