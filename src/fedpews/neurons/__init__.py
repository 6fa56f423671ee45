"""Hidden neurons of any model: which parameters each one owns, gates, masks and smaller networks."""

from fedpews.neurons.by_hand import Hidden
from fedpews.neurons.graph import Axis, Layer, NeuronGraph
from fedpews.neurons.modules import slice_module
from fedpews.neurons.network import Batch, Network
from fedpews.neurons.trace import trace
from fedpews.neurons.verify import verify

__all__ = ["Axis", "Batch", "Hidden", "Layer", "Network", "NeuronGraph", "slice_module", "trace", "verify"]
