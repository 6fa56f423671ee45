"""Hidden neurons of any model: which parameters each one owns, gates, masks and smaller networks."""

from fedpews.neurons.channels import slice_module
from fedpews.neurons.graph import Axis, Hidden, Layer, NeuronGraph
from fedpews.neurons.trace import trace, verify

__all__ = ["Axis", "Hidden", "Layer", "NeuronGraph", "slice_module", "trace", "verify"]
