"""RMSNorm between two blocks, in one pass over each row: dropout, residual, norm, rounding.

    z = residual + dropout(update);   out = z * rstd * weight, rstd = 1 / sqrt(mean(z^2) + epsilon)

Zhang and Sennrich 2019. `out` is wanted as float, as codes, or both; `update` may be missing. M rows, H columns.
"""

from __future__ import annotations

from lsq.ops import residual_sum
from lsq.ops.residual_sum import ResidualSum, ResidualSumGradient
from lsq.program.declare import Activations, Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded


class RMSNorm(Operation):
    """The norm of z [M, H] by its root mean square, and the codes of that."""

    sum: Out[ResidualSum]
    weight: In[Floats]
    """[H]"""
    epsilon: float = 1e-5
    rstd: Out[Floats]
    """[M]"""
    out: Out[Activations] | None
    """[M, H]"""
    rounded: Out[Coded] | None
    """[M, H]"""

    rows = extent(0, "sum.residual")
    columns = extent(1, "sum.residual")

    def _values(self):
        z = self.sum.compute()
        rstd = (z.square().mean(dim=1) + self.epsilon).rsqrt()
        return z, rstd, z * rstd[:, None] * self.weight

    @property
    def same_values(self):
        return self.out, self.rounded and self.rounded.codes

    def reference(self):
        *others, out = self._values()
        return *others, out, *(self.rounded.encode(out) if self.rounded is not None else (None,) * 4)

    def cuda(self):
        return residual_sum.launches("rms_norm.cu", "lsq_rms_norm", self)

    def gradient(self, builder) -> None:
        dout = builder.gradient_sum(*self.same_values)
        down = self.sum.gradient(builder, normed=True)
        builder.add(
            RMSNormGradient(
                dout=dout, z=self.sum.kept, rstd=self.rstd, weight=self.weight,
                dweight=builder.parameter_gradient(self.weight), sum=down,
            )
        )
        builder.accumulate(self.sum.residual, down.dresidual)


class RMSNormGradient(Operation):
    """The gradients of RMSNorm."""

    dout: In[Activations]
    """[M, H], of the norm's result."""
    z: In[Activations]
    """[M, H]"""
    rstd: In[Floats]
    """[M]"""
    weight: In[Floats]
    """[H]"""
    dweight: Out[Floats]
    """[H]"""
    sum: Out[ResidualSumGradient]

    rows = extent(0, "dout")
    columns = extent(1, "dout")

    def reference(self):
        normalised = self.z * self.rstd[:, None]
        scaled = self.dout * self.weight
        projected = normalised * (scaled * normalised).mean(dim=1, keepdim=True)
        return (self.dout * normalised).sum(dim=0), *self.sum.compute(self.rstd[:, None] * (scaled - projected))

    def cuda_scratch(self):
        return residual_sum.gradient_scratch(self, (self.dweight,))

    def cuda(self, partial):
        return residual_sum.gradient_launches("rms_norm.cu", "lsq_rms_norm_gradient", self, (self.dweight,), partial)
