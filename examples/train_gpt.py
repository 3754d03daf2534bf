"""A small GPT in plain PyTorch learns to write by letters, in int8: one line, lsq.convert, makes
the difference.

    python examples/train_gpt.py                        # lsq's own documentation, some minutes on
    two cores
    python examples/train_gpt.py novel.txt --float      # your text; the same once more in bfloat16,
    for comparison

After Andrej Karpathy's nanoGPT.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import lsq
from lsq.optim import Adam

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = 0.1
"""Share of the text, its end, that the model is tried on."""


class Block(nn.Module):
    """Attention and a feed-forward part: x [B, T, H] -> [B, T, H]."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.queries_keys_values, self.out = (
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(hidden, hidden),
        )
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.queries_keys_values(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, N, T, H / N]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.feed_forward_norm(x))))


class GPT(nn.Module):
    """letters int64 [B, T] -> logits of the letters that follow [B, T, V]."""

    def __init__(self, letters: int, *, context: int, hidden: int, heads: int, layers: int):
        super().__init__()
        self.context = context
        self.letters, self.places = nn.Embedding(letters, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.Sequential(
            *(Block(hidden, heads) for _ in range(layers)), nn.LayerNorm(hidden)
        )
        self.head = nn.Linear(hidden, letters)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(letters.shape[1])
        return self.head(self.blocks(self.letters(letters) + self.places(places)))

    @torch.no_grad()
    def write(self, beginning: torch.Tensor, count: int) -> torch.Tensor:
        """Letters [T] and `count` more, drawn by their probabilities."""
        for _ in range(count):
            probabilities = self(beginning[None, -self.context :])[0, -1].float().softmax(0)
            beginning = torch.cat([beginning, probabilities.multinomial(1)])
        return beginning


def read(file: Path | None) -> tuple[str, torch.Tensor]:
    """(the letters of a text, the text by their numbers int64 [L]); None: lsq's own
    documentation."""
    files = [file] if file else [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    letters = "".join(sorted(set(text)))
    numbers = {letter: number for number, letter in enumerate(letters)}
    return letters, torch.tensor([numbers[letter] for letter in text])


def loss_of(model: GPT, text: torch.Tensor, rows: int) -> torch.Tensor:
    """Mean cross-entropy, in nats, on so many places of a text, drawn at random.

    What is not int8 is bfloat16.
    """
    starts = torch.randint(len(text) - model.context, (rows, 1))
    letters = text[starts + torch.arange(model.context + 1)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(letters[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), letters[:, 1:].flatten())


def train(
    model: GPT, text: torch.Tensor, given: argparse.Namespace, side: str
) -> tuple[float, float]:
    """(loss on the end of the text, seconds a step)."""
    torch.manual_seed(given.seed)  # the same batches for both sides
    border = int(len(text) * (1 - HELD_OUT))
    optimizer = Adam(model.parameters(), lr=given.lr, weight_decay=0.1)
    seconds = 0.0
    with tqdm(range(given.steps), desc=side, unit=" steps") as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = given.lr * min((step + 1) / 20, 1 - step / given.steps)
            began = time.perf_counter()
            loss = loss_of(model, text[:border], given.rows)
            loss.backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - began
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval()
    torch.manual_seed(given.seed)
    with torch.no_grad():
        held_out = torch.stack(
            [loss_of(model, text[border:], given.rows) for _ in range(10)]
        ).mean()
    return held_out.item(), seconds / given.steps


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train and write; the loss on the end of the text by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "text", nargs="?", type=Path, help="a text file; default: lsq's own documentation"
    )
    parser.add_argument(
        "--float", action="store_true", help="train without int8 as well, and compare"
    )
    numbers = {
        "steps": 500,
        "rows": 16,
        "context": 128,
        "hidden": 256,
        "heads": 4,
        "layers": 4,
        "seed": 1,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--lr", type=float, default=1e-3, help="default: 0.001")
    given = parser.parse_args(words)

    letters, text = read(given.text)
    if len(text) * HELD_OUT <= given.context + 1:
        parser.error(
            f"the text has {len(text)} letters; --context {given.context} needs ten times as many"
            " and more"
        )

    results = {}
    for side in ("bfloat16", "int8") if given.float else ("int8",):
        torch.manual_seed(given.seed)
        model = GPT(
            len(letters),
            context=given.context,
            hidden=given.hidden,
            heads=given.heads,
            layers=given.layers,
        )
        if side == "int8":
            print(lsq.convert(model))
        results[side] = train(model, text, given, side)
    print(
        "letters that it writes:", "".join(letters[number] for number in model.write(text[:1], 200))
    )
    for side, (loss, seconds) in results.items():
        print(f"{side:8}  loss on the end of the text {loss:.3f}, {1000 * seconds:.0f} ms a step")
    return {side: loss for side, (loss, _) in results.items()}


if __name__ == "__main__":
    main()
