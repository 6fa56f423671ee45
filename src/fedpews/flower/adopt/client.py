"""The warmup for a Flower app that has its own training loop: the client's half."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fedpews.flower.adopt.owned import pack_sides, select
from fedpews.flower.adopt.strategy import ABOUT, HIDDEN, NEURONS, OTHERS, OWNED, THETA
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.trace import trace
from fedpews.results.files import write_atomically
from fedpews.seeds import fold
from fedpews.warmup.masks import Learned, contiguous

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

    After the warmup it does nothing but call the model and the optimiser. The scores are kept in ``context.state``,
    which a restart of the SuperNode empties, and in ``keep``, which it does not.

    Args:
        example: a batch of one input, to find the model's neurons with.
        graph: the neurons of a model that cannot be traced.
        keep: a file of this site's own for the scores; by default in the ``state-dir`` of its ``--node-config``.
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
        self._masks = Learned(
            diversity=float(about["diversity"]), mask_lr=float(about["mask-lr"]), gradient=about["gradient"]
        )
        self._device = next(model.parameters()).device
        self._graph = graph or trace(copy.deepcopy(model).cpu(), example.detach().cpu())
        self._thresholded = about["upload-mask"] == "thresholded"
        site = int(context.node_config.get("partition-id", context.node_id))
        self._keep = keep or _default_place(context.node_config, site)
        kept = _read(context.state, SCORES, HIDDEN)
        if kept is None and self._keep is not None and self._keep.exists():
            kept = torch.from_numpy(np.load(self._keep, allow_pickle=False))
        self.scores = (self._start(about, site) if kept is None else kept).to(self._device)
        others = _read(message.content, OTHERS, NEURONS)
        self._others = None if others is None else others.to(self._device)
        self._fixed: Tensor | None = None
        if "place" in about:
            place, total = int(about["place"]), int(about["total"])
            self._fixed = contiguous(self._graph, place, total).to(self._device)
        # the numbers are drawn on the CPU, the same wherever the model is
        self._random = torch.Generator().manual_seed(fold(site, int(about["round"]), "gates"))
        self._gates = torch.ones(self._graph.size, device=self._device)
        self._before: dict[str, Tensor] = {}

    @property
    def theta(self) -> Tensor:
        """θ, by which each neuron is drawn; 0 or 1 where the server assigned them."""
        return torch.sigmoid(self.scores) if self._fixed is None else self._fixed.to(self.scores.dtype)

    def learn(self, criterion: Callable[..., Tensor], inputs: Tensor, *targets: Any) -> None:
        """One step of the scores, see `Learned.step`; weights and buffers stay as they are."""
        if not self.active or self._fixed is not None:
            return
        gates = self._draw().requires_grad_()
        kept = {name: value.clone() for name, value in self.model.named_buffers()}
        weights = {name: value.detach() for name, value in self.model.named_parameters()}
        outputs = functional_call(self.model, self._graph.gate(weights, gates) | kept, (inputs,))
        loss = criterion(outputs, *targets)
        (slope,) = torch.autograd.grad(loss, gates)
        self.scores = self._masks.step(self.scores, slope, gates.detach(), self._others)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The model's outputs with only a fresh draw of neurons open; after the warmup, with all."""
        if not self.active:
            outputs: Tensor = self.model(*inputs)
            return outputs
        self._gates = self._draw()
        self._before = {name: value.clone() for name, value in self.model.named_buffers()}
        gated = self._graph.gate(dict(self.model.named_parameters()), self._gates)
        return functional_call(self.model, gated, inputs)  # type: ignore[no-any-return]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser's step, after which nothing that belongs to a closed neuron has changed."""
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
        """What to send: in the warmup only the elements of the neurons to upload, which they are, and θ."""
        values = {name: value.detach().cpu().numpy() for name, value in self.model.state_dict().items()}
        records: dict[str, Any] = {"metrics": MetricRecord(dict(metrics))}
        if not self.active:
            records["arrays"] = _record(values)
        else:
            neurons = self.theta >= 0.5 if self._thresholded else self._draw().bool()
            sides = {
                name: {axis.dim: _side(neurons.cpu(), axis.neurons.cpu()) for axis in axes}
                for name, axes in self._graph.axes.items()
                if name in values
            }
            records |= {
                OWNED: _record(select(values, sides)),
                NEURONS: _record(pack_sides(sides)),
                THETA: _record({HIDDEN: self.theta.cpu().numpy()}),
            }
            self._context.state[SCORES] = _record({HIDDEN: self.scores.cpu().numpy()})
            if self._keep is not None:
                _write(self._keep, self.scores.cpu().numpy())
        return Message(RecordDict(records), reply_to=self._message)

    def _start(self, about: Any, site: int) -> Tensor:
        random = torch.Generator().manual_seed(fold(0, site, "scores"))
        noise = torch.randn(self._graph.size, generator=random)
        return float(about["start"]) + float(about["start-spread"]) * noise

    def _draw(self) -> Tensor:
        theta = self.theta
        return (torch.rand(theta.shape, generator=self._random).to(theta.device) < theta).to(theta.dtype)


def _side(neurons: Tensor, owners: Tensor) -> Any:
    """Which positions of one dimension are owned; one that belongs to no neuron (−1) always is."""
    return torch.cat([neurons, torch.ones(1, dtype=torch.bool)])[owners].numpy()


def _slots(optimizer: torch.optim.Optimizer, value: Tensor) -> dict[str, Tensor]:
    """What the optimiser remembers of each element: momentum, moments."""
    state = optimizer.state.get(value, {})
    return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and v.shape == value.shape}


def _default_place(settings: Mapping[str, Any], site: int) -> Path | None:
    folder = settings.get("state-dir")
    return None if folder is None else Path(str(folder)).expanduser() / f"warmup-scores-{site}.npy"


def _write(path: Path, scores: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, scores, allow_pickle=False)
    write_atomically(path, buffer.getvalue())


def _record(values: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def _read(content: RecordDict, key: str, name: str) -> Tensor | None:
    record = content.get(key)
    return torch.from_numpy(record[name].numpy().copy()) if isinstance(record, ArrayRecord) else None
