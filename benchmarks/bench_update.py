"""One update of a Transformer's parameters: lsq_adam, fairseq's Adam and torch's fused AdamW.

An update multiplies gradients by a number, clips them to a norm and runs Adam. lsq_adam does it in
two passes over memory, and in the second also rounds weights to codes and keeps clips near where
they were; beside the others, gradients are multiplied and clipped as fairseq does it, and rounding
is left to the next pass of the layers, which is not timed.
"""

import dataclasses

import common
import torch
import transformer
from fairseq.optim.adam import Adam as FairseqAdam
from fairseq.utils import clip_grad_norm_

from lsq.optim import Adam

OPTIONS = {"lr": 1e-6, "betas": (0.9, 0.98)}
FACTOR, NORM = 1 / 4096, 1.0
"""Gradients are multiplied by the one and clipped to the other."""
FAIRSEQ, FUSED, OURS = "fairseq's Adam", "torch's fused AdamW", "lsq_adam"
SIDES = {
    FAIRSEQ: lambda parameters: FairseqAdam(parameters, **OPTIONS),
    FUSED: lambda parameters: torch.optim.AdamW(
        parameters, **OPTIONS, weight_decay=0.0, fused=True
    ),
    OURS: lambda parameters: Adam(parameters, **OPTIONS),
}


class Side:
    """A model with gradients, and its optimizer."""

    def __init__(self, shape: transformer.Shape, make):
        self.model, criterion = transformer.build(shape, transformer.parse(shape, transformer.LSQ))
        self.optimizer = make(self.model.parameters())
        sample = transformer.batch(shape, padded=False, seed=1)
        criterion(self.model, sample)[0].backward()  # a pass has made codes of the weights

    @torch.no_grad()
    def update(self) -> None:
        if isinstance(self.optimizer, Adam):
            self.optimizer.multiply_grads(FACTOR)
            self.optimizer.clip_grad_norm(NORM)
        else:
            gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
            torch._foreach_mul_(gradients, FACTOR)
            clip_grad_norm_(self.model.parameters(), NORM)
        self.optimizer.step()


def main() -> None:
    options = common.parse(common.parser(__doc__))
    shape = transformer.QUICK if options.quick else transformer.Shape()
    sides = {name: Side(shape, make) for name, make in SIDES.items()}
    timings, alone = (
        common.alternate(runs, rounds=options.rounds)
        for runs in (
            {name: side.update for name, side in sides.items()},
            {name: side.optimizer.step for name, side in sides.items()},
        )
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
    conditions = common.conditions(
        options,
        packages=("fairseq-fixed",),
        baseline=FAIRSEQ,
        shape=dataclasses.asdict(shape),
        parameters=sum(parameter.numel() for parameter in counted),
        tensors=len(counted),
        step_alone="the optimizer's step without multiplying and clipping gradients",
    )
    common.report("update", rows, conditions, options)


if __name__ == "__main__":
    main()
