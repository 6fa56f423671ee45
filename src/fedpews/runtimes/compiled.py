"""The fast engine for small models: many clients in lockstep, each step one call of machine code."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedpews.data.federation import Federation
from fedpews.methods.contract import Client, Nest, Work
from fedpews.neurons.network import Network
from fedpews.runtimes.batches import client_seed, draw_batches, draw_noise
from fedpews.runtimes.eager import mean_loss
from fedpews.runtimes.evaluate import Score, score_models
from fedpews.runtimes.job import Done, Engine, Job, Schedule
from fedpews.runtimes.native import Native, load
from fedpews.runtimes.program import CannotCompile, Program, Sheet, check_padding, trace_step
from fedpews.trees import Tree


@dataclass(frozen=True)
class Lane:
    """One job, with all its draws made."""

    job: Job
    local: Nest
    rows: list[Tensor]  # per step
    noise: Tensor  # (steps + 1, numbers)


@dataclass(frozen=True)
class Compiled:
    """A program that is ready to run, and what it was made for."""

    half: Client
    shapes: list[tuple[torch.Size, torch.dtype]]
    program: Program
    native: Native


class CompiledEngine(Engine):
    """Jobs of one kind run in lockstep, ``lanes`` at a time: their states are stacked and a step is one call.

    A lane's numbers do not depend on its neighbours, so neither the number of workers nor the mix of seeds
    and clients changes a result. A single lane would (torch multiplies a batch of one matrix by another
    routine), so there are always two or more.

    Raises:
        CannotCompile: from the constructor or the first ``train``: this network or method needs the eager
            engine.
    """

    name = "compiled"

    def __init__(
        self, net: Network, data: Federation, schedule: Schedule, workers: int, lanes: int = 2
    ) -> None:
        if data.x.device.type != "cpu":
            raise CannotCompile(f"the data are on {data.x.device}; compiled steps run on the CPU")
        if net.is_stochastic:
            raise CannotCompile("the model is stochastic (dropout), and compiled steps draw no numbers")
        self.net, self.data, self.schedule = net, data, schedule
        self.workers, self.lanes = workers, max(lanes, 2)
        self._programs: list[Compiled] = []
        self._pool = ThreadPoolExecutor(workers, "lanes", initializer=torch.set_num_threads, initargs=(1,))

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        lanes = list(self._pool.map(self._start, jobs))
        programs = [self._compiled(lane) for lane in lanes]
        groups: list[tuple[Compiled, list[int]]] = []
        for compiled in self._programs:
            members = [i for i, program in enumerate(programs) if program is compiled]
            # long jobs together: a group takes as many steps as its longest
            members.sort(key=lambda i: -len(lanes[i].rows))
            groups += [(compiled, members[i : i + self.lanes]) for i in range(0, len(members), self.lanes)]
        done = list(self._pool.map(lambda group: self._run(group[0], [lanes[i] for i in group[1]]), groups))
        order = {
            i: result
            for (_, members), results in zip(groups, done, strict=True)
            for i, result in zip(members, results, strict=True)
        }
        return [order[i] for i in range(len(jobs))]

    def evaluate(self, models: Sequence[Tree]) -> list[Score]:
        return score_models(self.net, models, self.data, self._pool)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _start(self, job: Job) -> Lane:
        rows = self.data.clients[job.client]
        names = (job.seed, job.download.round, job.client)
        batches = draw_batches(len(rows), self.schedule, client_seed(*names, "batches"))
        noise = draw_noise(len(batches) + 1, job.half.noise_size(self.net), client_seed(*names, "noise"))
        local = job.half.start(self.net, job.download, job.memory)
        return Lane(job, local, [rows[batch] for batch in batches], noise)

    def _compiled(self, lane: Lane) -> Compiled:
        """The program for a lane's kind of job, made when it is the first of its kind."""
        leaves, spec = tree_flatten(lane.local)
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        half, data = lane.job.half, self.data
        for known in self._programs:
            if known.half == half and known.program.spec == spec and known.shapes == shapes:
                return known
        chosen = lane.rows[0]
        check_padding(self.net, half, lane.local, data.x[chosen], data.y[chosen], lane.noise[0], lane.job.lr)
        program = trace_step(self.net, half, lane.local, self.lanes, self.schedule.batch_size, data.x, data.y)
        sheet = Sheet.blank(3, self.lanes, self.schedule.batch_size, lane.noise.shape[1])
        stacked = [torch.stack([leaf] * self.lanes) for leaf in leaves]
        native = load(program, sheet, data.x, data.y, stacked, self.workers)
        self._programs.append(Compiled(half, shapes, program, native))
        return self._programs[-1]

    def _run(self, compiled: Compiled, lanes: list[Lane]) -> list[Done]:
        """All steps of a group of lanes."""
        filled = lanes + lanes[-1:] * (self.lanes - len(lanes))  # idle lanes repeat a state and take no step
        steps = max(len(lane.rows) for lane in lanes)
        sheet = Sheet.blank(steps, self.lanes, self.schedule.batch_size, lanes[0].noise.shape[1])
        for i, lane in enumerate(filled):
            fill_lane(sheet, i, lane, idle=i >= len(lanes))
        leaves = [tree_flatten(lane.local)[0] for lane in filled]
        state = [torch.stack(values) for values in zip(*leaves, strict=True)]
        compiled.native.run(steps, sheet, [self.data.x, self.data.y, *state, *compiled.program.constants])
        return [
            self._finish(
                lane, tree_unflatten([leaf[i] for leaf in state], compiled.program.spec), sheet.losses[:, i]
            )
            for i, lane in enumerate(lanes)
        ]

    def _finish(self, lane: Lane, local: Nest, losses: Tensor) -> Done:
        job, steps = lane.job, len(lane.rows)
        samples = len(self.data.clients[job.client])
        work = Work(job.client, samples, steps, job.lr, mean_loss(job, losses[:steps]), lane.noise[-1])
        memory, upload = job.half.finish(self.net, job.download, local, work)
        return Done(job.seed, job.client, memory, upload)


def fill_lane(sheet: Sheet, i: int, lane: Lane, *, idle: bool) -> None:
    """Write a lane's batches and numbers on the sheet; what is left of a batch or of the steps has weight 0."""
    size, steps = sheet.rows.shape[2], len(lane.rows)
    sheet.rows[:, i] = lane.rows[0][0]  # padding reads one of the client's own samples
    sheet.lr[i] = lane.job.lr
    if idle:
        return
    sheet.noise[:steps, i] = lane.noise[:-1]
    full = [len(rows) == size for rows in lane.rows]
    if all(full):
        sheet.rows[:steps, i] = torch.stack(lane.rows)
        sheet.weight[:steps, i] = 1
        return
    for step, rows in enumerate(lane.rows):
        sheet.rows[step, i, : len(rows)] = rows
        sheet.weight[step, i, : len(rows)] = 1
