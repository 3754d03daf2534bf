"""What other ways to train in bfloat16 must move and multiply in a step, from the shapes alone.

Ideal: every kernel reads each operand once and writes each result once, and no kernel is launched
that need not be.

* "compiled": fairseq's Transformer with nothing but one fused kernel between products; flash
  attention; a loss that never holds probabilities in float32; PyTorch's fused Adam on float32
  copies of the weights.
* "int8": "compiled" with torchao's int8 products in the layers: both operands of all three products
  of a weight are rounded anew, by kernels of their own, along the dimension that is summed over.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from gpu_lists import LAYERS
from gpu_model import Moved, Multiplied
from operations import Size

HALF, SINGLE = 2, 4
"""Bytes of a number."""
SIDES = ("compiled", "int8")
ADAM, ADAM_LAUNCHES = 44, 4
"""Bytes for a parameter (to float32 6, norm 4, Adam 28, back 6), and kernels for all."""


@dataclass
class Pass:
    """Kernels of a pass, one after another. A place is memory with its size in bytes."""

    name: str
    times: int
    kernels: list[tuple[str, Moved]] = field(default_factory=list)
    rounded: dict[tuple, tuple] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def new(self, size: float) -> tuple:
        """A new place of so many bytes."""
        return next(self._numbers), size

    def move(self, name: str, reads: list[tuple], *sizes: float) -> tuple:
        """Add a kernel that reads places and writes new ones of these sizes; the first of them."""
        written = [self.new(size) for size in sizes]
        self.kernels.append((name, Moved(reads=dict_of(reads), writes=dict_of(written))))
        return written[0]

    def multiply(
        self, a: tuple, b: tuple, sizes: tuple[int, int, int], int8: bool = False
    ) -> tuple:
        """Add a product [m, n] over k; its place."""
        m, n, k = sizes
        out = self.new(float(m * n * HALF))
        product = Multiplied(m=m, n=n, k=k, int8=int8, reads=dict_of([a, b]), writes=dict_of([out]))
        self.kernels.append(("product", product))
        return out


def dict_of(places: list[tuple]) -> dict[object, float]:
    return {place: place[1] for place in places}


class Model:
    """A Transformer on one side.

    Args:
        size: hidden size, heads, batch.
        side: of SIDES.
        parameters: how many there are.
    """

    def __init__(self, size: Size, side: str, parameters: int):
        self.size, self.parameters, self.int8 = size, parameters, side == "int8"
        self.x = float(size.tokens * size.hidden * HALF)
        self.inner = float(size.tokens * size.feed_forward * HALF)

    def step(self) -> list[Pass]:
        found = [self.embedding(), self.embedding_gradient()]
        for name, blocks in (("encoder_layer", 1), ("decoder_layer", 2)):
            forward, backward = Pass(f"{name} forward", LAYERS), Pass(f"{name} backward", LAYERS)
            for _ in range(blocks):
                self.attention(forward)
                self.attention_gradient(backward)
            self.feed_forward(forward)
            self.feed_forward_gradient(backward)
            found += [forward, backward]
        return [*found, self.loss(), self.loss_gradient(), self.update()]

    def linear(self, one: Pass, x: tuple, inputs: int, outputs: int) -> tuple:
        rows, weight = self.size.tokens, one.new(float(inputs * outputs * HALF))
        if self.int8:
            x, weight = self.rounded(one, x, "rows"), self.rounded(one, weight, "rows")
        return one.multiply(x, weight, (rows, outputs, inputs), self.int8)

    def linear_gradient(self, one: Pass, dy: tuple, inputs: int, outputs: int) -> tuple:
        """Both products of the backward pass."""
        rows = self.size.tokens
        x, weight = one.new(float(rows * inputs * HALF)), one.new(float(inputs * outputs * HALF))
        operands = [dy, weight, dy, x]
        if self.int8:
            summed_over = ("rows", "columns", "columns", "columns")
            operands = [
                self.rounded(one, *pair) for pair in zip(operands, summed_over, strict=True)
            ]
        dx = one.multiply(operands[0], operands[1], (rows, inputs, outputs), self.int8)
        one.multiply(operands[2], operands[3], (outputs, inputs, rows), self.int8)
        return dx

    def rounded(self, one: Pass, x: tuple, lines: str) -> tuple:
        """x in int8, with a scale for each of its rows or columns; made once."""
        if (x, lines) not in one.rounded:
            one.rounded[x, lines] = one.move("rounding", [x], x[1] / HALF)
        return one.rounded[x, lines]

    def attention(self, one: Pass) -> None:
        """A block of attention with its residual and norm."""
        h, x = self.size.hidden, one.new(self.x)
        context = one.move("attention", [self.linear(one, x, h, h) for _ in range(3)], self.x)
        self.residual(one, x, self.linear(one, context, h, h))

    def residual(self, one: Pass, x: tuple, update: tuple) -> tuple:
        """Dropout, addition, norm."""
        return one.move("norm", [x, update], self.x, self.x)

    def residual_gradient(self, one: Pass) -> tuple:
        """The gradient of dropout's input."""
        return one.move("norm", [one.new(self.x), one.new(self.x)], self.x, self.x)

    def attention_gradient(self, one: Pass) -> None:
        h = self.size.hidden
        dcontext = self.linear_gradient(one, self.residual_gradient(one), h, h)
        saved = [one.new(self.x) for _ in range(4)]
        one.move("attention", [dcontext, *saved], self.x, self.x, self.x)
        gradients = [one.new(self.x) for _ in range(3)]
        parts = [self.linear_gradient(one, gradient, h, h) for gradient in gradients]
        one.move("addition", [*parts, one.new(self.x)], self.x)

    def feed_forward(self, one: Pass) -> None:
        """A feed-forward block with its residual and norm."""
        h, f, x = self.size.hidden, self.size.feed_forward, one.new(self.x)
        inner = one.move("activation", [self.linear(one, x, h, f)], self.inner)
        self.residual(one, x, self.linear(one, inner, f, h))

    def feed_forward_gradient(self, one: Pass) -> None:
        h, f = self.size.hidden, self.size.feed_forward
        dinner = self.linear_gradient(one, self.residual_gradient(one), f, h)
        dinner = one.move("activation", [dinner, one.new(self.inner)], self.inner)
        one.move("addition", [self.linear_gradient(one, dinner, h, f), one.new(self.x)], self.x)

    def embedding(self) -> Pass:
        """Words and positions, scaled, with dropout; of both sides."""
        one = Pass("embedding forward", 2)
        one.move("embedding", [one.new(self.x), one.new(self.x)], self.x)
        return one

    def embedding_gradient(self) -> Pass:
        """The gradient of one side, which is added to what the table has."""
        one = Pass("embedding backward", 2)
        table = float(self.size.vocabulary * self.size.hidden * HALF)
        gradient = one.move("embedding", [one.new(self.x)], table)
        one.move("embedding", [gradient, one.new(table)], table)
        return one

    def loss(self) -> Pass:
        """The projection onto the vocabulary and the smoothed loss."""
        one, size = Pass("vocabulary_loss forward", 1), self.size
        weight = one.new(float(size.padded * size.hidden * HALF))
        shape = size.tokens, size.padded, size.hidden
        found = one.multiply(one.new(self.x), weight, shape)
        one.move("loss", [found], float(size.tokens * SINGLE))
        return one

    def loss_gradient(self) -> Pass:
        one, size = Pass("vocabulary_loss backward", 1), self.size
        logits = float(size.tokens * size.padded * HALF)
        dlogits = one.move("loss", [one.new(logits)], logits)
        weight = one.new(float(size.padded * size.hidden * HALF))
        one.multiply(dlogits, weight, (size.tokens, size.hidden, size.padded))
        one.multiply(dlogits, one.new(self.x), (size.padded, size.hidden, size.tokens))
        return one

    def update(self) -> Pass:
        """The norm of the gradient and Adam."""
        one, moved = Pass("update", 1), ADAM * self.parameters / 2 / ADAM_LAUNCHES
        for _ in range(ADAM_LAUNCHES):
            one.move("Adam", [one.new(moved)], moved)
        return one
