"""What stands between two blocks, in one pass over each row: dropout, residual, LayerNorm, rounding.

    z = residual + dropout(update);   out = (z - mean) * rstd * weight + bias, as float, as codes, or both

`update` may be missing (a LayerNorm alone) and so may the norm (z is the result). LayerNorm: Ba et al. 2016, biased
variance. M rows, H columns.
"""

from __future__ import annotations

import torch

from lsq.csrc.geometry import MANY_BLOCKS, row_blocks, row_defines, sums_in_shared_memory
from lsq.csrc.launch import TICKET, float_define, launch
from lsq.ops import kernels
from lsq.program.declare import Activations, Floats, In, Out, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, Dropout, RoundedGradient, dropped


class ResidualNorm(Operation):
    """z [M, H] of a residual and what a block adds to it; its LayerNorm and the codes of that."""

    update: In[Activations] | None
    """[M, H]"""
    residual: In[Activations]
    """[M, H]"""
    dropout: In[Dropout] | None
    weight: In[Floats] | None
    """[H]; None: no norm."""
    bias: In[Floats] | None
    """[H], of the norm."""
    epsilon: float = 1e-5
    z: Out[Activations] | None
    """[M, H]"""
    mean: Out[Floats] | None
    """[M]"""
    rstd: Out[Floats] | None
    """[M]"""
    out: Out[Activations] | None
    """[M, H]"""
    rounded: Out[Coded] | None
    """[M, H]"""

    @size
    def rows(self) -> int:
        return self.residual.shape[0]

    @size
    def columns(self) -> int:
        return self.residual.shape[1]

    def _values(self):
        z = self.residual if self.update is None else self.residual + dropped(self.update, self.dropout)
        if self.weight is None:
            return z, None, None, None
        mean = z.mean(dim=1)
        centred = z - mean[:, None]
        rstd = (centred.square().mean(dim=1) + self.epsilon).rsqrt()
        return z, mean, rstd, centred * rstd[:, None] * self.weight + self.bias

    @property
    def same_values(self):
        return self.out, self.rounded and self.rounded.codes

    def unrounded(self) -> torch.Tensor:
        return self._values()[3]

    def reference(self):
        z, mean, rstd, out = self._values()
        return z, mean, rstd, out, *(self.rounded.encode(out) if self.rounded is not None else (None,) * 4)

    def cuda(self):
        return [
            launch(
                "residual_norm.cu", "lsq_residual_norm", self, TICKET,
                grid=row_blocks(self.rows, self.columns, most=MANY_BLOCKS),
                **float_define(self.update, self.residual, self.z, self.out), **row_defines(self.columns),
            )
        ]  # fmt: skip

    def gradient(self, builder) -> None:
        dout = builder.gradient_sum(*self.same_values) if self.weight is not None else None
        dz = builder.gradient_of(self.z) if self.update is not None else builder.take_gradient(self.residual)
        normed = self.weight is not None
        dresidual = builder.like("d_" + self.residual.name, self.residual) if normed else None
        dupdate = rounded = None
        if self.update is not None:
            dupdate, rounded = builder.product_gradient(self.update)
        builder.add(
            ResidualNormGradient(
                dout=dout, dz=dz, z=(self.residual if self.update is None else self.z) if normed else None,
                mean=self.mean, rstd=self.rstd, weight=self.weight, dropout=self.dropout, dresidual=dresidual,
                dweight=builder.parameter_gradient(self.weight), dbias=builder.parameter_gradient(self.bias),
                dupdate=dupdate, rounded=rounded, dupdate_sum=builder.bias_gradient(self.update),
            )
        )
        builder.accumulate(self.residual, dresidual if normed else dz)


class ResidualNormGradient(Operation):
    """The gradients of ResidualNorm. Without a norm, the gradient of the residual is dz itself."""

    dout: In[Activations] | None
    """[M, H], of the norm's result; None without a norm."""
    dz: In[Activations] | None
    """[M, H], of z itself."""
    z: In[Activations] | None
    """[M, H]"""
    mean: In[Floats] | None
    """[M]"""
    rstd: In[Floats] | None
    """[M]"""
    weight: In[Floats] | None
    """[H]"""
    dropout: In[Dropout] | None
    dresidual: Out[Activations] | None
    """[M, H]"""
    dweight: Out[Floats] | None
    """[H]"""
    dbias: Out[Floats] | None
    """[H]"""
    dupdate: Out[Activations] | None
    """[M, H]"""
    rounded: Out[RoundedGradient] | None
    """dupdate, rounded for the products that go back from there."""
    dupdate_sum: Out[Floats] | None
    """[H], dupdate summed over rows: the gradient of the bias that is in `update`."""

    @size
    def rows(self) -> int:
        return self._upstream.shape[0]

    @size
    def columns(self) -> int:
        return self._upstream.shape[1]

    @property
    def _upstream(self) -> torch.Tensor:
        return self.dz if self.dout is None else self.dout

    @property
    def _updated(self) -> bool:
        return self.dupdate is not None or self.rounded is not None

    def reference(self):
        dweight = dbias = dupdate = dupdate_sum = None
        dresidual, rounded = self.dz, (None, None)
        if self.dout is not None:
            normalised = (self.z - self.mean[:, None]) * self.rstd[:, None]
            dweight, dbias = (self.dout * normalised).sum(dim=0), self.dout.sum(dim=0)
            scaled = self.dout * self.weight
            projected = normalised * (scaled * normalised).mean(dim=1, keepdim=True)
            dresidual = self.rstd[:, None] * (scaled - scaled.mean(dim=1, keepdim=True) - projected)
            if self.dz is not None:
                dresidual = dresidual + self.dz
        if self._updated:
            dupdate = dropped(dresidual, self.dropout)
            dupdate_sum = dupdate.sum(dim=0)
            rounded = self.rounded.encode(dupdate) if self.rounded is not None else rounded
        return dresidual, dweight, dbias, dupdate, *rounded, dupdate_sum

    def _sums(self):
        """Where the sums over rows go, in the order in which the kernel leaves them."""
        return (self.dweight, self.dbias) * (self.dout is not None) + (self.dupdate_sum,) * self._updated

    def cuda_scratch(self):
        return [kernels.partial_scratch(self.rows, self.columns, len(self._sums()))]

    def cuda(self, partial):
        if not self._sums():
            return []
        normed = self.dout is not None
        return [
            launch(
                "residual_norm.cu", "lsq_residual_norm_gradient", self, partial, grid=len(partial),
                shared=sums_in_shared_memory(self.columns, 2) if normed else 0, NORMED=int(normed),
                PRODUCT=int(self._updated), ROUNDED=int(self.rounded is not None), **row_defines(self.columns),
                **float_define(self.dout, self.dz, self.z, self.dresidual, self.dupdate),
            ),
            kernels.finish_sums(partial, self.columns, self._sums(), None, 1.0),
        ]  # fmt: skip
