"""Medical images (MONAI), transformers of all kinds (x-transformers) and graphs (PyTorch Geometric)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from collection import Animal, image, tokens
from torch import Tensor, nn

SLICE = image(32, 1)


def monai(kind: str, x: Callable[[], Tensor] = SLICE, slow: bool = False, **options: Any) -> Animal:
    def build() -> tuple[nn.Module, Tensor]:
        from monai.networks import nets

        return getattr(nets, kind)(**options), x()

    return Animal("monai", kind, build, slow)


def transformer(name: str, decoder: bool = True, **options: Any) -> Animal:
    def build() -> tuple[nn.Module, Tensor]:
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = (Decoder if decoder else Encoder)(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers), tokens()

    return Animal("x_transformers", name, build)


class OnRing(nn.Module):
    """A model of graphs, on a ring of ten nodes."""

    edges: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        ring = torch.arange(10)
        self.register_buffer("edges", torch.stack([ring, (ring + 1) % 10]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.stack([self.inner(nodes, self.edges) for nodes in x])
        return out


def geometric(kind: str, **options: Any) -> Animal:
    def build() -> tuple[nn.Module, Tensor]:
        from torch_geometric.nn import models

        return OnRing(getattr(models, kind)(6, 16, 2, 4, **options)), torch.randn(2, 10, 6)

    return Animal("torch_geometric", kind, build)


FLAT: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
LEVELS: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2)}
ENDS: dict[str, Any] = {"in_shape": (1, 32, 32), "channels": (8, 16), "strides": (2, 2)}
ATTENTION: dict[str, Any] = {
    "hidden_size": 32,
    "mlp_dim": 64,
    "num_heads": 4,
    "img_size": 32,
    "in_channels": 1,
}

ANIMALS = [
    monai("UNet", **FLAT, **LEVELS, num_res_units=2),
    monai("AttentionUnet", **FLAT, **LEVELS),
    monai("BasicUNet", **FLAT, features=(8, 8, 16, 16, 32, 8)),
    monai("SegResNet", **FLAT, init_filters=8),
    monai("VNet", slow=True, **FLAT),
    monai(
        "DynUNet",
        **FLAT,
        kernel_size=[3] * 3,
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
    ),
    monai("HighResNet", slow=True, **FLAT),
    monai("Classifier", **ENDS, classes=5),
    monai("Regressor", **ENDS, out_shape=(5,)),
    monai("ViT", **ATTENTION, patch_size=8, num_layers=2, spatial_dims=2, classification=True),
    monai("UNETR", slow=True, **ATTENTION, out_channels=2, feature_size=8, spatial_dims=2),
    monai(
        "SwinUNETR", image(64, 1), slow=True, in_channels=1, out_channels=2, feature_size=12, spatial_dims=2
    ),
    monai("SEResNet50", image(64), slow=True, spatial_dims=2, in_channels=3, num_classes=5),
    monai(
        "EfficientNetBN", image(32), slow=True, model_name="efficientnet-b0", pretrained=False, num_classes=5
    ),
    monai(
        "DenseNet121",
        lambda: torch.randn(2, 1, 32, 32, 32),
        slow=True,
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
    ),
    transformer("encoder", decoder=False),
    transformer("decoder"),
    transformer("SwiGLU", ff_glu=True, ff_swish=True, rotary_pos_emb=True, use_rmsnorm=True),
    transformer("grouped queries", attn_kv_heads=2, attn_qk_norm=True),
    transformer("talking heads", decoder=False, attn_pre_talking_heads=True, attn_post_talking_heads=True),
    transformer("ALiBi, sandwich", decoder=False, alibi_pos_bias=True, sandwich_coef=1),
    geometric("GCN"),
    geometric("GraphSAGE"),
    geometric("GIN"),
    geometric("GAT", heads=2),
    geometric("EdgeCNN"),
]
