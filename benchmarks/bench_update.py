"""One update of a Transformer's parameters: lsq_adam against fairseq's Adam and torch's fused
AdamW.

An update is what lies between the last gradient and the next pass: gradients times a number and
clipped to a norm, Adam, clips of activations and weights kept near where they were, weights rounded
to codes. lsq_adam does it in two passes over memory; beside the others, gradients are multiplied
and clipped as fairseq does it, and layers do the rest.
"""

import dataclasses
import weakref

import common
import torch
import transformer
from fairseq.optim.adam import Adam as FairseqAdam
from fairseq.utils import clip_grad_norm_

from lsq.fairseq.calibration import quantized_modules
from lsq.ops.rounding import RoundWeight
from lsq.optim import Adam
from lsq.program.values import Weight
from lsq.run.backends import for_device
from lsq.run.parameter_state import WeightCodes, remember, state_of

LSQ = ["--arch", "lsq_transformer", "--criterion", "lsq_label_smoothed_cross_entropy"]
OPTIONS = {"lr": 1e-6, "betas": (0.9, 0.98)}
FACTOR, NORM = 1 / 4096, 1.0
"""What gradients are multiplied by, and clipped to."""
FAIRSEQ, FUSED, OURS = "fairseq's Adam", "torch's fused AdamW", "lsq_adam"


class Side:
    """A model with gradients, and its optimizer."""

    def __init__(self, shape: transformer.Shape, make):
        self.model, _ = transformer.build(shape, transformer.parse(shape, LSQ))
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer = make(self.model.parameters())
        self.place = for_device(next(self.model.parameters()).device)
        self.modules = list(quantized_modules(self.model))
        self.weights = [
            self._weight(module, name, one)
            for module in self.modules
            for name, one in self._named(module)
        ]

    def _named(self, module):
        return [(name, one) for name, one in module.declared.items() if one.clip is not None]

    def _weight(self, module, name, declared) -> tuple:
        """(values, clip, where codes belong) of a weight."""
        values, clip = module.get_parameter(name), module.get_parameter(declared.clip)
        form, rows = module.quant.weights, -(-len(values) // 16) * 16
        codes = self.place.allocate([rows, form.stored_columns(values.shape[1])], form.storage)
        scale = self.place.allocate([rows], torch.float32)
        made = WeightCodes((id(values), id(clip)))
        made.rounded = Weight(format=form, codes=codes, scale=scale)
        made.clip = weakref.ref(clip)
        return values, clip, made

    def begin_pass(self) -> None:
        """What the layers do with their weights and clips in a training pass."""
        for module in self.modules:
            module.limit_clip_steps()
        for values, clip, codes in self.weights:
            if not codes.current((), values, clip):
                both = {"values": values.detach(), "clip": clip.detach()}
                self.place.run(RoundWeight(weight=dataclasses.replace(codes.rounded, **both)))
                codes.stamp = None
            state_of(values).codes = codes
        for module in self.modules:
            remember(module.clips().values(), module.quant.clip_step)

    @torch.no_grad()
    def update(self) -> None:
        """One update."""
        if isinstance(self.optimizer, Adam):
            self.optimizer.multiply_grads(FACTOR)
            self.optimizer.clip_grad_norm(NORM)
        else:
            torch._foreach_mul_([parameter.grad for parameter in self.model.parameters()], FACTOR)
            clip_grad_norm_(self.model.parameters(), NORM)
        self.optimizer.step()
        self.begin_pass()


SIDES = {
    FAIRSEQ: lambda parameters: FairseqAdam(parameters, **OPTIONS),
    FUSED: lambda parameters: torch.optim.AdamW(
        parameters, **OPTIONS, weight_decay=0.0, fused=True
    ),
    OURS: lambda parameters: Adam(parameters, **OPTIONS),
}


def main() -> None:
    options = common.parse(common.parser(__doc__))
    shape = transformer.QUICK if options.quick else transformer.Shape()
    sides = {name: Side(shape, make) for name, make in SIDES.items()}
    timings = common.alternate(
        {name: side.update for name, side in sides.items()}, rounds=options.rounds
    )
    alone = common.alternate(
        {name: side.optimizer.step for name, side in sides.items()}, rounds=options.rounds
    )
    rows = [
        {
            "side": name,
            "milliseconds": 1e3 * timing.median,
            "fastest": 1e3 * timing.fastest,
            "step_alone": 1e3 * alone[name].median,
            "ratio": timings[FAIRSEQ].median / timing.median,
            "ratio_to_fused": timings[FUSED].median / timing.median,
        }
        for name, timing in timings.items()
    ]
    counted = list(sides[OURS].model.parameters())
    common.report(
        "update",
        rows,
        common.conditions(
            options,
            packages=("fairseq-fixed",),
            baseline=FAIRSEQ,
            shape=dataclasses.asdict(shape),
            parameters=sum(parameter.numel() for parameter in counted),
            tensors=len(counted),
            codes=sum(codes.codes.numel() for *_, codes in sides[OURS].weights),
            step_alone="the optimizer's step without the rest; lsq_adam's rounds weights and limits"
            " clips in it",
        ),
        options,
    )


if __name__ == "__main__":
    main()
