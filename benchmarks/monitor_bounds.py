"""Signal-to-noise in trainings that do well, from which the bounds of lsq.monitor come, and what a
look costs.

    python benchmarks/monitor_bounds.py [--steps 400] [--every 10] [--only "gated, of nn.Linear"]

Trains small models (monitor_trainings.py) in int8 and in floats on the same batches, looks at the
int8 one every so
many steps, and prints for each training and quantity, in dB: the least reading of any module early
and late, the quantile of 1 % and the median of all; then both losses at the end, and milliseconds
of processor time of an int8 step with a look and without.
"""

import time
from collections.abc import Iterator, Mapping
from statistics import median

import common
import torch
from language_model import Text, make_text
from monitor_trainings import TRAININGS, Training, float_twin
from torch import nn
from tqdm import tqdm

import lsq
from lsq.config import QuantConfig
from lsq.observe import Bounds, Reading
from lsq.observe.noise import QUANTITIES

NO_BOUNDS = Bounds(**dict.fromkeys(QUANTITIES, float("-inf")))
LAST_STEPS = 50
"""Over which the loss at the end is averaged."""
RATE = 2e-3


class Run:
    """One model in training.

    Attributes:
        losses: of each step.
        readings: (step, module, what was found).
        seconds: of steps with a look (True) and without.
    """

    def __init__(self, training: Training, quant: QuantConfig, options):
        torch.manual_seed(options.seed)
        self.training, self.model = training, training.make(quant)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01)
        warm_up = max(options.steps // 10, 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(1.0, (step + 1) / warm_up) * max(1 - step / options.steps, 0.05),
        )
        self.monitor = (
            lsq.monitor(self.model, every=options.every, rows=options.sample, bounds=NO_BOUNDS)
            if quant.quantized
            else None
        )
        self.losses: list[float] = []
        self.readings: list[tuple[int, str, Reading]] = []
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def step(self, text: Text, number: int) -> None:
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.training.bfloat16):
            loss = self.training.loss(self.model, text, number)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        if self.monitor is not None:
            before = self.monitor.readings
            self.monitor.step()
            looked = self.monitor.readings is not before
            self.seconds[looked].append(time.process_time() - began)
            if looked:
                self.readings += [
                    (number, name, reading) for name, reading in self.monitor.readings.items()
                ]


def rows(name: str, run: Run, steps: int) -> Iterator[dict]:
    """Of each quantity."""
    for kind in QUANTITIES:
        found = [
            (step, reading.values()[kind])
            for step, _, reading in run.readings
            if kind in reading.values()
        ]
        early = [value for step, value in found if step <= steps // 4]
        late = [value for step, value in found if step > steps // 4]
        values = torch.tensor([value for _, value in found])
        yield {
            "training": name,
            "quantity": kind.replace("_", " "),
            "least_early": min(early),
            "least_late": min(late),
            "quantile_1": values.quantile(0.01).item(),
            "median": values.median().item(),
            "readings": len(values),
        }


def outcome(name: str, run: Run, exact: Run) -> dict:
    ends = [sum(one.losses[-LAST_STEPS:]) / len(one.losses[-LAST_STEPS:]) for one in (run, exact)]
    step, look = (1e3 * median(run.seconds[looked]) for looked in (False, True))
    return {
        "training": name,
        "loss_int8": ends[0],
        "loss_float": ends[1],
        "step_ms": step,
        "step_with_a_look_ms": look,
    }


def worst(run: Run) -> Mapping[str, tuple[str, float]]:
    """Quantity -> (module, reading): the least of all."""
    found = {}
    for kind in QUANTITIES:
        readings = [
            (one.values()[kind], name) for _, name, one in run.readings if kind in one.values()
        ]
        least, name = min(readings)
        found[kind] = name, least
    return found


def main(arguments: list[str] | None = None) -> None:
    options = common.parser(__doc__)
    options.add_argument(
        "--steps", type=common.positive, default=400, metavar="N", help="of each training"
    )
    options.add_argument(
        "--every", type=common.positive, default=10, metavar="N", help="steps between two looks"
    )
    options.add_argument(
        "--sample", type=common.positive, default=64, metavar="N", help="rows of a look"
    )
    options.add_argument(
        "--seed", type=common.positive, default=1, metavar="N", help="of the model and its dropout"
    )
    options.add_argument(
        "--only", choices=list(TRAININGS), nargs="+", default=list(TRAININGS), help="trainings"
    )
    chosen = common.parse(options, arguments)
    if chosen.quick:
        chosen.steps, chosen.every = 8, 2
    text = make_text(400, 10) if chosen.quick else make_text()
    quant, figures, outcomes, modules = QuantConfig(), [], [], {}
    for name in chosen.only:
        run, exact = (Run(TRAININGS[name], one, chosen) for one in (quant, float_twin(quant)))
        for number in tqdm(range(1, chosen.steps + 1), desc=name, unit=" steps", disable=None):
            run.step(text, number)
            exact.step(text, number)
        found = list(rows(name, run, chosen.steps))
        figures += found
        outcomes.append(outcome(name, run, exact))
        modules[name] = worst(run)
        print(common.table(found), common.table(outcomes[-1:]), sep="\n\n", end="\n\n", flush=True)
    conditions = common.conditions(
        chosen,
        steps=chosen.steps,
        every=chosen.every,
        sample=chosen.sample,
        seed=chosen.seed,
        baseline="none",
    )
    common.report("monitor_bounds", figures, conditions, chosen, outcomes=outcomes, worst=modules)


if __name__ == "__main__":
    main()
