"""The choice of an engine by a modelled cost, with a reason in one line.

The model depends on the network and the experiment alone, not on measured times: a run that is resumed, or repeated
on a busy machine, must get the same engine, because two engines agree only up to rounding.
"""

from __future__ import annotations

import logging
import math

from torch import nn

from fedpews.data.federation import Federation
from fedpews.engines.compiled.engine import CompiledEngine
from fedpews.engines.compiled.native import compiler_path, torch_library
from fedpews.engines.compiled.program import CannotCompile
from fedpews.engines.eager import EagerEngine, batch_sizes
from fedpews.engines.engine import Engine, Schedule
from fedpews.neurons.network import Network

# measured with `make bench`; only their order of magnitude matters
EAGER_OVERHEAD = 45e-6  # seconds a step for each trainable tensor
COMPILED_OVERHEAD = 3e-6
FLOPS = 40e9  # a second, on one core
SLOWER_CONVOLUTIONS = 1.4  # clients side by side need grouped convolutions
COMPILE_SECONDS = 12.0  # a program
WARMUP_PASSES = 2  # through the network in a step of a warmup: for the scores, then for the weights
WORTHWHILE = 0.8  # of the eager time, or less
MIXED = "train.precision is bfloat16, and compiled steps are in single precision"
DEVICE_LANES = 32  # clients at once on a GPU, which small kernels leave almost idle


def choose_engine(
    name: str,
    net: Network,
    data: Federation,
    schedule: Schedule,
    workers: int,
    *,
    rounds: int,
    jobs: int,
    warmup_rounds: int = 0,
) -> tuple[Engine, str]:
    """The engine, and the reason in one line.

    Args:
        name: "eager", "compiled" or "auto". What cannot be compiled runs eagerly in any case.
        rounds: of the whole experiment, also when it is resumed in the middle.
        jobs: clients that train in a round, all seeds together.
        warmup_rounds: how many of them are (or may be) warmup rounds, which have their own program to compile.
    """
    eager = EagerEngine(net, data, schedule, workers)
    model = f"a model of {sum(shape.numel() for shape in net.shapes.values()):,} weights"
    if name == "eager":
        return eager, "as asked"
    if net.precision != "float32":
        if name == "compiled":
            logging.getLogger("fedpews").warning("the eager engine runs this: %s", MIXED)
        return eager, f"not compiled: {MIXED}"
    if name == "auto" and data.device.type != "cpu":
        # not measured there yet
        return eager, f"on {data.device}; to step many clients at once, set runtime.engine to compiled"
    if name == "auto":
        plain, compiled = step_seconds(net, schedule.batch_size)
        # of a client in a round, on average
        mean_steps = sum(len(batch_sizes(len(rows), schedule)) for rows in data.clients) / len(data)
        steps = rounds * jobs * mean_steps
        # whatever the cores: threads of small eager steps wait for each other at Python's lock
        saved = steps * (plain - compiled) * (1 + warmup_rounds / rounds * (WARMUP_PASSES - 1))
        programs = 2 if warmup_rounds else 1
        if compiled > WORTHWHILE * plain:
            return eager, f"{model}: its kernels take the time, so compiling would save little"
        if saved < programs * COMPILE_SECONDS:
            return eager, f"{model}: {steps:,.0f} steps are too few to repay compiling"
        reason = f"{model}: about {plain / compiled:.0f} times fewer seconds a step than eager"
    else:
        reason = "as asked"
    try:
        if data.device.type == "cpu":
            # checked first: without a compiler or the functions of torch it needs, nothing has to be traced
            torch_library()
            compiler_path()
        lanes = lanes_for(jobs) if data.device.type == "cpu" else min(jobs, DEVICE_LANES)
        engine = CompiledEngine(net, data, schedule, workers, lanes, instead=eager)
    except CannotCompile as refusal:
        if name == "compiled":
            # a warning only if it was requested; with auto the reason is enough
            logging.getLogger("fedpews").warning("the eager engine runs this: %s", refusal)
        return eager, f"not compiled: {refusal}"
    return engine, reason


def lanes_for(jobs: int) -> int:
    """How many clients to step at once: more share a call's overhead, but every core needs a group.

    It depends on the number of jobs alone, so any number of workers runs the same programs.

    >>> [lanes_for(jobs) for jobs in (1, 2, 4, 6, 12, 20, 60)]
    [2, 2, 2, 3, 6, 5, 6]
    """
    if jobs <= 4:
        return 2

    def seconds(lanes: int) -> float:
        # two cores take the groups in turn; a call costs about half a lane
        return math.ceil(math.ceil(jobs / lanes) / 2) * (lanes + 0.5)

    return min(range(2, 9), key=seconds)


def step_seconds(net: Network, batch_size: int) -> tuple[float, float]:
    """The modelled time of one client's step, eager and compiled."""
    kernels = 3 * batch_size * net.flops / FLOPS  # forward, and twice that backward
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    has_convolutions = any(isinstance(layer, kinds) for layer in net.module({}).modules())
    slower = SLOWER_CONVOLUTIONS if has_convolutions else 1.0
    tensors = len(net.trainable)
    return kernels + EAGER_OVERHEAD * tensors, slower * kernels + COMPILED_OVERHEAD * tensors
