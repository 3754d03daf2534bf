"""Rounds gradients into messages and back: lsq.ops.gradient_messages with the choices of a
GradientConfig."""

from dataclasses import replace

import torch
from torch import Tensor

from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.gradient_messages import Messages, PackGradients, SumMessages, UnpackGradients
from lsq.quant import GRADIENT
from lsq.run import backends

FIRST, SECOND = 0, 1
"""Subsequences of random numbers: what a worker packs, and what the owner of a shard packs."""
SMALLEST_KEY, LARGEST_KEY = -(2**63), 2**63 - 1


class Codec:
    """What one worker does to its messages.

    Args:
        block: values that share a scale.
        first_bits: width of the codes on the first hop; on the second they have 8.
        stochastic: whether to round at random.
        device: where gradients lie.
        seed: of the random numbers; should differ between workers.
    """

    def __init__(
        self, *, block: int, first_bits: int, stochastic: bool, device: torch.device, seed: int = 0
    ):
        self.block, self.first_bits, self.stochastic, self.device = (
            block,
            first_bits,
            stochastic,
            device,
        )
        self._generator = torch.Generator(device).manual_seed(seed) if stochastic else None

    def first_layout(self, values: int, shards: int) -> MessageLayout:
        """Of the messages that a worker sends the owners of the shards."""
        return MessageLayout.for_values(values, shards, block=self.block, bits=self.first_bits)

    def second_layout(self, first: MessageLayout) -> MessageLayout:
        """Of the messages that the owners send to all."""
        return replace(first, bits=GRADIENT.bits)

    def pack(
        self, x: Tensor, layout: MessageLayout, messages: Tensor, error: Tensor | None = None
    ) -> None:
        """Write the messages uint8 [S, M] of the sum over R of x, float [R, v]; v may be less than
        `layout` holds.

        Args:
            error: float32 [v], gets what rounding took from the sum; None: not wanted.
        """
        if x.shape[1] == 0:
            messages.zero_()
            return
        layout = replace(layout, values=x.shape[1])
        packed = Messages(layout=layout, data=messages)
        backends.run(
            PackGradients(x=x, key=self._key(), subsequence=FIRST, messages=packed, error=error)
        )

    def sum(self, messages: Tensor, layout: MessageLayout, out: Tensor, factor: float) -> None:
        """Write the message uint8 [M'] of the sum of `messages` uint8 [N, M], times `factor`.

        Args:
            layout: of the messages; `out` has that of the second hop.
        """
        given, total = (
            Messages(layout=layout, data=messages),
            Messages(layout=self.second_layout(layout), data=out),
        )
        backends.run(
            SumMessages(
                messages=given, factor=factor, key=self._key(), subsequence=SECOND, sum=total
            )
        )

    def unpack(self, messages: Tensor, layout: MessageLayout, out: Tensor) -> None:
        """Write the values of the second hop's messages uint8 [S, M'] to `out`, float [v]; v may be
        less."""
        if out.numel():
            layout = replace(self.second_layout(layout), values=out.numel())
            backends.run(
                UnpackGradients(messages=Messages(layout=layout, data=messages[None]), x=out)
            )

    def _key(self) -> Tensor | None:
        if self._generator is None:
            return None
        return torch.randint(
            SMALLEST_KEY, LARGEST_KEY, (1,), generator=self._generator, device=self.device
        )
