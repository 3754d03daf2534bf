"""adam: one step of Adam on a float32 master weight, and the new weight as int8 codes in both layouts, in one pass.

Kingma & Ba 2015 with decoupled weight decay (Loshchilov & Hutter 2019), in fairseq's form: the bias correction is part
of the step size, and epsilon is added to the plain square root. N rows, K columns. Outputs may be the inputs' memory.
"""

import math

import torch

from lsq import quant
from lsq.csrc import loader
from lsq.csrc.launch import TICKET, check, launch
from lsq.ops.kernels import check_columns
from lsq.ops.quantize import weight_reference
from lsq.ops.registry import OpDefinition, register

ROWS, COLUMNS, BLOCK = 32, 128, 1024
"""What a block of each kernel updates: a tile of a matrix, or a run of values."""


def scalars(
    learning_rate: float, betas: tuple[float, float], epsilon: float, step: int, *, weight_decay: float = 0.0,
    factor: float = 1.0, torch_epsilon: bool = False,
) -> torch.Tensor:
    """The six numbers of a step, float32 [6], which a captured graph reads from device memory.

    They are: step size with bias correction, 1 - beta1, 1 - beta2, epsilon, decay, factor of the gradient. Betas are
    kept as what they lack to 1, because float32 knows 0.001 better than 0.999.

    Args:
        learning_rate: of this step.
        betas: decay of the first and of the second moment.
        epsilon: added to the root of the second moment.
        step: counted from 1.
        weight_decay: the weight first loses learning_rate * weight_decay of itself (AdamW; fairseq's "adam").
        factor: what the gradient is multiplied by: 1 / loss scale * clipping. NaN and infinity reach the weight.
        torch_epsilon: add epsilon after the bias correction, as torch.optim does; fairseq adds it before.
    """
    correction = math.sqrt(1 - betas[1] ** step)
    return torch.tensor([
        learning_rate * correction / (1 - betas[0] ** step), 1 - betas[0], 1 - betas[1],
        epsilon * (correction if torch_epsilon else 1.0), learning_rate * weight_decay, factor,
    ])  # fmt: skip


def reference(weight, gradient, first, second, numbers, clip, *, bits=8, rows=None, transposed=True):
    """weight, gradient, first and second moment float32 of one shape; numbers float32 [6], see `scalars`.

    Args:
        clip: [N] or [1], already updated, for a weight [N, K] that is wanted as codes; None for any other parameter, of
            any shape.
        bits: width of the codes.
        rows: rows of the codes, at least N; those beyond have codes 0 and scale 1 (the padding of a vocabulary).
        transposed: whether the transposed codes are wanted.

    Returns:
        new weight, new first and second moment; codes int8 [rows, K], transposed codes int8 [K, rows], scale [rows],
        all None without a clip. See quantize_weight.
    """
    size, lack1, lack2, epsilon, decay, factor = numbers
    scaled = gradient * factor
    first = first * (1 - lack1) + scaled * lack1
    second = second * (1 - lack2) + scaled * lack2 * scaled
    weight = weight - weight * decay
    weight = weight - first / (second.sqrt() + epsilon) * size
    if clip is None:
        return weight, first, second, None, None, None
    codes, scale = weight_reference(weight, clip, bits=bits, rows=rows)
    return weight, first, second, codes, codes.t().contiguous() if transposed else None, scale


def cpu(
    weight, gradient, first, second, numbers, clip, new_weight, new_first, new_second, codes, codes_transposed, scale,
    scaled, change, *, bits=8, rows=None, transposed=True,
):
    size, lack1, lack2, epsilon, decay, factor = numbers
    torch.mul(gradient, factor, out=scaled)
    torch.mul(first, 1 - lack1, out=new_first).add_(torch.mul(scaled, lack1, out=change))
    torch.mul(scaled, lack2, out=change).mul_(scaled)
    torch.mul(second, 1 - lack2, out=new_second).add_(change)
    torch.sub(weight, torch.mul(weight, decay, out=change), out=new_weight)
    torch.sqrt(new_second, out=change).add_(epsilon)
    new_weight.sub_(torch.div(new_first, change, out=change).mul_(size))
    if clip is None:
        return
    valid, columns = weight.shape
    loader.call(
        "lsq_quantize_weight", new_weight, clip, clip.numel(), codes, scale, valid, rows or valid, columns,
        quant.maximum_code(bits),
    )
    if codes_transposed is not None:
        codes_transposed.copy_(codes.t())


def scratch(weight, gradient, first, second, numbers, clip, *, bits=8, rows=None, transposed=True):
    return [(weight.shape, torch.float32)] * 2


def cuda(
    weight, gradient, first, second, numbers, clip, new_weight, new_first, new_second, codes, codes_transposed, scale,
    *, bits=8, rows=None, transposed=True,
):
    state = weight, gradient, first, second, numbers
    if clip is None:
        return [
            launch(
                "adam.cu", "lsq_adam", *state, new_weight, new_first, new_second, weight.numel(),
                grid=max(1, -(-weight.numel() // BLOCK)),
            )
        ]
    valid, columns = weight.shape
    count = rows or valid
    check(
        codes is not None and scale is not None,
        "adam was given a clip, but no memory for codes and scale; leave out the clip, or give all of them",
    )
    check_columns(16, **{"the width of a weight": columns})
    if codes_transposed is not None:
        check_columns(16, **{"the number of rows of a weight whose codes are transposed": count})
    return [
        launch(
            "adam.cu", "lsq_adam_codes", *state, clip, new_weight, new_first, new_second, codes, codes_transposed,
            scale, TICKET, clip.numel(), valid, count, columns, float(quant.maximum_code(bits)),
            grid=(-(-count // ROWS), -(-columns // COLUMNS)),
        )
    ]


register(OpDefinition(name="adam", reference=reference, cpu=cpu, cuda=cuda, scratch=scratch))
