"""What all tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_core_each() -> None:
    """Tests run side by side already."""
    torch.set_num_threads(1)
