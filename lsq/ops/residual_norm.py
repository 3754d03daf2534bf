"""What stands between two blocks, in one pass over each row: dropout, residual, LayerNorm, rounding.

    z = residual + dropout(update);   out = (z - mean) * rstd * weight + bias, as float, as codes, or both

`update` may be missing (a LayerNorm alone) and so may the norm (z is the result). LayerNorm: Ba et al. 2016, biased
variance. M rows, H columns.
"""

from __future__ import annotations

from lsq.ops import residual_sum
from lsq.ops.residual_sum import ResidualSum, ResidualSumGradient
from lsq.program.declare import Activations, Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded


class ResidualNorm(Operation):
    """z [M, H] of a residual and what a block adds to it; its LayerNorm and the codes of that."""

    sum: Out[ResidualSum]
    weight: In[Floats] | None
    """[H]; None: no norm."""
    bias: In[Floats] | None
    """[H], of the norm."""
    epsilon: float = 1e-5
    mean: Out[Floats] | None
    """[M]"""
    rstd: Out[Floats] | None
    """[M]"""
    out: Out[Activations] | None
    """[M, H]"""
    rounded: Out[Coded] | None
    """[M, H]"""

    rows = extent(0, "sum.residual")
    columns = extent(1, "sum.residual")

    def _values(self):
        z = self.sum.compute()
        if self.weight is None:
            return z, None, None, None
        mean = z.mean(dim=1)
        centred = z - mean[:, None]
        rstd = (centred.square().mean(dim=1) + self.epsilon).rsqrt()
        return z, mean, rstd, centred * rstd[:, None] * self.weight + self.bias

    @property
    def same_values(self):
        return self.out, self.rounded and self.rounded.codes

    def reference(self):
        *others, out = self._values()
        return *others, out, *(self.rounded.encode(out) if self.rounded is not None else (None,) * 4)

    def cuda(self):
        return residual_sum.launches("residual_norm.cu", "lsq_residual_norm", self)

    def gradient(self, builder) -> None:
        normed = self.weight is not None
        dout = builder.gradient_sum(*self.same_values) if normed else None
        down = self.sum.gradient(builder, normed)
        builder.add(
            ResidualNormGradient(
                dout=dout, z=self.sum.kept if normed else None, mean=self.mean, rstd=self.rstd, weight=self.weight,
                dweight=builder.parameter_gradient(self.weight), dbias=builder.parameter_gradient(self.bias), sum=down,
            )
        )
        builder.accumulate(self.sum.residual, down.dresidual if normed else down.dz)


class ResidualNormGradient(Operation):
    """The gradients of ResidualNorm. Without a norm, the gradient of the residual is that of z itself."""

    dout: In[Activations] | None
    """[M, H], of the norm's result; None without a norm."""
    z: In[Activations] | None
    """[M, H]"""
    mean: In[Floats] | None
    """[M]"""
    rstd: In[Floats] | None
    """[M]"""
    weight: In[Floats] | None
    """[H]"""
    dweight: Out[Floats] | None
    """[H]"""
    dbias: Out[Floats] | None
    """[H]"""
    sum: Out[ResidualSumGradient]

    rows = extent(0, "dout", "sum.dz")
    columns = extent(1, "dout", "sum.dz")

    def reference(self):
        if self.dout is None:
            return None, None, *self.sum.compute(None)
        normalised = (self.z - self.mean[:, None]) * self.rstd[:, None]
        scaled = self.dout * self.weight
        projected = normalised * (scaled * normalised).mean(dim=1, keepdim=True)
        through = self.rstd[:, None] * (scaled - scaled.mean(dim=1, keepdim=True) - projected)
        return (self.dout * normalised).sum(dim=0), self.dout.sum(dim=0), *self.sum.compute(through)

    def _sums(self):
        return (self.dweight, self.dbias) if self.dout is not None else ()

    def cuda_scratch(self):
        return residual_sum.gradient_scratch(self, self._sums())

    def cuda(self, partial):
        return residual_sum.gradient_launches(
            "residual_norm.cu", "lsq_residual_norm_gradient", self, self._sums(), partial,
            NORMED=int(self.dout is not None),
        )  # fmt: skip
