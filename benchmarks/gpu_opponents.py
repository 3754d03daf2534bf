"""What other ways to train in bfloat16 must move and multiply in a step, from the shapes alone.

Ideal: every kernel reads each operand once and writes each result once, and no kernel is launched
    that need not be.

* "eager": fairseq's Transformer as it is; every operation of PyTorch is a kernel, attention stores
  its probabilities, and fairseq's Adam goes over the float32 copies of the weights operation by
  operation.
* "compiled": between products nothing but one fused kernel; flash attention; a loss that never
  holds probabilities in float32; PyTorch's fused Adam on float32 copies.
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
SIDES = ("eager", "compiled", "int8")
EAGER_ADAM = 96
"""Bytes that fairseq moves for a parameter: to float32 6, scaling 8, norm 4, Adam's eight
operations 72, back 6."""
FUSED_ADAM = 44
"""To float32 6, norm 4, Adam 28, back 6."""
EAGER_ADAM_LAUNCHES, FUSED_ADAM_LAUNCHES = 13, 4
"""Kernels for a parameter, and for all."""


@dataclass
class Pass:
    """Kernels of a pass, one after another."""

    name: str
    times: int
    kernels: list[tuple[str, Moved]] = field(default_factory=list)
    rounded: dict[tuple, tuple] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def new(self, size: float) -> tuple:
        """A place for so many bytes."""
        return next(self._numbers), size

    def move(self, name: str, reads: list[tuple], *sizes: float) -> tuple:
        """A kernel that reads these places and writes new ones of these sizes; the first of
        them."""
        written = [self.new(size) for size in sizes]
        self.kernels.append((name, Moved(reads=dict_of(reads), writes=dict_of(written))))
        return written[0]

    def multiply(
        self,
        name: str,
        a: tuple,
        b: tuple,
        sizes: tuple[int, int, int],
        *,
        int8: bool = False,
        bytes: int = HALF,
        count: int = 1,
    ) -> tuple:
        """A product [m, n] over k; its place."""
        m, n, k = sizes
        out = self.new(float(m * n * bytes * count))
        product = Multiplied(
            m=m, n=n, k=k, int8=int8, count=count, reads=dict_of([a, b]), writes=dict_of([out])
        )
        self.kernels.append((name, product))
        return out


def dict_of(places: list[tuple]) -> dict[object, float]:
    """Bytes by place."""
    return {place: place[1] for place in places}


class Model:
    """A Transformer on one side.

    Args:
        size: hidden size, heads, batch.
        side: of SIDES.
        parameters: how many there are.
    """

    def __init__(self, size: Size, side: str, parameters: int):
        self.size, self.side, self.parameters = size, side, parameters
        self.fused = side != "eager"
        rows = size.tokens
        self.x = float(rows * size.hidden * HALF)
        self.inner = float(rows * size.feed_forward * HALF)
        self.scores = float(rows * size.heads * size.length * HALF)

    def step(self) -> list[Pass]:
        """All passes."""
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

    def linear(
        self, one: Pass, x: tuple, inputs: int, outputs: int, name: str = "product"
    ) -> tuple:
        """A linear layer."""
        rows, weight = self.size.tokens, one.new(float(inputs * outputs * HALF))
        if self.side == "int8":
            x, weight = self.rounded(one, x, "rows"), self.rounded(one, weight, "rows")
        return one.multiply(name, x, weight, (rows, outputs, inputs), int8=self.side == "int8")

    def linear_gradient(self, one: Pass, dy: tuple, inputs: int, outputs: int) -> tuple:
        """Both products of the backward pass, and the bias's gradient."""
        rows, int8 = self.size.tokens, self.side == "int8"
        x, weight = one.new(float(rows * inputs * HALF)), one.new(float(inputs * outputs * HALF))
        operands = [dy, weight, dy, x]
        if int8:
            summed_over = ("rows", "columns", "columns", "columns")
            operands = [
                self.rounded(one, *pair) for pair in zip(operands, summed_over, strict=True)
            ]
        dx = one.multiply("product", operands[0], operands[1], (rows, inputs, outputs), int8=int8)
        one.multiply("product", operands[2], operands[3], (outputs, inputs, rows), int8=int8)
        if not self.fused:
            one.move("sum of a bias", [dy], float(outputs * HALF))
        return dx

    def rounded(self, one: Pass, x: tuple, lines: str) -> tuple:
        """x in int8, with a scale for each of its rows or columns; made once."""
        if (x, lines) not in one.rounded:
            one.rounded[x, lines] = one.move("rounding", [x], x[1] / HALF)
        return one.rounded[x, lines]

    def attention(self, one: Pass) -> None:
        """A block of attention with its residual and norm."""
        h, x = self.size.hidden, one.new(self.x)
        q, k, v = (self.linear(one, x, h, h) for _ in range(3))
        if self.fused:
            context = one.move("attention", [q, k, v], self.x)
        else:
            context = self.eager_attention(one, q, k, v)
        self.residual(one, x, self.linear(one, context, h, h))

    def eager_attention(self, one: Pass, q: tuple, k: tuple, v: tuple) -> tuple:
        """With stored probabilities."""
        size, s = self.size, self.scores
        heads = size.sentences * size.heads
        shape = size.length, size.length, size.hidden // size.heads
        q = one.move("attention", [q], self.x)
        scores = one.multiply("attention", q, k, shape, count=heads)
        scores = one.move("attention", [scores], s)
        kept = one.move("attention", [scores], s, s / HALF)
        context = one.multiply("attention", kept, v, (shape[0], shape[2], shape[1]), count=heads)
        return one.move("attention", [context], self.x)

    def residual(self, one: Pass, x: tuple, update: tuple) -> tuple:
        """Dropout, addition, norm."""
        if self.fused:
            return one.move("norm", [x, update], self.x, self.x)
        update = one.move("dropout", [update], self.x, self.x / HALF)
        return one.move("norm", [one.move("addition", [x, update], self.x)], self.x)

    def residual_gradient(self, one: Pass) -> tuple:
        """That of dropout's input."""
        dy, z = one.new(self.x), one.new(self.x)
        if self.fused:
            return one.move("norm", [dy, z], self.x, self.x)
        dz = one.move("norm", [dy, z], self.x)
        return one.move("dropout", [dz, one.new(self.x / HALF)], self.x)

    def attention_gradient(self, one: Pass) -> None:
        """Of a block of attention."""
        h, size, s = self.size.hidden, self.size, self.scores
        dcontext = self.linear_gradient(one, self.residual_gradient(one), h, h)
        saved = [one.new(self.x) for _ in range(3)]
        if self.fused:
            one.move("attention", [dcontext, *saved, one.new(self.x)], self.x, self.x, self.x)
            gradients = [one.new(self.x) for _ in range(3)]
        else:
            heads, wide = size.sentences * size.heads, size.hidden // size.heads
            pair, out = (size.length, size.length, wide), (size.length, wide, size.length)
            dcontext = one.move("attention", [dcontext], self.x)
            dp = one.multiply("attention", dcontext, saved[2], pair, count=heads)
            dv = one.multiply("attention", one.new(s), dcontext, out, count=heads)
            dp = one.move("attention", [dp, one.new(s / HALF)], s)
            ds = one.move("attention", [dp, one.new(s)], s)
            dq = one.multiply("attention", ds, saved[1], out, count=heads)
            dk = one.multiply("attention", ds, saved[0], out, count=heads)
            gradients = [one.move("attention", [dq], self.x), dk, dv]
        parts = [self.linear_gradient(one, gradient, h, h) for gradient in gradients]
        self.sum_of(one, [*parts, one.new(self.x)])

    def sum_of(self, one: Pass, parts: list[tuple]) -> None:
        """Gradients of one tensor."""
        if self.fused:
            one.move("addition", parts, self.x)
            return
        total = parts[0]
        for part in parts[1:]:
            total = one.move("addition", [total, part], self.x)

    def feed_forward(self, one: Pass) -> None:
        """A feed-forward block with its residual and norm."""
        h, f, x = self.size.hidden, self.size.feed_forward, one.new(self.x)
        inner = self.linear(one, x, h, f)
        if self.fused:
            inner = one.move("activation", [inner], self.inner)
        else:
            inner = one.move(
                "dropout",
                [one.move("activation", [inner], self.inner)],
                self.inner,
                self.inner / HALF,
            )
        self.residual(one, x, self.linear(one, inner, f, h))

    def feed_forward_gradient(self, one: Pass) -> None:
        """Of a feed-forward block."""
        h, f = self.size.hidden, self.size.feed_forward
        dinner = self.linear_gradient(one, self.residual_gradient(one), f, h)
        if not self.fused:
            dinner = one.move("dropout", [dinner, one.new(self.inner / HALF)], self.inner)
        dinner = one.move("activation", [dinner, one.new(self.inner)], self.inner)
        self.sum_of(one, [self.linear_gradient(one, dinner, h, f), one.new(self.x)])

    def embedding(self) -> Pass:
        """Words and positions, scaled, with dropout; of both sides."""
        one = Pass("embedding forward", 2)
        rows = [one.new(self.x), one.new(self.x)]
        if self.fused:
            one.move("embedding", rows, self.x)
            return one
        scaled = one.move("embedding", [one.move("embedding", rows[:1], self.x)], self.x)
        one.move(
            "embedding", [one.move("embedding", [scaled, rows[1]], self.x)], self.x, self.x / HALF
        )
        return one

    def embedding_gradient(self) -> Pass:
        """Of one side; it is added to what the table has already."""
        one, table = (
            Pass("embedding backward", 2),
            float(self.size.vocabulary * self.size.hidden * HALF),
        )
        dx = one.new(self.x)
        if not self.fused:
            dx = one.move(
                "embedding", [one.move("embedding", [dx, one.new(self.x / HALF)], self.x)], self.x
            )
        gradient = one.move("embedding", [dx], table)
        one.move("embedding", [gradient, one.new(table)], table)
        return one

    def loss(self) -> Pass:
        """The projection onto the vocabulary and the smoothed loss."""
        one, size = Pass("vocabulary_loss forward", 1), self.size
        logits = float(size.tokens * size.padded * HALF)
        weight = one.new(float(size.padded * size.hidden * HALF))
        shape = size.tokens, size.padded, size.hidden
        found = one.multiply("product", one.new(self.x), weight, shape)
        if self.fused:
            one.move("loss", [found], float(size.tokens * SINGLE))
        else:
            one.move(
                "loss",
                [one.move("loss", [found], SINGLE / HALF * logits)],
                float(size.tokens * SINGLE),
            )
        return one

    def loss_gradient(self) -> Pass:
        """Of the loss and the projection."""
        one, size = Pass("vocabulary_loss backward", 1), self.size
        logits, wide = (
            float(size.tokens * size.padded * HALF),
            float(size.tokens * size.padded * SINGLE),
        )
        if self.fused:
            dlogits = one.move("loss", [one.new(logits)], logits)
        else:
            zeros = one.move("loss", [], wide)
            dlogits = one.move("loss", [one.move("loss", [zeros], wide), one.new(wide)], logits)
        weight = one.new(float(size.padded * size.hidden * HALF))
        one.multiply("product", dlogits, weight, (size.tokens, size.hidden, size.padded))
        one.multiply("product", dlogits, one.new(self.x), (size.padded, size.hidden, size.tokens))
        return one

    def update(self) -> Pass:
        """The norm of the gradient and Adam."""
        one = Pass("update", 1)
        moved, launches = FUSED_ADAM * self.parameters, FUSED_ADAM_LAUNCHES
        if not self.fused:
            moved, launches = EAGER_ADAM * self.parameters, EAGER_ADAM_LAUNCHES * 20 * LAYERS
        for _ in range(launches):
            one.move("Adam", [one.new(moved / 2 / launches)], moved / 2 / launches)
        return one
