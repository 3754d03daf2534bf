"""The loss in a program, against autograd."""

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from lsq.ops.prediction import Prediction
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.vocabulary_loss import VocabularyLoss
from lsq.program.tensor import Kind
from lsq.program.values import Rows
from lsq.quant import quantize
from tests.ops.compare import KEY
from tests.ops.programs import builder, run
from tests.ops.test_vocabulary_loss import INNER, PADDING, operands
from tests.quant.fake import fake_quantize


def program_of(quant: dict, rows: int, words: int, padded: int):
    """(program, its weight, clip of its input or None): the loss of the rounded norm of x."""
    made = builder("loss", **quant)
    x, target = made.input("x", (rows, INNER)), made.input("target", (rows,), torch.int64)
    norm = ResidualNorm(
        sum=ResidualSum(residual=x),
        weight=made.parameter("norm", (INNER,), Kind.NORM_WEIGHT),
        bias=made.parameter("norm_bias", (INNER,), Kind.NORM_BIAS),
        mean=made.tensor("mean", (rows,)),
        rstd=made.tensor("rstd", (rows,)),
    )
    weight = made.weight("weight", (words, INNER), rows=padded)
    x = Rows()
    given = Prediction(
        x=x, weight=weight, target=target, vocabulary=words, padding=PADDING, smoothing=0.1
    )
    loss = VocabularyLoss(
        prediction=given, loss=made.tensor("loss", (1,)), nll=made.tensor("nll", (1,))
    )
    if made.quant.quantized:
        norm.rounded = x.coded = made.coded("out", (rows, INNER), "clip")
    else:
        norm.out = x.floats = made.tensor("out", (rows, INNER))
    loss.normaliser = made.tensor("normaliser", (rows,))
    if made.quant.quantized and made.quant.backward == "int8":
        loss.bound = made.tensor("bound", (rows,))
    made.add(norm)
    made.add(loss)
    for output in (loss.loss, loss.nll):
        made.output(output)
    return made.build(), weight, norm.rounded and norm.rounded.clip


@pytest.mark.parametrize(
    "quant, allowed",
    [
        ({"mode": "float"}, 1e-5),
        ({"backward": "float", "clips": "learned"}, 1e-5),
        ({"backward": "int8", "clips": "learned"}, 0.05),
        ({"backward": "float", "clip_gradient": "lsq", "weight_granularity": "tensor"}, 1e-5),
    ],
)
def test_gradients_of_a_program_are_those_of_autograd(quant, allowed):
    rows, words, padded = 41, 33, 33 if quant.get("mode") == "float" else 48
    program, weight, clip = program_of(quant, rows, words, padded)
    x, values, target = operands(rows, words)
    learned = {weight.values: values}
    if clip is not None:
        learned |= {clip: torch.tensor([1.5]), weight.clip: torch.full(weight.clip.shape, 0.5)}
    (d_loss, d_nll), (source, *_) = program.output_gradients, program.differentiable
    norm = {
        one: torch.full((INNER,), float(one.name == "norm"))
        for one in program.parameters
        if one not in learned
    }
    given = (
        {one: tensor for one, tensor in zip(program.inputs, (KEY, x, target), strict=False)}
        | learned
        | norm
    )
    given |= {d_loss: torch.tensor([0.5]), d_nll: torch.zeros(1)}
    if clip is not None:
        codes, scale, _ = quantize(values, learned[weight.clip])
        beyond = padded - words
        given[weight.codes] = torch.nn.functional.pad(codes, (0, 0, 0, beyond))
        given[weight.scale] = torch.nn.functional.pad(scale.expand(words), (0, beyond), value=1.0)
    found = run(program, given)
    leaves = {source: x} | learned
    for tensor in leaves.values():
        tensor.requires_grad_()
    rows_of_x = torch.nn.functional.layer_norm(x, (INNER,))
    if clip is not None:
        clip_gradient = quant.get("clip_gradient", "pact")
        rows_of_x = fake_quantize(rows_of_x, learned[clip], clip_gradient=clip_gradient)
        values = fake_quantize(values, learned[weight.clip], clip_gradient=clip_gradient)
    loss, _ = label_smoothed_nll_loss(
        (rows_of_x @ values.t()).log_softmax(-1), target, 0.1, ignore_index=PADDING
    )
    wanted = dict(zip(leaves, torch.autograd.grad(0.5 * loss, leaves.values()), strict=True))
    gradients = dict(zip(program.differentiable, program.gradients, strict=True))
    for tensor, gradient in wanted.items():
        error = (found[gradients[tensor]] - gradient).norm()
        assert error <= allowed * gradient.norm(), f"{tensor.name}: {error / gradient.norm()}"
