"""Hidden neurons of any model: which parameters each one owns, gates, masks and smaller networks."""

from fedpews.neurons.graph import Axis, NeuronGraph, slice_module
from fedpews.neurons.layers import Hidden, Layer
from fedpews.neurons.network import Batch, Network
from fedpews.neurons.trace import trace
from fedpews.neurons.verify import verify

__all__ = ["Axis", "Batch", "Hidden", "Layer", "Network", "NeuronGraph", "slice_module", "trace", "verify"]
