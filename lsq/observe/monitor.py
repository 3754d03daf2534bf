"""A monitor of the noise of int8 modules in a training; modules with too much go on in floats."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from lsq.config import require_model, require_whole
from lsq.dist.agreement import least_of_all
from lsq.layers.memory import release_memory
from lsq.layers.module import ProgramModule
from lsq.layers.schedule import recomputing
from lsq.observe.noise import QUANTITIES, Bounds, Reading, Sample
from lsq.observe.statistics import program_modules
from lsq.program.program import Program

logger = logging.getLogger(__name__)


class Monitor:
    """Watch the noise of all int8 modules in a training; noisy modules go on in floats.

    `lsq.monitor` is this class. Every `every` steps each module computes a few rows of a batch
    twice, as it does and in floats: its outputs, and from their gradients the gradients of its
    inputs and weights. If one of these three has less signal-to-noise than its bound, `patience`
    times in a row, the module goes on in floats. A converted linear layer then computes as the
    float layer did, in the dtype of its input or of torch.autocast; another module runs its program
    in float mode. Parameters, clips and optimizers stay; clips get no gradient any more. The entry
    `float_fallback` of a module keeps the decision in checkpoints.

    Args:
        model: with modules of lsq, bare or in DistributedDataParallel.
        every: steps from one look to the next. Call `step` after each step of the optimizer.
        rows: rows of the sample; of packed sequences, whole ones until there are as many rows.
        bounds: the least signal-to-noise that a module may have.
        patience: number of looks in a row that must find too much noise.
        fall_back: False: only warn, once for each module.
        writer: an object with `add_scalar`, such as torch.utils.tensorboard.SummaryWriter; gets
            every reading and the number of modules in floats.
        group: the processes that train the same model and decide together; None: all.

    Attributes:
        steps: number of steps so far.
        readings: module path -> its reading in the last look, the least of all processes.

    Raises:
        TypeError: `model` is no torch.nn.Module.
        ValueError: the model has no int8 module, or a number is below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        rows: int = 64,
        bounds: Bounds | None = None,
        patience: int = 2,
        fall_back: bool = True,
        writer: Any = None,
        group: ProcessGroup | None = None,
    ):
        for name, value in (("every", every), ("rows", rows), ("patience", patience)):
            require_whole(name, value)
        require_model(model)
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        if not self._modules():
            raise ValueError(
                f"{type(model).__name__} has no module that computes in int8; call lsq.convert on"
                " it first, or build it of lsq.layers"
            )
        self._every, self._rows, self._patience = every, rows, patience
        self._bounds, self._fall_back = bounds or Bounds(), fall_back
        self._writer, self._group = writer, group
        self.steps = 0
        self.readings: dict[str, Reading] = {}
        self._strikes: dict[str, int] = {}
        """Name of a module -> looks in a row that found too much noise."""
        self._warned: set[str] = set()
        # in this step: modules that are watched, modules seen in a trained pass, their readings
        self._watched: dict[ProgramModule, str] = {}
        self._taken: set[ProgramModule] = set()
        self._step_readings: dict[ProgramModule, Reading] = {}
        self._arm()

    @property
    def in_floats(self) -> tuple[str, ...]:
        """Paths of the modules that go on in floats, also because a checkpoint says so."""
        return tuple(
            name for name, module in self._modules().items() if module.schedule.float_fallback
        )

    def figures(self, *, every_module: bool) -> dict[str, float]:
        """Summarise the last look: the least signal-to-noise in dB, and modules in floats."""
        figures = {"lsq/modules_in_floats": float(len(self.in_floats))}
        for name, reading in self.readings.items():
            for quantity, value in reading.values().items():
                least = f"lsq/{quantity}_signal_to_noise"
                figures[least] = min(value, figures.get(least, value))
                if every_module:
                    figures[f"{least}/{name}"] = value
        return figures

    def __str__(self) -> str:
        outcome = f"{len(self.in_floats)} of {len(self._modules())} modules go on in floats"
        if not self.readings:
            due = self._every * (self.steps // self._every + 1)
            return (
                f"no reading yet: the next look is at step {due}, and {self.steps} are"
                f" made\n{outcome}"
            )
        rows: dict[str, Reading] = {}
        for name, reading in self.readings.items():
            name = re.sub(r"\b\d+\b", "*", name) or "the model itself"
            rows[name] = reading.worst(rows.get(name, reading))
        corner = "least signal-to-noise, dB"
        width = max(map(len, (corner, *rows)))
        titles = [name.replace("_", " ") for name in QUANTITIES]
        lines = [f"{corner:{width}}  {'  '.join(titles)}"]
        for name, reading in rows.items():
            values = reading.values()
            cells = [f"{values[kind]:.1f}" if kind in values else "-" for kind in QUANTITIES]
            padded = [cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True)]
            lines.append(f"{name:{width}}  {'  '.join(padded)}")
        return "\n".join([*lines, outcome])

    __repr__ = __str__

    def step(self) -> None:
        """Count a step. Call it after each step of the optimizer, in every process.

        After a step that was looked at, processes agree on the readings, and modules with too much
        noise fall back.
        """
        self.steps += 1
        if self.steps % self._every == 0:
            self._conclude()
        self._arm()

    def close(self) -> None:
        """Stop watching. Modules in floats stay in floats."""
        for module in self._watched:
            module._watcher = None
        self._watched, self._taken, self._step_readings = {}, set(), {}

    def state_dict(self) -> dict:
        """Return plain numbers; the state dict of the model says which modules are in floats."""
        return {"steps": self.steps, "strikes": dict(self._strikes)}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from a `state_dict`; ValueError if it is something else."""
        if set(state) != {"steps", "strikes"}:
            raise ValueError(
                f"the state has {', '.join(map(repr, state))}; a monitor's has 'steps' and"
                " 'strikes'"
            )
        self.close()
        self.steps, self._strikes = state["steps"], dict(state["strikes"])
        self._arm()

    def _modules(self) -> dict[str, ProgramModule]:
        return {
            name: module
            for name, module in program_modules(self._model).items()
            if module.quant.quantized
        }

    def _arm(self) -> None:
        if (self.steps + 1) % self._every == 0:
            self._watched = {
                module: name
                for name, module in self._modules().items()
                if not module.schedule.float_fallback
            }
            for module in self._watched:
                module._watcher = self._see

    def _see(
        self,
        module: ProgramModule,
        program: Program,
        tensors: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Sample training passes of a step: passes with a backward, or else all passes."""
        goes_back, again = bool(program.output_gradients), recomputing()
        if not program.weights or (module in self._taken and (again or not goes_back)):
            return
        sample = Sample.of(program, tensors, self._rows, module.target)
        if not goes_back:
            self._note(module, sample.reading(None))
            return
        if not again:
            self._taken.add(module)

        def look(gradients: Sequence[Tensor | None]) -> None:
            # here parameters are whole, also under FSDP2, and as the pass has read them
            if module in self._watched:
                self._note(module, sample.reading(gradients))

        outputs[0].grad_fn.register_prehook(look)

    def _note(self, module: ProgramModule, reading: Reading) -> None:
        self._step_readings[module] = reading.worst(self._step_readings.get(module, reading))

    def _conclude(self) -> None:
        watched, readings = self._watched, self._step_readings
        self.close()
        self.readings = {}
        if watched:
            seen = [readings.get(module, Reading()).values() for module in watched]
            rows = [[values.get(kind, math.inf) for kind in QUANTITIES] for values in seen]
            device = next(self._model.parameters()).device
            table = torch.tensor(rows, dtype=torch.float32, device=device)
            least = least_of_all(table, self._group).tolist()
            for name, row in zip(watched.values(), least, strict=True):
                values = zip(QUANTITIES, row, strict=True)
                known = {kind: value for kind, value in values if value < math.inf}
                if known:
                    self.readings[name] = Reading(**known)
        for module, name in watched.items():
            if name in self.readings:
                self._judge(name, module, self.readings[name])
        self._write()

    def _judge(self, name: str, module: ProgramModule, reading: Reading) -> None:
        broken = self._bounds.broken(reading)
        self._strikes[name] = self._strikes.get(name, 0) + 1 if broken else 0
        if self._strikes[name] < self._patience:
            return
        del self._strikes[name]
        if self._fall_back:
            module.fall_back()
            modules = program_modules(self._model).values()
            if any(module.step_memory is not None for module in modules):
                release_memory(self._model)
                _say(
                    "planned memory is released, since modules go on in floats; call plan_memory"
                    " again"
                )
            self._warn(
                name,
                broken,
                f"it goes on in floats, as {len(self.in_floats)} of {len(self._modules())} modules",
            )
        elif name not in self._warned:
            self._warned.add(name)
            self._warn(name, broken, "it stays in int8")

    def _warn(self, name: str, broken: list[str], outcome: str) -> None:
        looks = f"{self._patience} looks in a row" if self._patience > 1 else "a look"
        _say(
            f"step {self.steps}, {name or type(self._model).__name__}: {' and '.join(broken)}, by"
            f" {looks}; {outcome}"
        )

    def _write(self) -> None:
        if self._writer is None:
            return
        for name, reading in self.readings.items():
            for kind, value in reading.values().items():
                self._writer.add_scalar(f"signal_to_noise/{kind}/{name}", value, self.steps)
        self._writer.add_scalar(
            "signal_to_noise/modules_in_floats", len(self.in_floats), self.steps
        )


def _say(text: str) -> None:
    known = distributed.is_available() and distributed.is_initialized()
    if not known or distributed.get_rank() == 0:
        logger.warning(text)


monitor = Monitor
