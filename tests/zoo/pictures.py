"""Image models of torchvision, timm and vit-pytorch."""

from __future__ import annotations

import importlib
from typing import Any

from collection import Animal, image, import_torchvision
from torch import Tensor, nn


def torchvision(name: str, size: int = 32, slow: bool = False, **options: Any) -> Animal:
    def build() -> tuple[nn.Module, Tensor]:
        import_torchvision()
        from torchvision import models

        if name[0].isupper():
            return getattr(models, name)(**options), image(size)()
        return models.get_model(name, weights=None, num_classes=5, **options), image(size)()

    return Animal("torchvision", name, build, slow)


def timm(name: str, size: int = 32, slow: bool = False, refused: str = "", **options: Any) -> Animal:
    def build() -> tuple[nn.Module, Tensor]:
        import_torchvision()
        from timm import create_model

        return create_model(name, pretrained=False, num_classes=5, **options), image(size)()

    return Animal("timm", name, build, slow, refused)


def mixer(block: str, **more: Any) -> Animal:
    def build() -> tuple[nn.Module, Tensor]:
        import_torchvision()
        from timm.models import mlp_mixer

        kind = getattr(mlp_mixer, block)
        options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
        return mlp_mixer.MlpMixer(num_classes=5, block_layer=kind, **options, **more), image(32)()

    return Animal("timm", f"MlpMixer of {block}", build)


def vit(module: str, kind: str, size: int = 32, slow: bool = False, **options: Any) -> Animal:
    def build() -> tuple[nn.Module, Tensor]:
        import_torchvision()
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**options), image(size)()

    return Animal("vit_pytorch", kind, build, slow)


TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SMALL: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64,
}  # fmt: skip
HEADS = SMALL | {"dim_head": 8}
WINDOWS: dict[str, Any] = {"depths": [1, 1], "num_heads": [2, 4]}

ANIMALS = [
    torchvision("squeezenet1_1"),
    torchvision("resnet18", slow=True),
    torchvision("resnext50_32x4d", slow=True),
    torchvision("densenet121", slow=True),
    torchvision("mobilenet_v2", slow=True),
    torchvision("mobilenet_v3_small", slow=True),
    torchvision("mnasnet0_5", slow=True),
    torchvision("efficientnet_b0", slow=True),
    torchvision("shufflenet_v2_x0_5", slow=True),
    torchvision("regnet_y_400mf", slow=True),
    torchvision("convnext_tiny", slow=True),
    torchvision("googlenet", 64, slow=True, init_weights=False),
    torchvision("inception_v3", 96, slow=True, init_weights=False, aux_logits=False),
    torchvision("deeplabv3_resnet50", slow=True, weights_backbone=None),
    torchvision("lraspp_mobilenet_v3_large", slow=True, weights_backbone=None),
    torchvision(
        "VisionTransformer",
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=128,
        num_classes=5,
    ),
    torchvision(
        "SwinTransformer", patch_size=[4, 4], embed_dim=16, window_size=[4, 4], num_classes=5, **WINDOWS
    ),
    timm("resnet10t", slow=True),
    timm("efficientnet_lite0", slow=True),
    timm("regnetx_002", slow=True),
    timm("mixnet_s", slow=True),
    timm("ghostnet_050", slow=True),
    timm("repvgg_a0", slow=True),
    timm("mobileone_s0", slow=True),
    timm("hardcorenas_a", slow=True),
    timm("dla34", slow=True),
    timm("lcnet_035", slow=True),
    timm("edgenext_xx_small", 64, slow=True),
    timm("convnext_atto", slow=True),
    timm("convnextv2_atto", slow=True, refused="a response norm over all channels in every block"),
    timm("vit_tiny_patch16_224", **TINY),
    timm("deit3_small_patch16_224", **TINY),
    timm("eva02_tiny_patch14_224", **TINY),
    timm("beit_base_patch16_224", **TINY),
    timm("cait_xxs24_224", **TINY),
    timm("xcit_nano_12_p16_224", embed_dim=32, depth=2, num_heads=4),
    timm(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(1, 1),
        num_heads=(2, 4),
    ),
    mixer("MixerBlock"),
    mixer("ResBlock", mlp_ratio=4),
    vit("vit", "ViT", **HEADS),
    vit("simple_vit", "SimpleViT", **HEADS),
    vit("deepvit", "DeepViT", **HEADS),
    vit("cait", "CaiT", **HEADS, cls_depth=1),
    vit("xcit", "XCiT", **HEADS, cls_depth=1),
    vit("cct", "CCT", img_size=32, embedding_dim=32, num_layers=2, num_heads=4, mlp_ratio=2.0, num_classes=5),
    vit(
        "cvt",
        "CvT",
        num_classes=5,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=32,
        s1_depth=1,
        s2_depth=1,
        s3_depth=1,
    ),
    vit("pit", "PiT", image_size=32, patch_size=8, dim=32, num_classes=5, depth=(1, 1), heads=4, mlp_dim=64),
    vit(
        "levit",
        "LeViT",
        image_size=32,
        num_classes=5,
        dim=(16, 24),
        depth=1,
        heads=(2, 3),
        mlp_mult=2,
        stages=2,
        dim_key=8,
        dim_value=8,
    ),
    vit(
        "nest",
        "NesT",
        image_size=32,
        patch_size=4,
        dim=16,
        heads=4,
        num_hierarchies=2,
        block_repeats=(1, 1),
        num_classes=5,
    ),
    vit(
        "max_vit",
        "MaxViT",
        64,
        slow=True,
        num_classes=5,
        dim_conv_stem=8,
        dim=8,
        dim_head=4,
        depth=(1, 1),
        window_size=4,
    ),
    vit(
        "mobile_vit",
        "MobileViT",
        64,
        slow=True,
        image_size=(64, 64),
        dims=[16, 20, 24],
        num_classes=5,
        channels=[8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 40],
    ),
    vit(
        "twins_svt",
        "TwinsSVT",
        64,
        slow=True,
        num_classes=5,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=24,
        s4_emb_dim=32,
        s1_local_patch_size=4,
        s2_local_patch_size=4,
        s3_local_patch_size=2,
        s4_local_patch_size=1,
        s1_global_k=4,
        s2_global_k=4,
        s3_global_k=2,
        s4_global_k=1,
        s3_depth=1,
    ),
]
