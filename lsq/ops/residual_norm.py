"""What stands between two blocks, in one pass over each row: dropout, residual, norm, rounding.

    z = residual + dropout(update);   out = (z - mean) * rstd * weight + bias, as float, as codes, or both

`update` may be missing (a norm alone) and so may the norm (z is the result). LayerNorm: Ba et al. 2016, biased
variance. RMSNorm: Zhang and Sennrich 2019, without mean and bias. M rows, H columns. Loops and kernels do what is said
of sums in residual_sum.h and residual_sum.cuh.
"""

from __future__ import annotations

from lsq.csrc.geometry import MANY_BLOCKS, row_blocks, row_defines, sums_in_shared_memory
from lsq.csrc.launch import TICKET, float_define, launch
from lsq.ops import kernels
from lsq.ops.residual_sum import ResidualSum, ResidualSumGradient
from lsq.program.declare import Activations, Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded


class ResidualNorm(Operation):
    """z [M, H] of a residual and what a block adds to it; its norm and the codes of that."""

    sum: Out[ResidualSum]
    weight: In[Floats] | None
    """[H]; None: no norm."""
    bias: In[Floats] | None
    """[H], of LayerNorm."""
    epsilon: float = 1e-5
    mean: Out[Floats] | None
    """[M], of LayerNorm; None: it is not subtracted."""
    rstd: Out[Floats] | None
    """[M]"""
    out: Out[Activations] | None
    """[M, H]"""
    rounded: Out[Coded] | None
    """[M, H]"""

    rows = extent(0, "sum.residual")
    columns = extent(1, "sum.residual")

    @property
    def same_values(self):
        return self.out, self.rounded and self.rounded.codes

    def reference(self):
        z = self.sum.compute()
        if self.weight is None:
            return z, *(None,) * 7
        mean = None if self.mean is None else z.mean(dim=1)
        centred = z if mean is None else z - mean[:, None]
        rstd = (centred.square().mean(dim=1) + self.epsilon).rsqrt()
        out = centred * rstd[:, None] * self.weight
        out = out if self.bias is None else out + self.bias
        return z, mean, rstd, out, *(self.rounded.encode(out) if self.rounded is not None else (None,) * 4)

    def cuda(self):
        return [
            launch(
                "residual_norm.cu", "lsq_residual_norm", self, TICKET,
                grid=row_blocks(self.rows, self.columns, most=MANY_BLOCKS),
                **float_define(*self.sum.tensors, self.out), **row_defines(self.columns),
            )
        ]  # fmt: skip

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
        centred = self.z if self.mean is None else self.z - self.mean[:, None]
        normalised = centred * self.rstd[:, None]
        scaled = self.dout * self.weight
        projected = normalised * (scaled * normalised).mean(dim=1, keepdim=True)
        if self.mean is not None:
            scaled = scaled - scaled.mean(dim=1, keepdim=True)
        through = self.rstd[:, None] * (scaled - projected)
        return (self.dout * normalised).sum(dim=0), self.dout.sum(dim=0), *self.sum.compute(through)

    def _sums(self) -> tuple:
        """Where the norm's own sums over rows go: its weight's, and that of LayerNorm's bias."""
        found = (self.dweight, self.dbias)
        return () if self.dout is None else found[:1] if self.mean is None else found

    def cuda_scratch(self):
        return [kernels.partial_scratch(self.rows, self.columns, len(self._sums()) + self.sum.updated)]

    def cuda(self, partial):
        sums, down = self._sums(), self.sum
        outs = (*sums, down.dupdate_sum) if down.updated else sums
        if not outs:
            return []
        return [
            launch(
                "residual_norm.cu", "lsq_residual_norm_gradient", self, partial, grid=len(partial),
                shared=sums_in_shared_memory(self.columns, len(sums)), NORM_SUMS=len(sums), PRODUCT=int(down.updated),
                ROUNDED=int(down.rounded is not None), **float_define(self.dout, self.z, *down.tensors),
                **row_defines(self.columns),
            ),
            kernels.finish_sums(partial, self.columns, outs),
        ]  # fmt: skip
