"""Train a small language model with `graphex.train_step`, save it half way, and go on from the checkpoint.

PYTHONPATH=. python examples/train.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import graphex

VOCABULARY, WIDTH, LENGTH, STEPS = 32, 64, 16, 40
device = "cuda" if torch.cuda.is_available() else "cpu"
random = torch.cuda if device == "cuda" else torch  # dropout draws on the device


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return self.head(self.layers(x, mask=mask, is_causal=True))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(number: int) -> torch.Tensor:
    """Sequences that count upwards from random numbers."""
    start = torch.randint(0, VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(number))
    return ((start + torch.arange(LENGTH)) % VOCABULARY).to(device)


def parts():
    torch.manual_seed(0)
    model = SmallGPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = graphex.train_step(model, next_token_loss, optimizer, scheduler=scheduler, clip_norm=1.0)
    return model, optimizer, scheduler, step


def main() -> None:
    checkpoint = Path(tempfile.mkdtemp()) / "half_way.pt"
    model, optimizer, scheduler, step = parts()
    for number in range(STEPS):
        tokens = batch(number)
        loss = step(tokens, tokens)
        if number % 10 == 0:
            print(f"step {number:3}: loss {loss.item():.3f}, rate {scheduler.get_last_lr()[0]:.2e}")
        if number == STEPS // 2:
            state = [each.state_dict() for each in (model, optimizer, scheduler)]
            torch.save((state, random.get_rng_state(), number), checkpoint)
    print(f"step {STEPS:3}: loss {loss.item():.3f}")

    model, optimizer, scheduler, step = parts()  # as a new process would
    state, generator, last = torch.load(checkpoint, weights_only=False)
    for each, saved in zip((model, optimizer, scheduler), state, strict=True):
        each.load_state_dict(saved)
    random.set_rng_state(generator)
    for number in range(last + 1, STEPS):
        tokens = batch(number)
        loss = step(tokens, tokens)
    print(f"from the checkpoint: loss {loss.item():.3f}")
    for record in step.journal.captures:
        print(f"captured as one device graph for {record.key} in {record.seconds:.2f} s")
    for record in step.journal.fallbacks:
        print(f"{record.what}: {record.reason}")


if __name__ == "__main__":
    main()
