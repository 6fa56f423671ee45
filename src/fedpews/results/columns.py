"""The columns of a record that the report draws: the only list of them. `fedpews.measure` computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A number of each round, besides the metrics of the task.

    Args:
        title: the title of its chart.
        text: one sentence below the chart.
        unit: a share is drawn in percent, from 0 to 100; a cosine with a line at 0.
    """

    title: str
    text: str
    unit: Literal["", "share", "cosine"] = ""


COLUMNS = {
    "loss": Column("Test loss", "The global model on the test data."),
    "train_loss": Column("Training loss", "Mean over the clients of the round, on their own data."),
    "update_cosine": Column(
        "Do the clients' updates agree?",
        "Mean cosine between the updates of two clients, on the weights both own. Below 0 they cancel out.",
        "cosine",
    ),
    "density": Column("What a client trains", "Share of the neurons, mean over clients.", "share"),
    "coverage": Column(
        "What the clients train together", "Share of the neurons that at least one client owns.", "share"
    ),
    "overlap": Column(
        "What two clients share", "Neurons both own, of those either owns; mean over pairs.", "share"
    ),
}
