"""Where the time of a client's step goes on the eager engine: ``profile_step.py [B|A2] [bfloat16]``, one core.

Prints every kind of kernel with its milliseconds a step, for a plain step and for a step of the warmup.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS

from fedpews.engines.eager import EagerEngine
from fedpews.engines.pooling import fast_pooling
from fedpews.methods.contract import Method
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.modules import channels_last
from fedpews.neurons.network import Batch, Network
from fedpews.server import choose_cohort
from fedpews.trees import map_leaves
from fedpews.warmup import with_warmup

STEPS, TURNS = 10, 4
KINDS = {
    "convolution_backward": "convolutions, backward",
    "mkldnn_convolution": "convolutions, forward",
    "max_pool2d_with_indices": "pooling, forward",
    "max_pool2d_with_indices_backward": "pooling, backward",
    "fill_": "pooling, backward",  # it clears what it scatters into
    "_MaxPool": "pooling, forward",
    "_MaxPoolBackward": "pooling, backward",
    "addmm": "fully connected layers",
    "mm": "fully connected layers",
}


def milliseconds(net: Network, method: Method, data, schedule, lr: float) -> dict[str, float]:
    """Time a step by kind of kernel."""
    engine = EagerEngine(net, data, schedule, 1)
    state = method.init(net, net.initial(), len(data))
    half = method.client(method.phase(state, 1))
    download = method.downloads(net, state, choose_cohort(len(data), len(data), 1, 0))[0]
    local = map_leaves(channels_last, half.start(net, download, None))
    rows = data.clients[0][: schedule.batch_size]
    batch = Batch(channels_last(data.x[rows]), data.y[rows])
    noise = torch.rand(half.noise_size(net), generator=torch.Generator().manual_seed(0))
    with fast_pooling(net):
        for _ in range(5):
            local, _ = half.step(net, local, batch, noise, lr)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(STEPS):
                local, _ = half.step(net, local, batch, noise, lr)
    engine.close()
    found: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        kind = KINDS.get(event.key.removeprefix("aten::"), "everything else")
        found[kind] += event.self_cpu_time_total / 1000 / STEPS
    return dict(found)


def main() -> None:
    torch.set_num_threads(1)
    workload = WORKLOADS[sys.argv[1] if len(sys.argv) > 1 else "B"]
    data = workload.data()
    torch.manual_seed(0)
    precision = sys.argv[2] if len(sys.argv) > 2 else "float32"
    net = Network(workload.model(), data.x[:1], precision=precision)
    methods = (FedAvg(), with_warmup(FedAvg(), 10**9))
    turns = [
        [milliseconds(net, method, data, workload.schedule, workload.lr) for method in methods]
        for _ in range(TURNS)
    ]
    plain, warm = (min(found, key=lambda times: sum(times.values())) for found in zip(*turns, strict=True))
    print(
        f"{workload.what}; {precision}; milliseconds a step on one core, profiler included, the best of {TURNS}"
    )
    print("| kernels | plain step | warmup step |\n|---|---|---|")
    for kind in sorted({*plain, *warm}, key=lambda kind: -plain.get(kind, 0.0)):
        print(f"| {kind} | {plain.get(kind, 0.0):.1f} | {warm.get(kind, 0.0):.1f} |")
    print(f"| together | {sum(plain.values()):.1f} | {sum(warm.values()):.1f} |")


if __name__ == "__main__":
    main()
