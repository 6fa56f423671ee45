"""Hugging Face's transformers, from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from collection import Animal, Build, image, import_torchvision, tokens
from torch import Tensor, nn


class Logits(nn.Module):
    """A model that returns its logits, or its last hidden state, as a plain tensor."""

    def __init__(self, inner: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: Tensor) -> Tensor:
        name = self.inner.main_input_name if x.is_floating_point() else "input_ids"
        out = self.inner(**{name: x}, **self.options)
        logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
        return logits


def build(kind: str, x: Callable[[], Tensor], call: dict[str, Any], config: dict[str, Any]) -> Build:
    def built() -> tuple[nn.Module, Tensor]:
        import_torchvision()
        import transformers

        transformers.logging.set_verbosity_error()
        model = getattr(transformers, kind)
        return Logits(model(model.config_class(**config)), call), x()

    return built


def text(kind: str, **config: Any) -> Animal:
    kind = kind if kind[-5:] in {"Model"} else f"{kind}ForSequenceClassification"
    return Animal("transformers", kind, build(kind, tokens, {}, config))


def causal(kind: str, slow: bool = False, **config: Any) -> Animal:
    name = kind if kind.endswith("Model") else f"{kind}ForCausalLM"
    return Animal("transformers", name, build(name, tokens, {"use_cache": False}, config), slow)


def picture(kind: str, size: int = 16, slow: bool = False, refused: str = "", **config: Any) -> Animal:
    kind = f"{kind}ForImageClassification"
    return Animal("transformers", kind, build(kind, image(size), {}, config), slow, refused)


SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = SMALL | {"vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LANGUAGE = TEXT | ENDS | {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False}
PICTURE = SMALL | {"image_size": 16, "patch_size": 4}
T5: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
GPT: dict[str, Any] = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32} | ENDS
STAGES: dict[str, Any] = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]}

ANIMALS = [
    text("Bert", **TEXT),
    text("Roberta", **TEXT),
    text("Electra", **TEXT, embedding_size=16),
    text("Ernie", **TEXT),
    text("MegatronBert", **TEXT),
    text("Albert", **TEXT, embedding_size=8),
    text("MobileBert", **TEXT, embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16),
    text("SqueezeBert", **TEXT, embedding_size=16),
    text("Deberta", **TEXT),
    text("DebertaV2", **TEXT),
    text("MPNet", **TEXT),
    text("ConvBert", **TEXT, embedding_size=16),
    text("FNet", **TEXT),
    text("Nystromformer", **TEXT, segment_means_seq_len=8, num_landmarks=4),
    text("Longformer", **TEXT, attention_window=4),
    text("ModernBert", **TEXT, **ENDS, cls_token_id=1, sep_token_id=2),
    text("Funnel", vocab_size=50, d_model=16, n_head=4, d_head=4, d_inner=32, block_sizes=[1, 1]),
    text(
        "DistilBert", vocab_size=50, dim=16, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32
    ),
    text("T5EncoderModel", **T5),
    text("MT5EncoderModel", **T5),
    causal("GPT2LMHeadModel", **GPT),
    causal("GPTJ", **GPT, rotary_dim=4),
    causal("GPTNeoX", **TEXT),
    causal(
        "GPTNeo",
        **ENDS,
        vocab_size=50,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=32,
    ),
    causal(
        "OPT",
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=32,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    ),
    causal("Bloom", vocab_size=50, hidden_size=16, n_layer=2, n_head=4),
    causal("Falcon", vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4),
    causal("Llama", **LANGUAGE),
    causal("Mistral", **LANGUAGE),
    causal("Qwen2", **LANGUAGE),
    causal("Qwen3", **LANGUAGE),
    causal("Gemma2", **LANGUAGE),
    causal("Phi", **LANGUAGE),
    causal("Phi3", **LANGUAGE),
    causal("StableLm", **LANGUAGE),
    causal("Olmo", **LANGUAGE),
    causal("Cohere", **LANGUAGE),
    causal("Starcoder2", **LANGUAGE),
    causal("Mixtral", **LANGUAGE, num_local_experts=4, experts_implementation="eager"),
    causal("Mamba", vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4),
    causal(
        "Rwkv",
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        attention_hidden_size=16,
        context_length=32,
    ),
    picture("ViT", **PICTURE),
    picture("DeiT", **PICTURE),
    picture("Beit", **PICTURE),
    picture("Dinov2", **PICTURE),
    picture("ConvNext", 32, **STAGES),
    picture("ConvNextV2", 32, refused="a response norm over all channels in every block", **STAGES),
    picture("PoolFormer", 32, **STAGES),
    picture("ResNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    picture("RegNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    picture(
        "Swin", 32, image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=4
    ),
    picture(
        "Segformer",
        32,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        num_attention_heads=[2, 4],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    picture(
        "MobileViT", 64, slow=True, hidden_sizes=[16, 20, 24], neck_hidden_sizes=[8, 8, 12, 16, 20, 24, 40]
    ),
    Animal(
        "transformers",
        "Wav2Vec2ForSequenceClassification",
        build(
            "Wav2Vec2ForSequenceClassification",
            lambda: torch.randn(2, 800),
            {},
            SMALL
            | {
                "conv_dim": [8, 8],
                "conv_kernel": [10, 3],
                "conv_stride": [5, 2],
                "num_feat_extract_layers": 2,
                "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2,
                "classifier_proj_size": 8,
                "apply_spec_augment": False,
            },
        ),
    ),
    Animal(
        "transformers",
        "PatchTSTForClassification",
        build(
            "PatchTSTForClassification",
            lambda: torch.randn(2, 32, 3),
            {},
            {
                "num_input_channels": 3,
                "context_length": 32,
                "patch_length": 8,
                "patch_stride": 8,
                "d_model": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "ffn_dim": 32,
                "num_targets": 5,
                "use_cls_token": True,
            },
        ),
    ),
]
