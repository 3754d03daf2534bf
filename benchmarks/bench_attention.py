"""Attention on the CPU beside PyTorch's flash attention, forward and backward.

lsq reads codes where a projection wrote them and makes float32; PyTorch reads bfloat16 or float32
that stand in heads already, and makes the same dtype. "ratio" is PyTorch's time in bfloat16 over
the side's. PyTorch's kernel has no
dropout, no shared keys here and no window: lsq's times with these stand alone.
"""

from collections.abc import Callable, Iterator

import common
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lsq.native import loader, tiles
from lsq.ops.attention import Attention, AttentionGradient, Heads, Projected
from lsq.ops.sums import SummedGradient
from lsq.program.values import Coded, Dropout, Rows
from lsq.quant import Format, Grain
from lsq.run.backends import backend

HEADS, WIDTH = 8, 64
LENGTHS = ((32, 32), (256, 4), (1024, 1), (4096, 1))
"""(tokens of a sentence, sentences)"""
QUICK = ((5, 2),)
GROUP, WINDOW = 4, 512
"""Heads of queries that share keys, and keys that a query sees, on sides that have this."""


def of_lsq(
    length: int,
    sentences: int,
    causal: bool,
    probability: float,
    *,
    group: int = 1,
    window: int = 0,
) -> tuple[Callable, Callable]:
    """Forward and backward pass of self-attention on codes, on the CPU's loops."""
    rows, hidden, of_keys = length * sentences, HEADS * WIDTH, HEADS * WIDTH // group
    codes = torch.randint(-127, 128, (rows, hidden + 2 * of_keys), dtype=torch.int8)
    coded = Coded(
        format=Format(name="activation", bits=8, grain=Grain.TENSOR),
        codes=codes,
        scale=torch.tensor([1.0 / 64]),
        clipped=None,
        error=None,
        clip=torch.tensor([127.0 / 64]),
    )
    read, cu_seqlens = Rows(coded=coded), torch.arange(0, rows + 1, length, dtype=torch.int32)
    dropout = (
        Dropout(key=torch.tensor([7]), subsequence=1, probability=probability)
        if probability
        else None
    )
    heads = Heads(
        q=Projected(rows=read, column=0),
        k=Projected(rows=read, column=hidden),
        v=Projected(rows=read, column=hidden + of_keys),
        cu_seqlens=cu_seqlens,
        key_cu_seqlens=cu_seqlens,
        count=HEADS,
        group=group,
        width=WIDTH,
        causal=causal,
        window=window,
        dropout=dropout,
    )
    forward = Attention(
        heads=heads, out=torch.empty(rows, hidden), rounded=None, log_sum=torch.empty(rows, HEADS)
    )
    backward = AttentionGradient(
        dcontext=torch.randn(rows, hidden),
        heads=heads,
        log_sum=forward.log_sum,
        dq=SummedGradient(
            floats=torch.empty(codes.shape), rounded=None, sum=None, clip=None, parts=None
        ),
        dkv=None,
    )
    place = backend("cpu")
    runs = [
        place.prepare(
            [(one, [torch.empty(shape, dtype=dtype) for shape, dtype in place.scratch(one)])]
        )
        for one in (forward, backward)
    ]
    return runs[0], runs[1]


def of_torch(
    length: int, sentences: int, causal: bool, dtype: torch.dtype
) -> tuple[Callable, Callable]:
    """Forward and backward pass of PyTorch's flash attention."""
    q, k, v = (
        torch.randn(sentences, HEADS, length, WIDTH, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    context = attend()
    upstream = torch.randn_like(context)

    def forward() -> None:
        with torch.no_grad():
            attend()

    return forward, lambda: torch.autograd.grad(context, (q, k, v), upstream, retain_graph=True)


def rows(length: int, sentences: int, causal: bool, options) -> Iterator[dict]:
    passes = {
        "torch bfloat16": of_torch(length, sentences, causal, torch.bfloat16),
        "torch float32": of_torch(length, sentences, causal, torch.float32),
        "lsq": of_lsq(length, sentences, causal, 0.0),
        "lsq, dropout": of_lsq(length, sentences, causal, options.dropout),
        "lsq, shared keys": of_lsq(length, sentences, causal, 0.0, group=GROUP),
    }
    if causal:
        passes["lsq, window"] = of_lsq(length, sentences, causal, 0.0, window=WINDOW)
    for index, name in enumerate(("forward", "backward")):
        timings = common.alternate(
            {side: both[index] for side, both in passes.items()}, rounds=options.rounds
        )
        for side, timing in timings.items():
            yield {
                "tokens": length,
                "sentences": sentences,
                "causal": causal,
                "pass": name,
                "side": side,
                "milliseconds": 1e3 * timing.median,
                "fastest": 1e3 * timing.fastest,
                "ratio": timings["torch bfloat16"].median / timing.median,
                "ratio_of_fastest": timings["torch bfloat16"].fastest / timing.fastest,
            }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="probability, of lsq's last side"
    )
    parser.add_argument(
        "--instructions",
        choices=tiles.INSTRUCTIONS,
        default="amx",
        help="the fastest that lsq's sides may multiply by",
    )
    options = common.parse(parser, arguments)
    loader.call("lsq_limit_attention", tiles.INSTRUCTIONS[options.instructions])
    shapes = QUICK if options.quick else LENGTHS
    table = [
        row
        for length, sentences in shapes
        for causal in (False, True)
        for row in rows(length, sentences, causal, options)
    ]
    conditions = common.conditions(
        options,
        baseline="PyTorch's flash attention in bfloat16",
        heads=HEADS,
        width=WIDTH,
        group=GROUP,
        window=WINDOW,
        dropout=options.dropout,
        library=loader.description(),
        allowed=options.instructions,
        dtypes=["int8", "float32", "bfloat16"],
    )
    common.report("attention", table, conditions, options)


if __name__ == "__main__":
    main()
