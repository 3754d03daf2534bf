"""LsqCallback: lsq in a training by transformers' Trainer.

Checkpoints have clips twice: in lsq.safetensors beside the weights, and in the callback's state
within Trainer's state, which Trainer restores from any folder.
"""

import base64
import inspect
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lsq import extras
from lsq.config import require_choice
from lsq.dist import GradientCompression, GradientConfig, compress_gradients
from lsq.layers import ProgramModule
from lsq.layers.memory import MODES, plan_memory, release_memory
from lsq.layers.model_formats import decoded_summary
from lsq.models import huggingface
from lsq.models.clips import (
    clip_names,
    clip_state,
    keep_apart,
    load_clip_state,
    load_clips,
    save_clips,
)
from lsq.models.sparsity import Sparsity, sparsity_of, wants_sparsity
from lsq.native import loader
from lsq.observe import Bounds, Monitor, Signals
from lsq.observe.signals import interval_of
from lsq.run import shards

extras.require("LsqCallback", "huggingface")
huggingface.keep_broken_torchaudio_out()
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

logger = logging.getLogger(__name__)
MONITOR = ("every", "rows", "bounds", "patience", "fall_back", "group")


class LsqCallback(TrainerCallback, ExportableState):
    """Give it to a Trainer of a converted model: `Trainer(model, ..., callbacks=[LsqCallback()])`.

    Args:
        every_tensor: log signals of every quantised tensor and noise of every module; False: log
            only figures of the whole model.
        gradients: how workers average gradients, see lsq.dist; None: as DDP does by itself.
        largest_batch: inputs of the model, with labels, that no batch exceeds in any dimension:
            memory is planned for it. None: memory is not planned.
        memory: "planned", or "guard" for a slow training that checks every access; see
            lsq.layers.memory.plan_memory.
        monitor: arguments of lsq.monitor by name, such as {"every": 100}, except `writer`. The
            noise of modules is then watched, logged, and kept in checkpoints. Memory is planned
            again when a module goes on in floats.

    Raises:
        TypeError: `gradients`, `largest_batch` or `monitor` is of another type.
        ValueError: `memory` or a value of `gradients` or `monitor` is not allowed.
    """

    def __init__(
        self,
        *,
        every_tensor: bool = False,
        gradients: GradientConfig | Mapping[str, Any] | None = None,
        largest_batch: Mapping[str, torch.Tensor] | None = None,
        memory: str = "planned",
        monitor: Mapping[str, Any] | None = None,
    ):
        require_choice("memory", memory, MODES)
        for name, value, kinds, example in (
            ("gradients", gradients, GradientConfig | Mapping, 'GradientConfig(mode="int8")'),
            ("largest_batch", largest_batch, Mapping, 'the model\'s inputs, {"input_ids": ...}'),
            ("monitor", monitor, Mapping, 'arguments of lsq.monitor, {"every": 100}'),
        ):
            if not (value is None or isinstance(value, kinds)):
                raise TypeError(f"{name} is {value!r:.80}; give {example}, or leave it out")
        self.every_tensor, self.largest_batch, self.memory = every_tensor, largest_batch, memory
        self.gradients = (
            GradientConfig(**gradients) if isinstance(gradients, Mapping) else gradients
        )
        self.monitor_options = None if monitor is None else _monitor_options(monitor)
        # for the current training, if they are wanted
        self.model: nn.Module | None = None
        self.monitor: Monitor | None = None
        self.signals: Signals | None = None
        self.sparsity: Sparsity | None = None
        self.compression: GradientCompression | None = None
        self._exchanging: nn.Module | None = None
        self._logged_step = 0
        self._looked = False
        """Whether the monitor has readings that are not logged yet."""
        self._observing, self._installed = ExitStack(), ExitStack()
        # Trainer sets these from a checkpoint; see `state`
        self.lost: tuple[str, ...] | list[str] = ()
        self.clips: str | None = None
        self.looks: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the state that Trainer saves in checkpoints: clips in base64, monitor, options."""
        options = {
            "every_tensor": self.every_tensor,
            "memory": self.memory,
            "gradients": None if self.gradients is None else asdict(self.gradients),
            "monitor": None,
        }
        lost = [] if self.largest_batch is None else ["largest_batch"]
        if self.monitor_options is not None:
            options["monitor"] = kept = {**self.monitor_options}
            lost += ["group of monitor"] if kept.pop("group", None) else []
            if kept.get("bounds"):
                kept["bounds"] = asdict(kept["bounds"])
        attributes = {
            "lost": lost,
            "clips": None if self.model is None else _encoded(self.model),
            "looks": self.monitor and self.monitor.state_dict(),
        }
        return {"args": options, "attributes": attributes}

    def on_train_begin(self, args, state, control, *, model: nn.Module, **options) -> None:
        """Take part in a training; raises ValueError if the model or the options do not fit."""
        if not clip_names(model):
            raise ValueError(
                f"no layer of this {type(model).__name__} is lsq's; call lsq.convert(model) before"
                " the Trainer is made, or leave LsqCallback out"
            )
        if self.lost:
            raise ValueError(
                f"restore_callback_states_from_checkpoint cannot bring back {', '.join(self.lost)}"
                " of LsqCallback; leave that option out: the callback restores the clips of a"
                " checkpoint without it"
            )
        if self.memory != "planned" and self.largest_batch is None:
            raise ValueError(
                f"memory is {self.memory!r}, but no memory is planned without largest_batch; give"
                " that, too"
            )
        optimizer = getattr(options.get("optimizer"), "optimizer", options.get("optimizer"))
        if getattr(optimizer, "backward", None) is not None and args.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm is {args.max_grad_norm}, but Trainer cannot clip gradients that"
                " step_in_backward has used: set max_grad_norm=0, and"
                f" optimizer.backward.max_norm = {args.max_grad_norm}"
            )
        self._installed.close()  # left by a training that has failed
        self.model, trainer = model, _trainer_around()
        keep_apart(model)
        kept = self._resume(state)
        # first, so that TensorBoard's callback and others see the signals in logs
        handler = trainer.callback_handler
        handler.callbacks = [self, *(one for one in handler.callbacks if one is not self)]
        self._take_part_in_exchange(trainer)
        if self.monitor_options is not None:
            self.monitor = Monitor(model, **self.monitor_options)
            self._installed.callback(self.monitor.close)
            if state.global_step and kept.get("looks") is not None:
                self.monitor.load_state_dict(kept["looks"])
        self.signals, self._logged_step = None, 0
        if state.is_world_process_zero:
            self.signals = Signals(model, interval=interval_of(int(state.logging_steps)))
            decoded = decoded_summary(model)
            if decoded is not None:
                logger.info(decoded)
        if wants_sparsity(model):
            self.sparsity = sparsity_of(model, updates=state.global_step)
            self._installed.callback(self.sparsity.leave)
        if self.largest_batch is not None:
            _plan_batch(trainer, self.largest_batch, self.memory)
            self._installed.callback(release_memory, model)

    def on_step_begin(self, args, state, control, **options) -> None:
        if self.signals is not None:
            self._observing.enter_context(self.signals.observing(state.global_step + 1))

    def on_substep_end(self, args, state, control, **options) -> None:
        self._observing.close()

    def on_pre_optimizer_step(self, args, state, control, **options) -> None:
        self._observing.close()
        if self.signals is not None:
            self.signals.record(state.global_step + 1)
        if self.sparsity is not None:
            self.sparsity.draw()

    def on_optimizer_step(self, args, state, control, **options) -> None:
        if self.sparsity is not None:
            self.sparsity.step()

    def on_step_end(self, args, state, control, **options) -> None:
        if self.monitor is None:
            return
        fallen, readings = len(self.monitor.in_floats), self.monitor.readings
        self.monitor.step()
        self._looked |= self.monitor.readings is not readings
        if self.largest_batch is not None and len(self.monitor.in_floats) > fallen:
            _plan_batch(_trainer_around(), self.largest_batch, self.memory)

    def on_log(
        self, args, state, control, *, logs: dict[str, Any] | None = None, **options
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        figures = {}
        collected = 0 if self.signals is None else self.signals.last_step
        if self._logged_step < collected <= state.global_step:
            figures |= self.signals.figures(every_tensor=self.every_tensor)
            self._logged_step = collected
        if self._looked:
            figures |= self.monitor.figures(every_module=self.every_tensor)
            self._looked = False
        logs |= figures
        state.log_history[-1] |= figures

    def on_save(self, args, state, control, **options) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir() and not _sharded(self.model):
            save_clips(self.model, folder)

    def on_train_end(self, args, state, control, *, model: nn.Module, **options) -> None:
        self._observing.close()
        self._installed.close()
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None and not _sharded(model):
            try:
                load_clips(model, best)
            except FileNotFoundError:
                logger.warning(
                    "%s was written without LsqCallback: its clips are measured in the next pass",
                    best,
                )
        if self.sparsity is not None:  # so that saving the model saves its zeros
            self.sparsity.write_zeros()

    def _resume(self, state) -> dict[str, Any]:
        """Load the clips of a checkpoint; return the callback's attributes in it."""
        # Trainer wants an entry before it saves
        entry = state.stateful_callbacks.setdefault(type(self).__name__, {})
        kept = entry.get("attributes", {})
        if state.global_step and not _sharded(self.model):
            modules = [one for one in self.model.modules() if isinstance(one, ProgramModule)]
            if kept.get("clips") is not None:
                load_clip_state(self.model, load(base64.b64decode(kept["clips"])))
            elif not all(module.schedule.begun for module in modules):
                logger.warning(
                    "this checkpoint was written without LsqCallback: clips are measured again"
                )
        return kept

    def _take_part_in_exchange(self, trainer: Trainer) -> None:
        if self.gradients is None:
            return
        # torch.compile wraps the model, too
        wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
        known = distributed.is_available() and distributed.is_initialized()
        if not known or distributed.get_world_size() == 1:
            logger.info("gradients=%s has nothing to do: there is one worker", self.gradients.mode)
        elif not isinstance(wrapped, DistributedDataParallel):
            raise ValueError(
                f"gradients={self.gradients.mode!r} is for DistributedDataParallel, but this model"
                f" is trained as a {type(wrapped).__name__}; leave gradients out"
            )
        elif wrapped is not self._exchanging:  # a second training keeps the exchange
            self.compression = compress_gradients(wrapped, self.gradients)
            self._exchanging = wrapped


def _sharded(model: nn.Module) -> bool:
    """Whether parameters are shards of FSDP2, whose checkpoints then have the clips."""
    return any(map(shards.is_shard, model.parameters()))


def _encoded(model: nn.Module) -> str | None:
    return None if _sharded(model) else base64.b64encode(save(clip_state(model))).decode()


def _trainer_around() -> Trainer:
    """Find the Trainer on the stack, since it does not pass itself to callbacks."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    if frame is None:
        raise ValueError(
            "LsqCallback is for transformers' Trainer, but something else has called it"
        )
    return frame.f_locals["self"]


def _monitor_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments of lsq.monitor, and make Bounds of plain values, which checkpoints hold."""
    strange = sorted(options.keys() - MONITOR)
    if strange:
        raise ValueError(
            f"monitor has {', '.join(map(repr, strange))}; allowed: {', '.join(MONITOR)}"
        )
    bounds = options.get("bounds")
    return {**options} | ({"bounds": Bounds(**bounds)} if isinstance(bounds, Mapping) else {})


def _plan_batch(trainer: Trainer, batch: Mapping[str, torch.Tensor], mode: str) -> None:
    """Plan the memory of a trainer's step on `batch`; raises ValueError if it cannot be planned."""
    model, inputs = trainer.model, trainer._prepare_inputs(dict(batch))
    training = model.training

    def step() -> torch.Tensor:
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, inputs)

    try:
        memory = plan_memory(model.train(), step, mode=mode)
    finally:
        model.train(training)
    if memory is None:
        reason = "memory='naive'" if mode == "naive" else loader.description()
        logger.info("memory is not planned: %s", reason)
    else:
        logger.info("memory (%s): %s", mode, memory)
