"""Rotary embeddings: queries and keys are rotated by their positions before they are rounded.

So attention multiplies codes. Norms of each head, if a model has them, precede the rotation.

    n = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + epsilon), over a head
    y[i] = n[i] cos - n[i + R/2] sin,   y[i + R/2] = n[i + R/2] cos + n[i] sin

(RMSNorm as in Henry et al. 2020; RoFormer, Su et al. 2021.) The first R columns of a head are
rotated, in halves as in Llama. The other columns and the values stay. M rows, C columns: N heads of
queries, then of keys, then of values, D columns each; P positions.
"""

from __future__ import annotations

import torch

from lsq.ops.sums import SummedGradient
from lsq.program.declare import Activations, Floats, In, Indices, Out, Value, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded


def rotation_table(frequencies: torch.Tensor, positions: int) -> torch.Tensor:
    """Return float32 [P, R]: cosines, then sines, of positions times `frequencies` float [R/2].

    Angles are float64: far positions are exact enough, and all devices have the same table.
    """
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies.double()
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


class HeadNorms(Value):
    """RMSNorm of each head, with one weight for all queries and one for all keys."""

    query: In[Floats]  # [D]
    key: In[Floats]  # [D]
    rstd: Floats  # [M, heads]
    epsilon: float


class Rotation(Value):
    """The rotated heads, and their angles."""

    table: In[Floats]  # [P, R], see `rotation_table`.
    positions: In[Indices]  # [M], of each row in its sentence.
    width: int  # D.
    queries: int  # Heads of queries, at the beginning of a row.
    keys: int  # Heads of keys behind the queries.

    rotated = extent(1, "table")  # R, even and up to D.

    @size
    def heads(self) -> int:
        """Heads of queries and keys."""
        return self.queries + self.keys

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split [M, C] into heads of queries and keys [M, heads, D], and the columns of values."""
        rotated, stays = x.tensor_split([self.heads * self.width], dim=1)
        return rotated.unflatten(1, (self.heads, self.width)), stays

    def rotate(self, heads: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Reference: heads [M, heads, D], rotated forward or back."""
        half = self.rotated // 2
        cosine, sine = self.table[self.positions][:, None].split(half, dim=2)
        sine = -sine if back else sine
        low, high, stays = heads.tensor_split([half, 2 * half], dim=2)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine, stays], dim=2)

    def weights(self, norms: HeadNorms) -> torch.Tensor:
        """Reference: the weights of all heads [heads, D]."""
        return torch.cat([norms.query.expand(self.queries, -1), norms.key.expand(self.keys, -1)])


class Rotate(Operation):
    """Queries, keys and values with queries and keys rotated, as floats or as codes."""

    x: In[Activations]  # [M, C]
    rotation: In[Rotation]
    norms: Out[HeadNorms] | None
    out: Out[Activations] | None  # [M, C]
    rounded: Out[Coded] | None  # [M, C]

    rows = extent(0, "x")
    columns = extent(1, "x")

    def limits(self):
        return {"rotation.positions": self.rotation.table.shape[0]}

    def reference(self):
        heads, stays = self.rotation.split(self.x)
        rstd = None
        if self.norms is not None:
            rstd = (heads.square().mean(dim=2) + self.norms.epsilon).rsqrt()
            heads = heads * rstd[:, :, None] * self.rotation.weights(self.norms)
        rotated = torch.cat([self.rotation.rotate(heads).flatten(1), stays], dim=1)
        return {
            "norms": {"rstd": rstd},
            "out": rotated,
            "rounded": self.rounded and self.rounded.encode(rotated),
        }

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
    """The gradient of Rotate's input, as floats or rounded, and its sums."""

    gradient: In[Activations]  # [M, C], before the rounding.
    rotation: In[Rotation]
    norms: In[HeadNorms] | None
    x: In[Activations] | None  # [M, C]; None without norms.
    dx: Out[SummedGradient]  # Without a clip.
    dquery: Out[Floats] | None  # [D], of the norms' weights.
    dkey: Out[Floats] | None

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    def limits(self):
        return {"rotation.positions": self.rotation.table.shape[0]}

    def reference(self):
        rotation, norms, sums = self.rotation, self.norms, {}
        heads, stays = rotation.split(self.gradient)
        heads = rotation.rotate(heads, back=True)
        if norms is not None:
            rstd = norms.rstd[:, :, None]
            normalised, scaled = rotation.split(self.x)[0] * rstd, heads * rotation.weights(norms)
            of_heads = (heads * normalised).split([rotation.queries, rotation.keys], dim=1)
            sums = {
                name: part.sum(dim=(0, 1))
                for name, part in zip(("dquery", "dkey"), of_heads, strict=True)
            }
            heads = rstd * (scaled - normalised * (scaled * normalised).mean(dim=2, keepdim=True))
        dx = self.dx.encode(torch.cat([heads.flatten(1), stays], dim=1), None)
        return {"dx": dx, **sums}
