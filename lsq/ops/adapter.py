"""Low-rank adapters of a product (LoRA, Hu et al. 2022), which stay floats beside its codes.

    hidden = dropout(x) down^T;   y = base + hidden up^T

y has the epilogue of a product (lsq/ops/project.py): activation, dropout, one rounding. Who reads
the result undoes it in the backward pass.

M rows, K inputs, N outputs, R columns of `hidden`: the rank, or of a product that stands for
several, such as that of queries, keys and values, the ranks of all its adapters; `up` is 0 where an
adapter adds nothing, and has the scaling of the adapters in it.
"""

from __future__ import annotations

import torch

from lsq.native import loader
from lsq.native.geometry import THREADS, VECTOR
from lsq.native.launch import TICKET, Launch, Product, float_define, launch
from lsq.ops.kernels import check_columns
from lsq.ops.nonlinearity import Nonlinearity, epilogue
from lsq.ops.products import converted, converted_scratch
from lsq.ops.scales import started
from lsq.program.declare import Activations, Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded, Dropout, Rows, dropped


class AdapterInput(Operation):
    """What adapters read: dropout(x) as floats."""

    x: In[Rows]
    """[M, K]"""
    dropout: In[Dropout] | None
    values: Out[Floats]
    """[M, K]"""

    rows = extent(0, "x.tensor")
    columns = extent(1, "x.tensor")

    def reference(self):
        x = self.x.floats.float() if self.x.coded is None else self.x.coded.decode()
        return (dropped(x, self.dropout),)

    def cuda(self):
        _check_width(self.columns)
        codes = self.x.coded is not None
        defines = {"CODES": 1} if codes else float_define(self.x.floats)
        return _launch("lsq_adapter_input", self.values.numel(), self, **defines)

    def gradient(self, builder) -> None:
        """Append nothing: the gradient of Adapt, which reads `values`, goes on to x."""


class AdapterInputGradient(Operation):
    """Accumulates into the gradient of x: that of `values` after the same dropout."""

    gradient: In[Floats]
    """[M, K]"""
    dropout: In[Dropout] | None
    added: In[Activations] | None
    """[M, K]"""
    dx: Out[Activations]
    """[M, K]"""

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    def reference(self):
        dx = dropped(self.gradient, self.dropout)
        return (dx if self.added is None else dx + self.added,)

    def cuda(self):
        _check_width(self.columns)
        given = [one for one in (self.added, self.dx) if one is not None]
        return _launch("lsq_adapter_input_gradient", self.dx.numel(), self, **float_define(*given))


class Adapt(Operation):
    """Adds adapters to a product and applies the epilogue to the sum."""

    x: In[Rows]
    """[M, K], of which `values` were made."""
    dropout: In[Dropout] | None
    values: In[Floats]
    """[M, K]"""
    down: In[Floats]
    """[R, K]"""
    up: In[Floats]
    """[N, R]"""
    base: In[Activations]
    """[M, N], the product."""
    hidden: Out[Floats]
    """[M, R]"""
    out: Out[Activations] | None
    """[M, N]"""
    rounded: Out[Coded] | None
    """[M, N]; N is a multiple of 8."""
    nonlinearity: Out[Nonlinearity] | None

    rows = extent(0, "base")
    columns = extent(1, "base")

    def reference(self):
        hidden = self.values @ self.down.t()
        return hidden, *epilogue(self.base + hidden @ self.up.t(), self.nonlinearity, self.rounded)

    def cpu_scratch(self):
        return [] if self.out is not None else [(tuple(self.base.shape), torch.float32)]

    def cpu(self, *scratch):
        (sums,) = scratch or (self.out,)
        torch.mm(self.values, self.down.t(), out=self.hidden)
        torch.addmm(self.base, self.hidden, self.up.t(), out=sums)
        if self.nonlinearity is not None or self.rounded is not None:
            loader.call("lsq_end_adapted", self, sums)

    def cuda_scratch(self):
        return [(tuple(self.base.shape), torch.float32)]

    def cuda(self, product):
        check_columns(VECTOR, **{"the outputs of a product with adapters": self.columns})
        end, products = self.nonlinearity or Nonlinearity(), []
        if self.rows:  # else there may be a scale to write
            products = [
                Product(a=self.values, b=self.down, out=self.hidden),
                Product(a=self.hidden, b=self.up, out=product),
            ]
        ending = launch(
            "adapter.cu",
            "lsq_adapt",
            self,
            product,
            TICKET,
            grid=max(1, _blocks(self.base.numel())),
            ACTIVATION=int(end.activation),
            **started(self.rounded),
            **float_define(self.base, self.out, end.before),
        )
        return [*products, ending]

    def gradient(self, builder) -> None:
        result = self.out if self.rounded is None else self.rounded.codes
        arrived, source = builder.gradient_of(result), self.x.tensor
        values = builder.like(self.values.name, self.values)
        builder.add(AdapterInput(x=self.x.bare(), dropout=self.dropout, values=values))
        wanted = builder.needs_gradient(source)
        dvalues = builder.like("d_" + self.values.name, self.values) if wanted else None
        builder.add(
            AdaptGradient(
                gradient=arrived,
                values=values,
                hidden=self.hidden,
                down=self.down,
                up=self.up,
                ddown=builder.parameter_gradient(self.down),
                dup=builder.parameter_gradient(self.up),
                dvalues=dvalues,
            )
        )
        builder.accumulate(self.base, arrived)
        if not wanted:
            return
        joined, dx = builder.join(source)
        builder.add(
            AdapterInputGradient(gradient=dvalues, dropout=self.dropout, added=joined, dx=dx)
        )


class AdaptGradient(Operation):
    """The gradients of adapters, and of what they read."""

    gradient: In[Activations]
    """[M, N], of the sum before its epilogue."""
    values: In[Floats]
    """[M, K]"""
    hidden: In[Floats]
    """[M, R]"""
    down: In[Floats]
    """[R, K]"""
    up: In[Floats]
    """[N, R]"""
    ddown: Out[Floats] | None
    """[R, K]"""
    dup: Out[Floats] | None
    """[N, R]"""
    dvalues: Out[Floats] | None
    """[M, K]"""

    def reference(self):
        gradient = self.gradient.float()
        dhidden = gradient @ self.up
        return dhidden.t() @ self.values, gradient.t() @ self.hidden, dhidden @ self.down

    def cpu_scratch(self):
        return [(tuple(self.hidden.shape), torch.float32)]

    def cpu(self, dhidden):
        torch.mm(self.gradient, self.up, out=dhidden)
        if self.ddown is not None:
            torch.mm(dhidden.t(), self.values, out=self.ddown)
        if self.dup is not None:
            torch.mm(self.gradient.t(), self.hidden, out=self.dup)
        if self.dvalues is not None:
            torch.mm(dhidden, self.down, out=self.dvalues)

    def cuda_scratch(self):
        hidden = tuple(self.hidden.shape), torch.float32
        return [hidden, *converted_scratch(self.gradient, torch.float32)]

    def cuda(self, dhidden, *scratch):
        if not self.values.numel():
            return []
        widened, gradient = converted(self.gradient, None, torch.float32, iter(scratch))
        products = [
            Product(a=gradient, b=self.up, out=dhidden, transpose_b=True),
            Product(a=dhidden, b=self.values, out=self.ddown, transpose_a=True, transpose_b=True),
            Product(a=gradient, b=self.hidden, out=self.dup, transpose_a=True, transpose_b=True),
            Product(a=dhidden, b=self.down, out=self.dvalues, transpose_b=True),
        ]
        return [*widened, *(product for product in products if product.out is not None)]


def _check_width(columns: int) -> None:
    check_columns(VECTOR, **{"the width of an adapter's input": columns})


def _blocks(count: int) -> int:
    """Of a kernel over so many values, a multiple of VECTOR."""
    return -(-count // (VECTOR * THREADS))


def _launch(name: str, count: int, *arguments, **defines: int) -> list[Launch]:
    """A kernel over so many values; nothing for none."""
    grid = _blocks(count)
    return [launch("adapter.cu", name, *arguments, grid=grid, **defines)] if grid else []
