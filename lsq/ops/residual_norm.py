"""Dropout, residual, norm and rounding between two blocks, in one pass over each row.

    z = residual + dropout(update)
    out = (z - mean) * rstd * weight + bias, as float, as codes, or both

`update` may be missing (a norm alone), and so may the norm (z is the result). The backward pass
reads z, or the normalised row (z - mean) * rstd as codes, in a fourth of the bytes. The rounding
error reaches the gradient of z through one inner product of a row. It reaches the gradient of the
weight like the error of any codes.

LayerNorm: Ba et al. 2016, biased variance. RMSNorm: Zhang and Sennrich 2019, without mean and bias.
M rows, H columns.
"""

from __future__ import annotations

import torch

from lsq.ops.sums import PartialSums
from lsq.program.declare import Activations, Codes, Floats, Host, In, Out, Value, extent, factor
from lsq.program.operation import Operation
from lsq.program.values import Coded, Dropout, RoundedGradient, dropped
from lsq.quant import Format, arithmetic


class NormalisedRows(Value):
    """Rows [M, H] of mean square 1 as codes * scale, a scale for each row."""

    format: Host[Format]
    codes: Codes  # [M, H]
    scale: Floats  # [M]; NaN for a row that holds a NaN or an infinity.

    @factor
    def largest(self) -> float:
        return float(self.format.largest)

    def encode(self, centred: torch.Tensor, rstd: torch.Tensor) -> dict[str, torch.Tensor]:
        """Reference: the written fields, from centred [M, H] * rstd [M]."""
        codes, scale = arithmetic.nearest_rows(centred, self.format.largest)
        return {"codes": codes, "scale": scale * rstd}

    def decode(self) -> torch.Tensor:
        """Reference: the values, float32 [M, H]."""
        return self.codes.to(torch.float32) * self.scale[:, None]


class ResidualSum(Value):
    """The sum z of a residual and the update of a block."""

    residual: In[Activations]  # [M, H]
    update: In[Activations] | None  # [M, H]
    dropout: In[Dropout] | None
    z: Activations | None  # [M, H]; None: no operation reads it.

    def compute(self) -> torch.Tensor:
        """Reference: z."""
        if self.update is None:
            return self.residual
        return self.residual + dropped(self.update, self.dropout)

    @property
    def kept(self):
        """The tensor that a backward pass reads as z."""
        return self.residual if self.update is None else self.z

    @property
    def tensors(self) -> tuple:
        return self.residual, self.update, self.z

    def gradient(self, builder, normed: bool) -> ResidualSumGradient:
        """Return fields for the gradients, with the gradient of z so far; the caller accumulates
        dresidual. `normed`: whether another gradient of z comes through a norm."""
        total = builder.bias_gradient(self.update)
        found = ResidualSumGradient(dropout=self.dropout, dupdate_sum=total)
        if self.update is None:
            found.dz = builder.take_gradient(self.residual)
        else:
            found.dz = builder.gradient_of(self.z)
            found.dupdate, found.rounded = builder.product_gradient(self.update)
        if normed:
            found.dresidual = builder.like("d_" + self.residual.name, self.residual)
        return found


class ResidualSumGradient(Value):
    """The gradients of a ResidualSum."""

    dz: In[Activations] | None  # [M, H], of z itself.
    dropout: In[Dropout] | None
    dresidual: Activations | None  # [M, H], dz plus the norm's; None: it equals dz.
    dupdate: Activations | None  # [M, H]
    rounded: RoundedGradient | None  # dupdate, rounded for backward products.
    dupdate_sum: Floats | None  # [H], over rows: the gradient of the bias in `update`.

    @property
    def updated(self) -> bool:
        return self.dupdate is not None or self.rounded is not None

    @property
    def tensors(self) -> tuple:
        return self.dz, self.dresidual, self.dupdate

    def compute(self, through: torch.Tensor | None) -> dict:
        """Reference: the written fields; `through` [M, H]: the gradient through a norm."""
        dresidual = sum(one for one in (through, self.dz) if one is not None)
        if not self.updated:
            return {"dresidual": dresidual}
        dupdate = dropped(dresidual, self.dropout)
        return {
            "dresidual": dresidual,
            "dupdate": dupdate,
            "rounded": self.rounded and self.rounded.encode(dupdate),
            "dupdate_sum": dupdate.sum(dim=0),
        }


class ResidualNorm(Operation):
    """The sum z [M, H] of a residual and the update of a block, the norm of z, and its codes."""

    sum: Out[ResidualSum]
    weight: In[Floats] | None  # [H]; None: no norm.
    bias: In[Floats] | None  # [H], of LayerNorm.
    epsilon: float = 1e-5
    mean: Out[Floats] | None  # [M], of LayerNorm; None: it is not subtracted.
    rstd: Out[Floats] | None  # [M]
    normalised: Out[NormalisedRows] | None  # [M, H], for the backward pass instead of z and mean.
    out: Out[Activations] | None  # [M, H]
    rounded: Out[Coded] | None  # [M, H]

    rows = extent(0, "sum.residual")
    columns = extent(1, "sum.residual")

    @property
    def same_values(self):
        return self.out, self.rounded and self.rounded.codes

    def reference(self):
        z = self.sum.compute()
        if self.weight is None:
            return {"sum": {"z": z}}
        mean = None if self.mean is None else z.mean(dim=1)
        centred = z if mean is None else z - mean[:, None]
        rstd = (centred.square().mean(dim=1) + self.epsilon).rsqrt()
        out = centred * rstd[:, None] * self.weight
        out = out if self.bias is None else out + self.bias
        return {
            "sum": {"z": z},
            "mean": mean,
            "rstd": rstd,
            "normalised": self.normalised and self.normalised.encode(centred, rstd),
            "out": out,
            "rounded": self.rounded and self.rounded.encode(out),
        }

    def gradient(self, builder) -> None:
        normed = self.weight is not None
        dout = builder.gradient_sum(*self.same_values) if normed else None
        down = self.sum.gradient(builder, normed)
        kept = {"z": self.sum.kept, "mean": self.mean}
        kept = {"normalised": self.normalised} if self.normalised else kept
        builder.add(
            ResidualNormGradient(
                dout=dout,
                rstd=self.rstd,
                centred=self.mean is not None,
                weight=self.weight,
                dweight=builder.parameter_gradient(self.weight),
                dbias=builder.parameter_gradient(self.bias),
                sum=down,
                **(kept if normed else {}),
            )
        )
        builder.accumulate(self.sum.residual, down.dresidual if normed else down.dz)


class ResidualNormGradient(Operation):
    """The gradients of ResidualNorm; without a norm, the residual's gradient is that of z."""

    dout: In[Activations] | None  # [M, H], gradient of the norm's result; None without a norm.
    normalised: In[NormalisedRows] | None  # [M, H]; None: `z` is read.
    z: In[Activations] | None  # [M, H]
    mean: In[Floats] | None  # [M], of LayerNorm, where `z` is read.
    rstd: In[Floats] | None  # [M]
    centred: bool = False  # Whether the norm has subtracted the mean, as LayerNorm does.
    weight: In[Floats] | None  # [H]
    dweight: Out[Floats] | None  # [H]
    dbias: Out[Floats] | None  # [H]
    sum: Out[ResidualSumGradient]
    parts: Out[Floats] | None
    """Parts of `dweight`, `dbias`, `sum.dupdate_sum`, in place of these (lsq.ops.sums)."""

    rows = extent(0, "dout", "sum.dz")
    columns = extent(1, "dout", "sum.dz")

    def reference(self):
        if self.dout is None:
            return self._with_parts({"sum": self.sum.compute(None)})
        normalised = self._normalised()
        scaled = self.dout * self.weight
        projected = normalised * (scaled * normalised).mean(dim=1, keepdim=True)
        if self.centred:
            scaled = scaled - scaled.mean(dim=1, keepdim=True)
        through = self.rstd[:, None] * (scaled - projected)
        return self._with_parts(
            {
                "dweight": (self.dout * normalised).sum(dim=0),
                "dbias": self.dout.sum(dim=0),
                "sum": self.sum.compute(through),
            }
        )

    def _normalised(self) -> torch.Tensor:
        if self.normalised is not None:
            return self.normalised.decode()
        return (self.z if self.mean is None else self.z - self.mean[:, None]) * self.rstd[:, None]

    @property
    def norm_sums(self) -> tuple[str, ...]:
        """Names of the fields with the norm's sums over rows."""
        return () if self.dout is None else ("dweight", "dbias")[: 1 + self.centred]

    def _with_parts(self, results: dict) -> dict:
        totals = [results[name] for name in self.norm_sums]
        totals += [results["sum"]["dupdate_sum"]] if self.sum.updated else []
        return results | {"parts": PartialSums.of(self.parts, self.columns, totals).as_parts()}
