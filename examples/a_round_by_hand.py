"""FedPeWS by hand: every step of Algorithm 1, with the public API only.

Run it: python examples/a_round_by_hand.py
"""

import torch
from torch import nn

import fedpews

torch.manual_seed(0)
W, T, lr = 10, 30, 0.1
x = torch.randn(2000, 8)
y = (x[:, 0] > 0).long() * 2 + (x[:, 1] * x[:, 2] > 0).long()
clients = [(x[y < 2], y[y < 2]), (x[y >= 2], y[y >= 2])]  # no class in common

net = fedpews.Network(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), x[:1])
method = fedpews.method("fedavg+pews", warmup={"rounds": W, "diversity": 2.0})
state = method.init(net, net.initial(), total=len(clients))  # x_g and the clients' θ
memories = {}  # each client's private memory: its mask scores s_i

for t in range(1, T + 1):
    cohort = fedpews.Cohort(t, clients=(0, 1), total=len(clients), seed=t)
    half = method.client(method.phase(state, t))  # warmup: masks and subnetworks; then the whole network
    uploads = []
    for i, download in zip(cohort.clients, method.downloads(net, state, cohort), strict=True):
        inputs, labels = clients[i]
        batches = torch.randperm(len(labels)).split(32)
        noise = torch.rand(len(batches) + 1, half.noise_size(net))  # the random numbers of all mask draws
        local, losses = half.start(net, download, memories.get(i)), []
        for rows, numbers in zip(batches, noise[:-1], strict=True):
            # in the warmup: a step of the scores s_i, then a step of the weights under a drawn mask
            local, loss = half.step(net, local, fedpews.Batch(inputs[rows], labels[rows]), numbers, lr)
            losses.append(float(loss))
        work = fedpews.Work(i, len(labels), len(batches), lr, sum(losses) / len(losses), noise[-1])
        memories[i], upload = half.finish(net, download, local, work)
        uploads.append(upload)
    # each element is averaged over the clients that own it
    average = fedpews.Average((1.0, 1.0), tuple(upload.ownership(net) for upload in uploads))
    state = method.update(net, state, uploads, average)
    right = net.predict(method.params(state), x).argmax(1) == y
    phase = "full" if uploads[0].neurons is None else "warmup"
    print(f"round {t:2} {phase:6} {right.float().mean():.3f}")
