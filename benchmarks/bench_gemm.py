"""Matrix products of Transformer layers on a GPU: int8 by cuBLASLt and by torch._int_mm, against
bfloat16 by torch.

For every linear layer with x [M, K] and weight [N, K]: the product of the forward pass, that of the
input's gradient and that of the weight's gradient; and 8192 x 8192 x 8192. Every int8 result is
compared with exact arithmetic, on random codes, before it is timed. `cublaslt` is the algorithm
that the library's heuristic names first, `best` the fastest of all those that it names.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import common
import gpu
import torch
from operations import MODELS, PADDED

from lsq.gemm.cublaslt import CANDIDATES
from lsq.gemm.product_key import key_of
from lsq.native.launch import Product

ROWS = (4096, 8192, 16384, 2048, 1024, 512, 256)
"""Tokens of a batch; the usual ones first."""
SQUARE = 8192
QUICK_ROWS, QUICK_SIZES, QUICK_VOCABULARY, QUICK_SQUARE = (32,), {"quick": (16, 48, 1)}, 64, 64
CHECKED = 1e-2
"""Largest relative error of a product in bfloat16."""
PEAKS = {
    "NVIDIA A100": (312, 624),
    "NVIDIA H100 PCIe": (756, 1513),
    "NVIDIA H100": (989, 1979),
    "NVIDIA H200": (989, 1979),
    "NVIDIA GH200": (989, 1979),
    "NVIDIA B200": (2250, 4500),
    "NVIDIA L40S": (362, 733),
    "NVIDIA L4": (121, 242),
}
"""Beginning of a device's name -> datasheet peaks of dense products in 10^12 operations a second:
bfloat16, int8."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """out [m, n] = a [m, k] times b [n, k] transposed, and where it occurs first."""

    model: str
    layer: str
    product: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.model} {self.layer}, {self.product} {self.m} x {self.n} x {self.k}"

    @property
    def tokens(self) -> int:
        return self.k if self.product == "weight gradient" else self.m

    @property
    def tera_operations(self) -> float:
        return 2e-12 * self.m * self.n * self.k


def layers(hidden: int, feed_forward: int, vocabulary: int) -> dict[str, tuple[int, int]]:
    """Name of each linear layer -> (outputs, inputs)."""
    return {
        "query key value": (3 * hidden, hidden),
        "attention out": (hidden, hidden),
        "feed-forward 1": (feed_forward, hidden),
        "feed-forward 2": (hidden, feed_forward),
        "memory key value": (2 * hidden, hidden),
        "vocabulary": (vocabulary, hidden),
    }


def shapes(quick: bool) -> list[Shape]:
    """Every product once, in the order in which they are measured."""
    square = QUICK_SQUARE if quick else SQUARE
    found = [Shape(model="any", layer="square", product="forward", m=square, n=square, k=square)]
    for m in QUICK_ROWS if quick else ROWS:
        for model, (hidden, inner, _) in (QUICK_SIZES if quick else MODELS).items():
            for layer, (n, k) in layers(
                hidden, inner, QUICK_VOCABULARY if quick else PADDED
            ).items():
                where = {"model": model, "layer": layer}
                found += [
                    Shape(**where, product="forward", m=m, n=n, k=k),
                    Shape(**where, product="input gradient", m=m, n=k, k=n),
                    Shape(**where, product="weight gradient", m=n, n=k, k=m),
                ]
    once: dict[tuple, Shape] = {}
    for shape in found:
        once.setdefault((shape.m, shape.n, shape.k), shape)
    return list(once.values())


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float64 a [M, K] times b [N, K] transposed: exact for codes."""
    return a.double() @ b.double().t()


def check_codes(
    run: Callable[[], object], out: torch.Tensor, expected: torch.Tensor, what: str
) -> None:
    """Run and compare int32 sums with `expected`.

    Raises:
        RuntimeError: they differ.
    """
    out.fill_(-85)
    run()
    wrong = int((out != expected).sum())
    if wrong:
        raise RuntimeError(f"{what}: {wrong} of {out.numel()} sums are wrong")


def check_halves(
    run: Callable[[], object], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> None:
    """Run and compare a bfloat16 result with float64.

    Raises:
        RuntimeError: it is further away than rounding explains.
    """
    out.fill_(float("nan"))
    run()
    expected = exact(a, b)
    error = float((out.double() - expected).norm() / expected.norm())
    if not error < CHECKED:
        raise RuntimeError(f"bfloat16 product: relative error {error}")


def nth(number: int) -> Callable:
    return lambda products, key, found: found[number]


class Bench:
    """Measures products on one device, with each of cuBLASLt's candidates."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.devices = [
            gpu.open_device(options.device, nth(number)) for number in range(CANDIDATES)
        ]
        self.device = self.devices[0]
        peaks = next(
            (peaks for name, peaks in PEAKS.items() if self.device.name.startswith(name)),
            (None, None),
        )
        self.bfloat16_peak = options.peak_bfloat16 or peaks[0]
        self.int8_peak = options.peak_int8 or peaks[1]

    def sides(self, shape: Shape) -> dict[str, Callable[[], object]]:
        """Functions that multiply every copy of the operands once; all have been checked."""
        place, count = self.device.place, self._copies(shape)
        sizes = ((count, shape.m, shape.k), (count, shape.n, shape.k))
        a, b = (torch.randint(-127, 128, size, dtype=torch.int8, device=place) for size in sizes)
        out = torch.empty((count, shape.m, shape.n), dtype=torch.int32, device=place)
        products = [Product(a=a[i], b=b[i], out=out[i]) for i in range(count)]
        expected = exact(a[0], b[0]).int()
        candidates = len(self.device.products.candidates(key_of(products[0])))
        found = {
            f"candidate {number}": self.devices[number].list(products).run
            for number in range(candidates)
        }
        found["int_mm"] = lambda: [torch._int_mm(a[i], b[i].t(), out=out[i]) for i in range(count)]
        for name, run in found.items():
            check_codes(run, out[0], expected, f"{shape}, {name}")
        del expected
        halves = [torch.randn(size, device=place).bfloat16() for size in sizes]
        half_out = torch.empty(out.shape, dtype=torch.bfloat16, device=place)
        found["bfloat16"] = lambda: [
            torch.mm(halves[0][i], halves[1][i].t(), out=half_out[i]) for i in range(count)
        ]
        check_halves(found["bfloat16"], halves[0][0], halves[1][0], half_out[0])
        return found

    def _copies(self, shape: Shape) -> int:
        operands, result = shape.m * shape.k + shape.n * shape.k, shape.m * shape.n
        return gpu.copies(self.device, operands + 2 * result, 3 * operands + 6 * result)

    def rows(self, shape: Shape) -> Iterator[dict]:
        count, sides = self._copies(shape), {name: [run] for name, run in self.sides(shape).items()}
        timings = gpu.alternate(self.device, sides, rounds=self.options.rounds)
        tops = {
            name: count * shape.tera_operations / timing.median for name, timing in timings.items()
        }
        best = max((name for name in tops if name.startswith("candidate")), key=tops.get)
        first = tops["candidate 0"]
        yield {
            "model": shape.model,
            "layer": shape.layer,
            "product": shape.product,
            "tokens": shape.tokens,
            "m": shape.m,
            "n": shape.n,
            "k": shape.k,
            "cublaslt_tops": first,
            "best_tops": tops[best],
            "best": best,
            "int_mm_tops": tops["int_mm"],
            "bfloat16_tops": tops["bfloat16"],
            "ratio": first / tops["bfloat16"],
            "best_ratio": tops[best] / tops["bfloat16"],
            "of_int8_peak": first / self.int8_peak if self.int8_peak else None,
            "best_of_int8_peak": tops[best] / self.int8_peak if self.int8_peak else None,
            "of_bfloat16_peak": tops["bfloat16"] / self.bfloat16_peak
            if self.bfloat16_peak
            else None,
        }


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    gpu.add_options(parser, gpu.EMULATOR, gpu.CUDA)
    for dtype in ("int8", "bfloat16"):
        parser.add_argument(
            f"--peak-{dtype}",
            type=float,
            metavar="TOPS",
            help="peak of dense products, instead of the datasheet's",
        )
    options = common.parse(parser, arguments)
    options.quick |= options.device == gpu.EMULATOR
    bench = Bench(options)

    def conditions() -> dict:
        return common.conditions(
            options,
            **gpu.conditions(bench.device),
            baseline="torch.mm in bfloat16",
            candidates=CANDIDATES,
            peak_tops={"bfloat16": bench.bfloat16_peak, "int8": bench.int8_peak},
            dtypes=["int8 to int32", "bfloat16"],
        )

    survey = gpu.survey("gemm", conditions(), options)
    survey.measure((str(shape), partial(bench.rows, shape)) for shape in shapes(options.quick))
    return gpu.report("gemm", survey, conditions(), options)


if __name__ == "__main__":
    sys.exit(main())
