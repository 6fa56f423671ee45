"""The warmup for a Flower app that has its own training loop: the client's half."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.func import functional_call

from fedpews.flower.with_warmup import ABOUT, HIDDEN, NEURONS, OTHERS, OWNED, OWNERSHIP, SENT, THETA
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.trace import trace
from fedpews.results.files import write_atomically
from fedpews.seeds import fold
from fedpews.warmup.masks import Learned, contiguous, draw_starts
from fedpews.warmup.warmup import step_scores

SCORES = "fedpews-scores"


class LocalWarmup:
    """Stands in for the model, the optimiser's step and the reply in a hand-written training loop.

    ::

        warmup = LocalWarmup(message, context, model, example=images[:1])
        for images, labels in loader:
            warmup.learn(criterion, images, labels)           # new: which neurons are mine
            optimizer.zero_grad()
            loss = criterion(warmup(images), labels)          # instead of model(images)
            loss.backward()
            warmup.step(optimizer)                            # instead of optimizer.step()
        return warmup.reply({"num-examples": len(dataset)})   # instead of building the message

    After the warmup it only calls the model and the optimiser. The scores are kept in ``context.state``, which is empty
    after a restart of the SuperNode, and in the file ``keep``, which survives it.

    Args:
        example: a batch of one input, to trace the model's neurons with.
        graph: the neurons of a model that cannot be traced.
        keep: a file for this site's scores; by default in the ``state-dir`` of its ``--node-config``.
    """

    def __init__(
        self,
        message: Message,
        context: Context,
        model: nn.Module,
        example: Tensor,
        graph: NeuronGraph | None = None,
        keep: Path | None = None,
    ) -> None:
        self.model, self._message, self._context = model, message, context
        about: Any = message.content.get(ABOUT)
        self.active = about is not None
        if not self.active:
            return
        self._masks = Learned(**{name: about[name] for name in SENT})
        self._device = next(model.parameters()).device
        self._graph = graph or trace(copy.deepcopy(model).cpu(), example.detach().cpu())
        site = int(context.node_config.get("partition-id", context.node_id))
        state_dir = context.node_config.get("state-dir")
        if keep is None and state_dir is not None:
            keep = Path(str(state_dir)).expanduser() / f"warmup-scores-{site}.safetensors"
        self._keep = keep
        scores = _read(context.state, SCORES, HIDDEN)
        if scores is None and keep is not None and keep.exists():
            scores = load(keep.read_bytes())[HIDDEN]
        if scores is None:
            (scores,) = draw_starts(self._masks, self._graph.size, [site], seed=0)
        self.scores = scores.to(self._device)
        others = _read(message.content, OTHERS, NEURONS)
        self._others = None if others is None else others.to(self._device)
        self._fixed: Tensor | None = None
        if "group" in about:
            group, total = int(about["group"]), int(about["total"])
            self._fixed = contiguous(self._graph, group, total).to(self._device)
        # the numbers are drawn on the CPU, so they are the same on every device
        self._random = torch.Generator().manual_seed(fold(site, int(about["round"]), "gates"))
        self._gates = torch.ones(self._graph.size, device=self._device)
        self._before: dict[str, Tensor] = {}

    @property
    def theta(self) -> Tensor:
        """θ, by which each neuron is drawn; 0 or 1 if the server assigned the neurons."""
        return torch.sigmoid(self.scores) if self._fixed is None else self._fixed.to(self.scores.dtype)

    def learn(self, criterion: Callable[..., Tensor], inputs: Tensor, *targets: Any) -> None:
        """Take one step of the scores, see `step_scores`; weights and buffers do not change."""
        if not self.active or self._fixed is not None:
            return
        gates = self._draw().requires_grad_()
        kept = {name: value.clone() for name, value in self.model.named_buffers()}
        weights = {name: value.detach() for name, value in self.model.named_parameters()}
        outputs = functional_call(self.model, self._graph.gate(weights, gates) | kept, (inputs,))
        loss = criterion(outputs, *targets)
        (slope,) = torch.autograd.grad(loss, gates)
        self.scores = step_scores(self._masks, self.scores, slope, gates.detach(), self._others)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The model's outputs with only the neurons of a new draw open; after the warmup, with all."""
        if not self.active:
            outputs: Tensor = self.model(*inputs)
            return outputs
        self._gates = self._draw()
        self._before = {name: value.clone() for name, value in self.model.named_buffers()}
        gated = self._graph.gate(dict(self.model.named_parameters()), self._gates)
        return functional_call(self.model, gated, inputs)  # type: ignore[no-any-return]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimiser's step without a change of anything that belongs to a closed neuron."""
        if not self.active:
            optimizer.step()
            return
        open_ = self._graph.expand(self._gates.bool())
        params = {name: value for name, value in self.model.named_parameters() if name in open_}
        before = {name: value.detach().clone() for name, value in params.items()}
        slots = {name: _slots(optimizer, value) for name, value in params.items()}
        optimizer.step()
        with torch.no_grad():
            for name, value in params.items():
                value.copy_(torch.where(open_[name], value, before[name]))
                for key, slot in slots[name].items():
                    now = optimizer.state[value][key]
                    now.copy_(torch.where(open_[name], now, slot))
            for name, buffer in self.model.named_buffers():
                if name in open_:
                    buffer.copy_(torch.where(open_[name], buffer, self._before[name]))

    def reply(self, metrics: Mapping[str, Any]) -> Message:
        """The reply: in the warmup only the elements of the neurons to upload, their mask, and θ."""
        values = {name: value.detach().cpu().numpy() for name, value in self.model.state_dict().items()}
        records: dict[str, Any] = {"metrics": MetricRecord(dict(metrics))}
        if not self.active:
            records["arrays"] = _record(values)
        else:
            is_drawn = self._masks.upload_mask == "drawn"
            neurons = self._draw().bool() if is_drawn else self.theta >= 0.5
            owned = self._graph.expand(neurons.cpu())
            masks = {
                name: mask.expand(values[name].shape).numpy()
                for name, mask in owned.items()
                if name in values
            }
            sent = {name: value[masks[name]] if name in masks else value for name, value in values.items()}
            records |= {
                OWNED: _record(sent),
                OWNERSHIP: _record({name: np.packbits(mask) for name, mask in masks.items()}),
                THETA: _record({HIDDEN: self.theta.cpu().numpy()}),
            }
            self._context.state[SCORES] = _record({HIDDEN: self.scores.cpu().numpy()})
            if self._keep is not None:
                self._keep.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._keep, save({HIDDEN: self.scores.cpu()}))
        return Message(RecordDict(records), reply_to=self._message)

    def _draw(self) -> Tensor:
        theta = self.theta
        return (torch.rand(theta.shape, generator=self._random).to(theta.device) < theta).to(theta.dtype)


def _slots(optimizer: torch.optim.Optimizer, value: Tensor) -> dict[str, Tensor]:
    """The optimiser's state of each element: momentum, moments."""
    state = optimizer.state.get(value, {})
    return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and v.shape == value.shape}


def _record(values: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def _read(content: RecordDict, key: str, name: str) -> Tensor | None:
    record = content.get(key)
    return torch.from_numpy(record[name].numpy().copy()) if isinstance(record, ArrayRecord) else None
