"""A toy study for the tests of the studies."""

from __future__ import annotations

from typing import Any

from fedpews.paper.study import Claim, Line, Study

TINY = {
    "rounds": 2,
    "train": {"steps": 1},
    "data": {"train_per_class": 4, "test_per_class": 2},
    "model": {"hidden": [4, 4]},
    "warmup": {"rounds": 1},
    "runtime": {"engine": "eager"},
}


def study(**changes: Any) -> Study:
    values: dict[str, Any] = {
        "name": "toy",
        "item": "Table 0",
        "title": "a toy",
        "base": "synthetic-32k",
        "seeds": [0, 1],
        "measures": ["final", "rounds"],
        "rows": {
            "fedavg": Line(label="FedAvg", set={"method": {"name": "fedavg"}}),
            "pews": Line(label="PeWS", set={"method": {"name": "fedavg+pews"}}),
        },
        "columns": {"a": Line(label="A", set=TINY), "b": Line(label="B", set=TINY | {"rounds": 3})},
        "paper": {"final": {"fedavg": ["70 ± 1", "60"], "pews": ["75 ± 2", "66"]}},
        "claims": [Claim(text="higher", rows=["pews"], than="fedavg")],
    }
    return Study(**(values | changes))
