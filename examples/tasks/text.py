"""Text: reviews as padded tokens, with a bag of words and with a small transformer.

python text.py
"""

import torch
from torch import Tensor, nn

import fedpews

WORDS, LENGTH, PADDING = 60, 12, 0


class Bag(nn.Module):
    """The mean embedding of the words, and two layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.hidden = nn.Linear(width, 32)
        self.classes = nn.Linear(32, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].float()
        mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1).clamp_min(1)
        out: Tensor = self.classes(self.hidden(mean).relu())
        return out


class Transformer(nn.Module):
    """One attention block; like many models it returns a dict with ``logits``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.attention = nn.MultiheadAttention(width, num_heads=2, batch_first=True)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.classes = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        seen = self.before(x)
        x = x + self.attention(seen, seen, seen, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        x = x + self.narrow(self.wide(self.after(x)).relu())
        mask = attention_mask[..., None].float()
        return {"logits": self.classes((x * mask).sum(1) / mask.sum(1))}


def shop(seed: int, words: range, samples: int) -> tuple[dict[str, Tensor], Tensor]:
    """Reviews in a shop's own words; an even word votes for label 0, an odd word for label 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(words.start, words.stop, (samples, LENGTH), generator=generator)
    y = torch.randint(0, 2, (samples,), generator=generator)
    # two words in three agree with the label
    agrees = torch.rand(samples, LENGTH, generator=generator) < 0.67
    ids = ids - ids % 2 + torch.where(agrees, y[:, None], 1 - y[:, None])
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids * mask + PADDING * (1 - mask), "attention_mask": mask}, y


CLIENTS = [
    {"train": shop(0, range(2, 30), 160), "test": shop(1, range(2, 30), 80)},
    {"train": shop(2, range(30, 58), 160), "test": shop(3, range(30, 58), 80)},
]


def main(rounds: int = 20) -> None:
    for model in (Bag, Transformer):
        for method in ("fedavg", "fedavg+pews"):
            result = fedpews.run(
                clients=CLIENTS,
                model=model,
                metrics=["accuracy", "calibration_error"],
                method=method,
                rounds=rounds,
                train={"lr": 0.5, "batch_size": 16},
                warmup={"rounds": rounds // 4} if method.endswith("pews") else {},
            )
            final = result.summary["final"]
            print(
                f"{model.__name__:12} {method:12} accuracy {final['accuracy']['mean']:.3f}  "
                f"calibration error {final['calibration_error']['mean']:.3f}"
            )


if __name__ == "__main__":
    main()
