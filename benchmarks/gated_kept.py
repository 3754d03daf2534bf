"""How exact the gradients of gated feed-forward blocks are, by what is kept of gate and up for the
backward pass.

    python benchmarks/gated_kept.py [--at 1 100 400] [--activation silu]

Trains a small language model with gated blocks in float32 on made text (language_model.py), and at
some updates looks
at each block: h = act(gate) * up. Every way keeps gate and up otherwise. Prints signal-to-noise in
    dB against float64,
mean and worst over the blocks: of h as the down projection reads it, rounded by row; of the
gradient of the block's input (dX); of that of the weights of gate and up (dW). Then what else h may
be rounded under, and last, what it costs
to round the gradient itself at random: row by row, both halves under one scale or each under its
    own.
Shape letters: M rows, F inner width.
"""

import argparse
from collections.abc import Callable
from statistics import mean

import common
import torch
from gradient_scales import decibels
from language_model import LanguageModel, Shape, make_sentences, microbatch
from results_table import markdown_table
from torch import Tensor, nn
from torch.nn import functional

from lsq.quant import calibrate, maximum_code
from lsq.quant.random import uniform_rows

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
HIDDEN, INNER, LAYERS = 128, 352, 3
SEQUENCES, LENGTH = 16, 96
SAMPLED = 29
"""One value of so many decides a clip; F is no multiple of it."""


class GatedBlock(nn.Module):
    """down(act(gate) * up) without biases, and what its last backward pass saw."""

    def __init__(self, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.activation = activation
        self.both, self.down = (
            nn.Linear(HIDDEN, 2 * INNER, bias=False),
            nn.Linear(INNER, HIDDEN, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.product = self.both(x)
        gate, up = self.product.chunk(2, dim=-1)
        self.h = self.activation(gate) * up
        self.h.retain_grad()
        return self.down(self.h)


def under_clip(x: Tensor) -> Tensor:
    """x after rounding under the clip of least squared error, measured on a sample."""
    clip = calibrate(x.flatten()[::SAMPLED].float(), "mse", bits=8).double()
    scale = clip / maximum_code(8)
    return (x / scale).round().clamp(-maximum_code(8), maximum_code(8)) * scale


def under_largest(x: Tensor) -> Tensor:
    """x after rounding under the largest magnitude of all."""
    scale = x.abs().max() / maximum_code(8)
    return (x / scale).round() * scale


def by_row(x: Tensor) -> Tensor:
    """x after rounding under each row's largest magnitude."""
    scale = x.abs().amax(dim=1, keepdim=True) / maximum_code(8)
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


def halves(rounded: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Rounds gate and up, side by side, each by itself."""
    return lambda product: torch.cat([rounded(half) for half in product.chunk(2, dim=1)], dim=1)


WAYS = {
    # name: (bytes for each value of h, what the forward pass reads, what the backward pass reads)
    "float32": (8, lambda y: y, lambda y: y),
    "bfloat16": (4, lambda y: y, lambda y: y.bfloat16().double()),
    "int8 by row": (2, lambda y: y, halves(by_row)),
    "int8 under a clip each": (2, lambda y: y, halves(under_clip)),
    "int8 under one clip": (2, lambda y: y, under_clip),
    "the product in int8, a clip each": (2, halves(under_clip), halves(under_clip)),
    "the product in int8, one clip": (2, under_clip, under_clip),
}
CHOSEN = "the product in int8, a clip each"
"""What the layers of lsq do with gate and up."""
MIDDLES = {
    "h under the largest of all": under_largest,
    "h under the clip of least squared error": under_clip,
}
"""Other ways to round h, of gate and up as CHOSEN has them."""


def gradient_of_product(block: GatedBlock, product: Tensor, gradient: Tensor) -> Tensor:
    """That of gate and up [M, 2F] from that of h [M, F], in float64."""
    leaf = product.clone().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    (found,) = torch.autograd.grad(block.activation(gate) * up, leaf, gradient)
    return found


def gated(block: GatedBlock, product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=1)
    return block.activation(gate) * up


def round_at_random(gradient: Tensor) -> Tensor:
    """Row by row, as lsq.quant.arithmetic.round_rows does without the weight's scales."""
    scale = gradient.abs().amax(dim=1, keepdim=True) / maximum_code(8)
    words = uniform_rows(torch.tensor([5]), 1, *gradient.shape).double()
    return (gradient / scale + words).floor() * scale


@torch.no_grad()
def look(block: GatedBlock, update: int, number: int) -> list[dict]:
    """A row for each way."""
    x, product, gradient = (
        one.detach().flatten(0, 1).double() for one in (block.x, block.product, block.h.grad)
    )
    weight = block.both.weight.double()
    with torch.enable_grad():
        exact = gradient_of_product(block, product, gradient)
        found = {
            name: gradient_of_product(block, kept(product), gradient)
            for name, (_, _, kept) in WAYS.items()
        }
    read = {name: by_row(gated(block, reads(product))) for name, (_, reads, _) in WAYS.items()}
    for name, rounded in MIDDLES.items():
        read[name], found[name] = rounded(gated(block, WAYS[CHOSEN][1](product))), found[CHOSEN]
    found["the gradient's own rounding"] = round_at_random(exact)
    found["the same, gate and up by themselves"] = halves(round_at_random)(exact)
    h, rows = gated(block, product), []
    for name, one in found.items():
        row = {
            "update": update,
            "block": number,
            "way": name,
            "bytes": WAYS[name][0] if name in WAYS else 0,
        }
        row["h"] = decibels(h, read.get(name, h))
        row["dx"], row["dw"] = (
            decibels(exact @ weight, one @ weight),
            decibels(exact.t() @ x, one.t() @ x),
        )
        rows.append(row)
    return rows


def study(options: argparse.Namespace) -> list[dict]:
    """Train, and look at the blocks after some updates."""
    torch.manual_seed(options.seed)
    model = LanguageModel(Shape(hidden=HIDDEN, layers=LAYERS, positions=LENGTH), options.seed)
    blocks = [GatedBlock(ACTIVATIONS[options.activation]) for _ in range(LAYERS)]
    for layer, block in zip(model.blocks, blocks, strict=True):
        layer.feed_forward = block
    text = make_sentences().train
    optimizer, rows = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98)), []
    for update in range(1, max(options.at) + 1):
        optimizer.zero_grad()
        loss = model(microbatch(text, update, sequences=SEQUENCES, length=LENGTH))
        loss.backward()
        if update in options.at:
            rows += [
                row for number, block in enumerate(blocks) for row in look(block, update, number)
            ]
            print(f"update {update}: loss {loss.item():.3f} nats a byte", flush=True)
        optimizer.step()
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """One line for each way: "mean (worst)" over the blocks, of each update."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        line = {"kept": way, "bytes": mine[0]["bytes"] or ""}
        for key in ("h", "dx", "dw"):
            for update in dict.fromkeys(row["update"] for row in mine):
                values = [row[key] for row in mine if row["update"] == update]
                line[f"{key} at {update}"] = f"{mean(values):.1f} ({min(values):.1f})"
        lines.append(line)
    return lines


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument(
        "--at", type=common.positive, nargs="+", metavar="UPDATE", default=[1, 100, 400]
    )
    made.add_argument("--activation", choices=sorted(ACTIVATIONS), default="silu")
    made.add_argument("--seed", type=int, default=1)
    print("\n".join(markdown_table(summary(study(made.parse_args())))))


if __name__ == "__main__":
    main()
