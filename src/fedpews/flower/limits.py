"""The most that a message from a site may have: bytes by kind of message, and the range of every number.

SECURITY.md quotes both tables.
"""

from __future__ import annotations

from fedpews.tasks.names import is_share

FRAME = 2**16
"""Bytes that Flower's own objects around the content of a message may take."""

MOST_BYTES = {
    "hello": 2**22,
    "train": FRAME,
    "evaluate": FRAME,
    "personal": FRAME,
    "final": FRAME,
    "best": FRAME,
    "refused": FRAME,
    "statistics": 2**24,
}
"""By kind of the request."""

MORE = {
    "train": " and, for each seed, the largest upload of the method and phase, and the metrics' sums if it has scores",
    "evaluate": " and, for each seed and part of the data, the metrics' sums",
}
"""What is added to these bytes, in words: it depends on the model and the task."""

SAMPLES_MULTIPLE = 10
"""A site's samples count at most as so many times the median of the other sites', unless the roster says how many it
has or the server knows."""

LARGEST_LOSS = 1e6
"""The largest mean loss that a site may report, of training or of evaluation; honest ones are below a hundred."""

RANGES = {
    "training loss of an upload": (0.0, LARGEST_LOSS),
    "evaluation loss, mean of a sample": (0.0, LARGEST_LOSS),
    "θ, and the bit of adaptive clipping": (0.0, 1.0),
    "personal metric that is a share": (0.0, 1.0),
    "personal metric of another kind": (-LARGEST_LOSS, LARGEST_LOSS),
}


def is_metric(name: str, value: object) -> bool:
    """Whether a value can be that of a metric.

    >>> is_metric("accuracy", 0.5), is_metric("accuracy", 1.5), is_metric("mae", 1.5), is_metric("mae", float("nan"))
    (True, False, True, False)
    """
    kind = "personal metric that is a share" if is_share(name) else "personal metric of another kind"
    low, high = RANGES[kind]
    return isinstance(value, float) and low <= value <= high
