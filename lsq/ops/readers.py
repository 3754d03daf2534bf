"""What reads the sums of a product on the CPU while a tuner times it: ends of operations, on
operands of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lsq.config import QuantConfig
from lsq.gemm.product_key import ProductKey
from lsq.native import loader, tiles
from lsq.ops.prediction import Prediction
from lsq.ops.project import Project
from lsq.ops.vocabulary_loss import PRODUCT, VocabularyLoss, VocabularyLossGradient
from lsq.program.operation import Operation
from lsq.program.values import Coded, RoundedGradient, Rows, Weight


@dataclass(frozen=True)
class Reader:
    """An operation that stands for all whose product is named alike; see lsq.gemm.multiply."""

    op: str
    """Of whose loops."""
    operation: Operation
    arguments: Sequence[torch.Tensor] = ()

    def multiply(self, product: tiles.TileProduct) -> None:
        """By tiles, and read the sums in the same pass."""
        loader.call(f"lsq_multiply_{self.op}", self.operation, product, *self.arguments)

    def end(self, sums: torch.Tensor, first: int) -> None:
        """Read sums int32 of some rows, from row `first` on."""
        loader.call(f"lsq_end_{self.op}", self.operation, sums, first, len(sums), *self.arguments)


def reader_of(key: ProductKey, a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> Reader:
    """Of a [M, K] and b [N, K], with codes `result` int8 [M, N] that it may write."""
    if key.request.by_columns:
        return _of_a_vocabulary(key, a, b, result)
    return Reader("project", _project(result))


def _project(result: torch.Tensor) -> Project:
    """What rounds the sums of a product; of the operands it knows the numbers of rows alone."""
    rows, columns = result.shape
    config, one = QuantConfig(), torch.ones(1)
    x = Coded(format=config.activations, codes=torch.empty(rows, 0, dtype=torch.int8), scale=one)
    codes = torch.empty(columns, 0, dtype=torch.int8)
    clipped = torch.empty(-(-result.numel() // 8), dtype=torch.uint8)
    rounded = Coded(format=x.format, codes=result, scale=one.clone(), clipped=clipped, clip=one)
    return Project(x=Rows(coded=x), weight=_weight(codes), rounded=rounded)


def _weight(codes: torch.Tensor) -> Weight:
    return Weight(format=QuantConfig().weights, codes=codes, scale=torch.full((len(codes),), 1e-3))


def _of_a_vocabulary(
    key: ProductKey, a: torch.Tensor, b: torch.Tensor, result: torch.Tensor
) -> Reader:
    form = QuantConfig().activations  # of 8 bits, as gradients have
    x = Coded(format=form, codes=a, scale=torch.full((1,), 1e-3))
    target = torch.arange(key.m) % key.n
    given = Prediction(
        x=Rows(coded=x),
        weight=_weight(b),
        target=target,
        vocabulary=key.n,
        padding=-1,
        smoothing=0.1,
    )
    one, row = torch.ones(1), torch.ones(key.m)
    if key.op == PRODUCT:
        loss = VocabularyLoss(prediction=given, loss=one, nll=one, normaliser=row, bound=row)
        parts = torch.empty(loss.cpu_scratch()[0][0])
        return Reader(key.op, loss, (parts, row.clone()))
    rounded = RoundedGradient(
        format=form,
        codes=result,
        scale=row.clone(),
        weight_scale=given.weight.scale,
        key=torch.zeros(1, dtype=torch.int64),
        subsequence=0,
    )
    return Reader(
        key.op,
        VocabularyLossGradient(
            prediction=given, normaliser=row, bound=row, dloss=one, rounded=rounded
        ),
    )
