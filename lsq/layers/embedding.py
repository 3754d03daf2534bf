"""Embedding: words and positions, scaled, with dropout."""

import math

import torch
from torch import nn

from lsq.config import QuantConfig
from lsq.layers import programs
from lsq.layers.module import ProgramModule, beside_the_graph, check_words
from lsq.layers.packing import Packing, packing_options, unpack_time_major

POSITIONS = ("sinusoidal", "learned")


def sinusoidal_table(positions: int, hidden: int, padding_idx: int) -> torch.Tensor:
    """float32 [positions, hidden]: sines, then cosines (Vaswani et al. 2017, section 3.5)."""
    half = hidden // 2
    frequency = torch.exp(
        torch.arange(half, dtype=torch.float32) * -(math.log(10000) / max(half - 1, 1))
    )
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], dim=1)
    table = nn.functional.pad(table, (0, hidden - table.shape[1]))
    table[padding_idx] = 0.0
    return table


class Embedding(ProgramModule):
    """dropout(norm(scale * weight[token] + position)) for tokens int64 [B, T] -> float32 [T, B, H].

    Positions count from padding_idx + 1 along each sentence and skip padding, as fairseq's do.

    Args:
        vocabulary, hidden: numbers of words and columns, V and H.
        padding_idx: the padding token; its row stays zero.
        positions: "sinusoidal" (a fixed table) or "learned" (the parameter `position_weight`).
        max_positions: longest sentence.
        scale: factor of the words' rows; fairseq's default is sqrt(H).
        layer_norm: a LayerNorm between sum and dropout.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        padding_idx: int,
        *,
        positions: str = "sinusoidal",
        max_positions: int = 1024,
        dropout: float = 0.0,
        scale: float | None = None,
        layer_norm: bool = False,
    ):
        if positions not in POSITIONS:
            raise ValueError(
                f"positions is {positions!r}; allowed: {', '.join(map(repr, POSITIONS))}"
            )
        super().__init__(QuantConfig(mode="float"))
        self.padding_idx, self.dropout, self.learned = padding_idx, dropout, positions == "learned"
        self.max_positions = max_positions
        self.scale = math.sqrt(hidden) if scale is None else scale
        rows = max_positions + padding_idx + 1
        table = programs.Table(
            vocabulary=vocabulary,
            hidden=hidden,
            positions=rows,
            padding=padding_idx,
            scale=self.scale,
            dropout=0.0 if layer_norm else dropout,
            learned=self.learned,
        )
        self.declare(lambda mode: programs.embedding(self.quant, 1, table, mode))
        self._table = table
        if not self.learned:
            self.register_buffer(
                "position_weight", sinusoidal_table(rows, hidden, padding_idx), persistent=False
            )
        with torch.no_grad():
            self.weight[padding_idx] = 0.0
            self.position_weight[padding_idx] = 0.0
        self.layer_norm = nn.LayerNorm(hidden) if layer_norm else None

    def forward(self, tokens: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Embed tokens at positions from `offset` on; padding becomes zero. Errors: see `rows`."""
        self._check(tokens)
        packing = Packing(tokens == self.padding_idx, **packing_options(self))
        return unpack_time_major(self.rows(tokens, packing, offset), packing)

    @beside_the_graph
    def rows(self, tokens: torch.Tensor, packing: Packing, offset: int = 0) -> torch.Tensor:
        """Embed tokens and return packed rows [M, H].

        Raises ValueError for a sentence that is too long, an empty batch, or a token outside the
        vocabulary; on a GPU the row of such a token is NaN instead.
        """
        self._check(tokens)
        time = tokens.shape[1]
        if time + offset > self.max_positions:
            raise ValueError(
                f"a sentence of {time + offset} tokens is longer than max_positions ="
                f" {self.max_positions}; shorten it or raise the maximum"
            )
        tokens = packing.pack(tokens, fill=self.padding_idx)
        first = self.padding_idx + 1 + offset
        positions = torch.where(
            tokens != self.padding_idx, packing.positions + first, self.padding_idx
        )
        program = programs.embedding(self.quant, packing.sentences.rows, self._table, self.mode())
        inputs = {"tokens": tokens, "positions": positions}
        if not self.learned:
            inputs["position_weight"] = self.position_weight
        (x,) = self.execute(program, inputs)
        if self.layer_norm is not None:
            x = nn.functional.dropout(self.layer_norm(x), self.dropout, self.training)
        return x

    def _check(self, tokens: torch.Tensor) -> None:
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise ValueError(
                f"the tokens are {tuple(tokens.shape)}; they must be [sentences, time] with at"
                " least one word"
            )
        check_words("tokens", tokens, len(self.weight))
