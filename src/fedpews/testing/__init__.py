"""For those who write a method: the laws that every method obeys, as checks to run on your own.

>>> from fedpews.methods.fedavg import FedAvg
>>> check_method(FedAvg())
"""

from fedpews.testing.laws import (
    Whole,
    check_alone,
    check_finite,
    check_laws,
    check_method,
    check_same,
    equal,
)
from fedpews.testing.playground import Played, Playground, Samples, small_clients, small_network

__all__ = [
    "Played",
    "Playground",
    "Samples",
    "Whole",
    "check_alone",
    "check_finite",
    "check_laws",
    "check_method",
    "check_same",
    "equal",
    "small_clients",
    "small_network",
]
