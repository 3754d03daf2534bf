"""Rotary embeddings: queries and keys turned by their places before they are rounded, so that
attention goes on multiplying codes; and before that, where a model has them, norms of each head.

    n = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + epsilon), over a head     (Henry et al. 2020
    with RMSNorm)
    y[i] = n[i] cos - n[i + R/2] sin,   y[i + R/2] = n[i + R/2] cos + n[i] sin    (RoFormer, Su et
    al. 2021)

The first R columns of a head turn, in halves as Llama has them; what is left of it and the values
behind all keys stay. A gradient turns back. M rows, C columns: N heads of queries, then of keys,
then values, D columns each; P places.
"""

from __future__ import annotations

import torch

from lsq.native.geometry import MANY_BLOCKS, VECTOR, row_blocks, row_defines
from lsq.native.launch import TICKET, Launch, check, float_define, launch
from lsq.ops.scales import started
from lsq.ops.summed_gradient import SummedGradient
from lsq.ops.sums import PartialSums, finish, parts_of
from lsq.program.declare import Activations, Floats, In, Indices, Out, Value, extent, size
from lsq.program.operation import Operation, Spec
from lsq.program.values import Coded


def rotation_table(frequencies: torch.Tensor, places: int, factor: float = 1.0) -> torch.Tensor:
    """float32 [P, R]: cosines, then sines, of each place times `frequencies` float [R/2], all times
    `factor`.

    Angles are taken in float64, so that those of far places are right, and the table is the same
    for every device.
    """
    angle = torch.arange(places, dtype=torch.float64)[:, None] * frequencies.double()
    return (torch.cat([angle.cos(), angle.sin()], dim=1) * factor).float()


class HeadNorms(Value):
    """RMSNorm of each head by itself, with one weight for all of queries and one for all of
    keys."""

    query: In[Floats]
    """[D]"""
    key: In[Floats]
    """[D]"""
    rstd: Floats
    """[M, heads]"""
    epsilon: float


class Rotation(Value):
    """What turns, and how far."""

    table: In[Floats]
    """[P, R], see `rotation_table`."""
    places: In[Indices]
    """[M], of each row in its sentence."""
    width: int
    """D."""
    queries: int
    """Heads of queries, with which a row begins."""
    keys: int
    """Heads of keys behind them."""

    turned = extent(1, "table")
    """R, even and up to D."""

    @size
    def heads(self) -> int:
        """Of queries and keys."""
        return self.queries + self.keys

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[M, C] -> heads of queries and keys [M, heads, D], and what stays."""
        turned, stays = x.tensor_split([self.heads * self.width], dim=1)
        return turned.unflatten(1, (self.heads, self.width)), stays

    def turn(self, heads: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Reference: heads [M, heads, D], turned or turned back."""
        half = self.turned // 2
        cosine, sine = self.table[self.places][:, None].split(half, dim=2)
        sine = -sine if back else sine
        low, high, stays = heads.tensor_split([half, 2 * half], dim=2)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine, stays], dim=2)

    def weights(self, norms: HeadNorms) -> torch.Tensor:
        """Reference: of each head [heads, D]."""
        return torch.cat([norms.query.expand(self.queries, -1), norms.key.expand(self.keys, -1)])

    def defines(self, columns: int) -> dict[str, int]:
        """-D of a kernel on rows of C columns.

        Raises:
            ValueError: kernels have no such heads.
        """
        check(
            self.width % VECTOR == 0 and self.turned % (2 * VECTOR) == 0,
            f"heads of {self.width} columns of which {self.turned} turn cannot run on CUDA: the"
            " width must be a "
            f"multiple of {VECTOR}, and what turns of {2 * VECTOR}",
        )
        return {
            "WIDTH": self.width,
            "TURNED": self.turned,
            "HEADS": self.heads,
            **row_defines(columns),
        }


class Rotate(Operation):
    """Projected queries, keys and values with the queries and keys turned, as floats or rounded
    once to codes."""

    x: In[Activations]
    """[M, C]"""
    rotation: In[Rotation]
    norms: Out[HeadNorms] | None
    out: Out[Activations] | None
    """[M, C]"""
    rounded: Out[Coded] | None
    """[M, C]"""

    rows = extent(0, "x")
    columns = extent(1, "x")

    def limits(self):
        return {"rotation.places": self.rotation.table.shape[0]}

    def reference(self):
        heads, stays = self.rotation.split(self.x)
        rstd = None
        if self.norms is not None:
            rstd = (heads.square().mean(dim=2) + self.norms.epsilon).rsqrt()
            heads = heads * rstd[:, :, None] * self.rotation.weights(self.norms)
        turned = torch.cat([self.rotation.turn(heads).flatten(1), stays], dim=1)
        return (
            rstd,
            turned,
            *(self.rounded.encode(turned) if self.rounded is not None else (None,) * 5),
        )

    def cuda(self):
        return [
            launch(
                "rotation.cu",
                "lsq_rotate",
                self,
                TICKET,
                NORMED=int(self.norms is not None),
                grid=row_blocks(self.rows, self.columns, most=MANY_BLOCKS),
                **float_define(self.x, self.out),
                **self.rotation.defines(self.columns),
                **started(self.rounded),
            )
        ]

    def gradient(self, builder) -> None:
        floats, rounded = builder.product_gradient(self.x)
        norms, sums = self.norms, {}
        if norms is not None:
            sums = {
                "x": self.x,
                "dquery": builder.parameter_gradient(norms.query),
                "dkey": builder.parameter_gradient(norms.key),
            }
        builder.add(
            RotateGradient(
                gradient=builder.gradient_sum(self.out, self.rounded and self.rounded.codes),
                rotation=self.rotation,
                norms=norms,
                **sums,
                dx=SummedGradient(
                    floats=floats, rounded=rounded, sum=builder.bias_gradient(self.x)
                ),
            )
        )


class RotateGradient(Operation):
    """The gradient of what Rotate read: turned back, through the norms, summed for a bias, as
    floats or rounded."""

    gradient: In[Activations]
    """[M, C], before the rounding."""
    rotation: In[Rotation]
    norms: In[HeadNorms] | None
    x: In[Activations] | None
    """[M, C]; None without norms."""
    dx: Out[SummedGradient]
    """Without a clip."""
    dquery: Out[Floats] | None
    """[D], of the norms' weights."""
    dkey: Out[Floats] | None

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    def limits(self):
        return {"rotation.places": self.rotation.table.shape[0]}

    def reference(self):
        rotation, norms, sums = self.rotation, self.norms, (None, None)
        heads, stays = rotation.split(self.gradient)
        heads = rotation.turn(heads, back=True)
        if norms is not None:
            rstd = norms.rstd[:, :, None]
            normalised, scaled = rotation.split(self.x)[0] * rstd, heads * rotation.weights(norms)
            sums = [
                one.sum(dim=(0, 1))
                for one in (heads * normalised).split([rotation.queries, rotation.keys], dim=1)
            ]
            heads = rstd * (scaled - normalised * (scaled * normalised).mean(dim=2, keepdim=True))
        return *self.dx.encode(torch.cat([heads.flatten(1), stays], dim=1), None), *sums

    def leave_sums(self, tensor):
        return self.dx.leave_sums(tensor, self.rows, self.columns, None)

    def cuda_scratch(self) -> list[Spec]:
        """Sums over rows for the bias; for the norms those of each column, of each block and in
        all."""
        parts = parts_of(self.rows, self.columns, 1)
        found = [parts] if self.dx.parts is None else []
        return found if self.norms is None else [*found, parts, ((self.columns,), torch.float32)]

    def cuda(self, *scratch):
        left = iter(scratch)
        partial = next(left) if self.dx.parts is None else self.dx.parts
        of_norms, total = (None, None) if self.norms is None else left
        return [
            launch(
                "rotation.cu",
                "lsq_rotate_gradient",
                self,
                partial,
                of_norms,
                grid=len(partial),
                NORMED=int(self.norms is not None),
                ROUNDED=int(self.dx.rounded is not None),
                **float_define(self.gradient, self.x, self.dx.floats),
                **self.rotation.defines(self.columns),
            ),
            *finish(self.dx.sums(partial, self.columns, None), leaves=self.dx.parts is not None),
            *([] if self.norms is None else self._finish_norms(of_norms, total)),
        ]

    def _finish_norms(self, parts, total) -> list[Launch]:
        """From sums of columns to those of norms, whose heads are rows then."""
        rotation, width = self.rotation, self.rotation.width
        of_columns = PartialSums.of(parts, self.columns, (total,))
        heads = (
            total[: rotation.heads * width].view(-1, width).split([rotation.queries, rotation.keys])
        )
        of_heads = [
            PartialSums.of(one, width, (to,))
            for one, to in zip(heads, (self.dquery, self.dkey), strict=True)
        ]
        return [
            launched for one in (of_columns, *of_heads) for launched in finish(one, leaves=False)
        ]
