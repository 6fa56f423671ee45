"""What the fuzz tests share: how many cases, within what time and memory, and how valid input is spoilt.

`make fuzz` runs thirty times as many cases as CI does: FEDPEWS_FUZZ is the factor.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fedpews.errors import FedpewsError

FACTOR = int(os.environ.get("FEDPEWS_FUZZ", "1"))
SECONDS = 30
"""Of the processor's time, for one case."""
MEMORY = 2 * 2**30
"""What one case may take beyond what the process has."""


def cases(count: int) -> settings:
    """So many cases in CI; the same ones every time there, others every time with `make fuzz`."""
    return settings(
        max_examples=count * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def survives(work: Callable[[], object]) -> bool:
    """Whether the work ends well; it must end well or in an error of ours, in time and within memory."""
    with _bounded():
        try:
            work()
        except FedpewsError:
            return False
    return True


@contextmanager
def _bounded() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


TEXTS = [
    "",
    "x",
    "[/]",
    "$$",
    "²",
    "٣",
    "<script>",
    "../..",
    "os:system",
    "folder:/",
    "\x1b[2J",
    "a" * 300,
    "nan",
    "1e999",
]
NUMBERS = [0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e308, 5e-324]

texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
numbers = st.one_of(st.sampled_from(NUMBERS), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
wild = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
"""Any JSON value, the usual suspects more often."""

tame = st.recursive(
    st.one_of(st.booleans(), numbers.filter(lambda number: abs(number) < 2**63), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
"""Any value that TOML has, but for dates."""


@st.composite
def spoilt(draw: st.DrawFn, value: Any, values: st.SearchStrategy[Any] = wild) -> Any:
    """A nested value with something in it replaced, left out or doubled."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        others = {name: inner for name, inner in value.items() if name != key}
        how = draw(st.integers(0, 9))
        if how == 0:
            return others
        if how == 1:
            return value | {draw(texts): draw(values)}
        return others | {key: draw(spoilt(value[key], values))}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(value) - 1))
        how = draw(st.integers(0, 9))
        middle = [] if how == 0 else [value[place]] * 2 if how == 1 else [draw(spoilt(value[place], values))]
        return [*value[:place], *middle, *value[place + 1 :]]
    return draw(values)


PIECES = [
    b"",
    b"\x00",
    b"\xff",
    b"\xff" * 8,
    b"\n",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b"[" * 5000,
    b"\\ud800",
    b"{" * 40,
    b'"',
]


@st.composite
def spoilt_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with up to three places cut, flipped or filled with something else."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        how = draw(st.integers(0, 3))
        if how == 0:
            data = data[:place]
        elif how == 1 and place < len(data):
            data = data[:place] + bytes([data[place] ^ (1 << draw(st.integers(0, 7)))]) + data[place + 1 :]
        else:
            piece = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=12)))
            data = data[:place] + piece + data[place + draw(st.sampled_from([0, 1, 4, 8])) :]
    return data
