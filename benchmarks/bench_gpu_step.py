"""One training step of a Transformer on a GPU: lsq in int8, and fairseq's in bfloat16.

A step is forward, label-smoothed loss, backward and Adam on float32 copies of the weights, as
`fairseq-train --bf16`
does it: "fairseq". lsq has its layers in planned memory, activations in bfloat16, and its own Adam.
The other sides have PyTorch's fused Adam in place of fairseq's loop over the weights, and fairseq's
layers and loss under torch.compile, without and with torchao's int8 mixed-precision training. The
largest step of lsq comes first, by itself; then each side takes turns with "torch.compile". A
profile says what each kernel of a step takes.
"""

import argparse
import dataclasses
import gc
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import common
import gpu
import torch
import transformer
from fairseq import utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim.fp16_optimizer import FP16Optimizer
from operations import MODELS, PADDED
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lsq.fairseq.device import use
from lsq.layers.memory import plan_memory
from lsq.optim import Adam
from lsq.run.backends import backend as lsq_backend

ARGUMENTS = [*transformer.FAIRSEQ, "--bf16", "--optimizer", "adam"]
ARGUMENTS += ["--adam-betas", "(0.9, 0.98)", "--lr", "0.0005"]
LSQ = [*transformer.LSQ, "--lsq-backward", "int8"]
TOKENS = (4096, 8192)
LENGTH = 32
"""Tokens of a sentence."""
STEPS = 5
"""Steps between two looks at the clock: the host runs ahead of the GPU, as in training."""
WARM_UP = common.SETTLED
PHASES = ("forward", "backward", "update")


class Side(transformer.Side):
    """A way to train in bfloat16 on one device."""

    def __init__(
        self,
        shape: transformer.Shape,
        place: torch.device,
        *,
        fused: bool,
        change: Callable | None = None,
        backend: str = "inductor",
    ):
        """Build it.

        Args:
            fused: PyTorch's fused Adam, not fairseq's.
            change: called with the side and `backend` before the optimizer is made.
            backend: of torch.compile.

        Raises:
            ImportError: `change` needs a package that is not installed.
        """
        chosen = transformer.parse(shape, ARGUMENTS)
        with place:
            self.model, self.criterion = transformer.build(shape, chosen)
        self.model.to(torch.bfloat16)
        self.autocast = False
        if change is not None:
            change(self, backend)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = FP16Optimizer.build_optimizer(
            convert_namespace_to_omegaconf(chosen), weights
        )
        if fused:
            betas = self.optimizer.optimizer_config["betas"]
            self.optimizer.optimizer = torch.optim.AdamW(
                self.optimizer.fp32_params,
                lr=self.optimizer.get_lr(),
                betas=betas,
                weight_decay=0.0,
                fused=True,
            )

    def backward(self, sample: dict, loss: torch.Tensor) -> None:
        self.optimizer.backward(loss / sample["ntokens"])


class LsqSide(transformer.Side):
    """lsq's layers, forward and backward in int8; the parameters are float32."""

    def __init__(self, shape: transformer.Shape, place: torch.device, *, backend: str):
        """Build it; `backend` of torch.compile is not needed."""
        super().__init__(shape, arguments=LSQ)
        self.model.to(place)
        self.optimizer = Adam(self.model.parameters(), lr=5e-4, betas=(0.9, 0.98))

    def plan(self, sample: dict) -> None:
        """Plan the memory of a step on this batch, as the plugin does."""
        plan_memory(self.model, lambda: self.loss(sample))


def compile_layers(side: Side, backend: str) -> None:
    """Compile each layer and the loss; layers of a kind share their code."""
    for layer in [*side.model.encoder.layers, *side.model.decoder.layers]:
        layer.compile(backend=backend, dynamic=False)
    side.criterion.compute_loss = torch.compile(
        side.criterion.compute_loss, backend=backend, dynamic=False
    )


class ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()  # a view could not be changed in place; compiled, it costs nothing

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def int8_layers(side: Side, backend: str) -> None:
    """torchao's int8 weights in every layer, without the vocabulary's, as torchao advises;
    compiled.

    torchao 0.18 does not connect these weights with torch's linear function, which multiplies them
    in bfloat16 then; and it takes views of inputs and gradients, which fairseq does not always make
    contiguous.

    Raises:
        ImportError: torchao is not installed, or does not fit this torch.
    """
    from torchao.prototype.quantized_training import (
        Int8MixedPrecisionTrainingConfig,
        int8_mixed_precision,
    )
    from torchao.quantization import quantize_

    product = int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction
    weight_class = int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight

    @weight_class.implements_torch_function(torch.nn.functional.linear)
    def linear(function, types, arguments, named):
        x, weight, bias = (*arguments, *named.values(), None)[:3]
        return ContiguousGradient.apply(product.apply(x.contiguous(), weight, bias))

    for half in (side.model.encoder, side.model.decoder):
        quantize_(half.layers, Int8MixedPrecisionTrainingConfig())
    transformer.call_projections(side.model)
    compile_layers(side, backend)


BASELINE = "torch.compile"
LSQ_NAME = "lsq int8"
SIDES: dict[str, Callable[..., transformer.Side]] = {
    LSQ_NAME: LsqSide,
    BASELINE: partial(Side, fused=True, change=compile_layers),
    "torchao int8": partial(Side, fused=True, change=int8_layers),
    "fairseq": partial(Side, fused=False),
}
TURNS = ((LSQ_NAME,), *((name, BASELINE) for name in SIDES if name != BASELINE))
"""Sides that take turns, the most wanted first."""
FIGURES = (
    "milliseconds",
    "fastest",
    *(f"{phase}_milliseconds" for phase in PHASES),
    "tokens_per_second",
)
FIGURES += ("first_step_seconds", "peak_gigabytes", "loss", "ratio")
KERNELS = 25
"""The longest of a step are reported."""
FAILED = "failed"
"""How the remark on a side begins that broke."""


class Bench:
    """Measures sides on one device."""

    def __init__(self, options: argparse.Namespace):
        self.rounds = options.rounds
        self.place = torch.device("cuda", 0) if options.device == gpu.CUDA else torch.device("cpu")
        self.on_gpu = self.place.type == "cuda"
        self.steps = 1 if options.quick else STEPS
        self.emulated = options.device == gpu.EMULATOR
        self.backend = "eager" if options.quick else "inductor"
        self.profiles: list[dict] = []
        """What kernels take, of each side at each size."""

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.place)

    def clear(self) -> None:
        """Give back the memory and the compiled code of sides that are gone."""
        torch._dynamo.reset()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def build(self, name: str, shape: transformer.Shape, sample: dict) -> tuple[Side, dict]:
        """Build a side and make two steps: seconds of the first, peak memory of the second."""
        held = torch.cuda.memory_allocated(self.place) if self.on_gpu else 0
        side = SIDES[name](shape, self.place, backend=self.backend)
        if isinstance(side, LsqSide):
            if self.emulated:
                use(side.model, lsq_backend("emulated", torch.bfloat16))
            side.plan(sample)
        first = common.seconds(lambda: side.step(sample), synchronize=self.synchronize)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.place)
        side.step(sample)
        peak = 1e-9 * (torch.cuda.max_memory_allocated(self.place) - held) if self.on_gpu else None
        return side, {"first_step_seconds": first, "peak_gigabytes": peak}

    def phases(self, side: Side, sample: dict) -> dict[str, float]:
        """Median milliseconds of each phase, with the host waiting, and a token's last loss."""
        measured: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for _ in range(self.rounds):
            losses: list[torch.Tensor] = []
            runs = (
                lambda losses=losses: losses.append(side.loss(sample)),
                lambda losses=losses: side.backward(sample, losses.pop()),
                side.update,
            )
            for phase, run in zip(PHASES, runs, strict=True):
                measured[phase].append(common.seconds(run, synchronize=self.synchronize))
                if losses:
                    loss = losses[0].detach().clone()
        found = {
            f"{phase}_milliseconds": 1e3 * common.timing(values).median
            for phase, values in measured.items()
        }
        return found | {"loss": float(loss) / sample["ntokens"]}

    def kernels(self, side: Side, sample: dict) -> list[dict]:
        """Times of a step's kernels, the longest first; on a CPU, of PyTorch's operations."""
        kind = (
            (ProfilerActivity.CUDA, DeviceType.CUDA)
            if self.on_gpu
            else (ProfilerActivity.CPU, DeviceType.CPU)
        )
        with profile(activities=kind[:1]) as profiled:
            side.step(sample)
            self.synchronize()
        found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for event in profiled.events():
            if event.device_type == kind[1]:
                found[event.name][0] += 1
                found[event.name][1] += 1e-3 * event.time_range.elapsed_us()
        longest = sorted(found.items(), key=lambda one: -one[1][1])[:KERNELS]
        return [
            {"kernel": name, "launches": count, "milliseconds": total}
            for name, (count, total) in longest
        ]

    def rows(self, names: tuple[str, ...], model: str, shape: transformer.Shape) -> Iterator[dict]:
        """Rows of sides that take turns; of those that cannot run here, a row that says why."""
        self.clear()
        sample = transformer.batch(shape, padded=False, seed=1)
        sample = utils.apply_to_sample(lambda tensor: tensor.to(self.place), sample)
        sides, once, remarks = {}, {}, {}
        for name in names:
            try:
                sides[name], once[name] = self.build(name, shape, sample)
            except gpu.OutOfTime:
                raise
            except ImportError as error:
                remarks[name] = f"cannot run: {error}"
            # compilers raise whatever they like; the other sides are measured all the same
            except Exception as error:
                if gpu.lost():
                    raise
                remarks[name] = f"{FAILED}: {type(error).__name__}: {error}"

        def steps(side: Side) -> None:
            for _ in range(self.steps):
                side.step(sample)

        timings = common.alternate(
            {name: partial(steps, side) for name, side in sides.items()},
            rounds=self.rounds,
            warm_up=WARM_UP,
            synchronize=self.synchronize,
        )
        tokens = shape.sentences * shape.length
        for name in names:
            figures = dict.fromkeys(FIGURES)
            if name in sides:
                figures |= {
                    "milliseconds": 1e3 * timings[name].median / self.steps,
                    "fastest": 1e3 * timings[name].fastest / self.steps,
                    **self.phases(sides[name], sample),
                    "tokens_per_second": tokens * self.steps / timings[name].median,
                    **once[name],
                    "ratio": timings[BASELINE].median / timings[name].median
                    if BASELINE in timings
                    else None,
                }
            yield {
                "side": name,
                "model": model,
                "tokens": tokens,
                **figures,
                "remark": remarks.get(name, ""),
            }
        for name, side in sides.items():
            where = {"side": name, "model": model, "tokens": tokens}
            self.profiles += [where | kernel for kernel in self.kernels(side, sample)]


def shapes(quick: bool) -> list[tuple[str, transformer.Shape]]:
    """(model, shape) of each batch, the largest first."""
    if quick:
        return [("quick", transformer.QUICK)]
    return [
        (
            name,
            transformer.Shape(
                hidden=hidden,
                feed_forward=inner,
                heads=heads,
                vocabulary=PADDED,
                sentences=tokens // LENGTH,
                length=LENGTH,
            ),
        )
        for tokens in reversed(TOKENS)
        for name, (hidden, inner, heads) in reversed(MODELS.items())
    ]


def order(quick: bool) -> Iterator[tuple[tuple[str, ...], str, transformer.Shape]]:
    """What is measured, in order: lsq beside torch.compile at every size, then the others."""
    alone, *turns = TURNS
    sizes = shapes(quick)
    yield alone, *sizes[0]
    for names in turns:
        for size in sizes:
            yield names, *size


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    gpu.add_options(parser, gpu.CPU, gpu.CUDA, gpu.EMULATOR)
    options = common.parse(parser, arguments)
    logging.disable(logging.INFO)  # fairseq lets everyone log everything
    bench = Bench(options)

    def conditions() -> dict:
        return common.conditions(
            options,
            **(gpu.hardware(bench.place) if bench.on_gpu else {}),
            packages=("fairseq-fixed", "torchao", "triton"),
            baseline="fairseq's model under torch.compile in bfloat16, with PyTorch's fused Adam",
            shapes={model: dataclasses.asdict(shape) for model, shape in shapes(options.quick)},
            optimizer="Adam on float32 copies of the weights (FP16Optimizer of fairseq); lsq's"
            " weights are float32",
        )

    survey = gpu.survey("gpu_step", conditions(), options, kernels=bench.profiles)
    survey.measure(
        (
            f"{names[0]}, {model}, {shape.sentences * shape.length} tokens",
            partial(bench.rows, names, model, shape),
        )
        for names, model, shape in order(options.quick)
    )
    survey.failed.update(
        (f"{row['side']}, {row['model']}, {row['tokens']} tokens", row["remark"])
        for row in survey.rows
        if row["remark"].startswith(FAILED)
    )
    return gpu.report("gpu_step", survey, conditions(), options)


if __name__ == "__main__":
    sys.exit(main())
