"""What lsq adds to a training by transformers' Trainer: signals, warnings, planned memory, int8
gradients, a monitor, sparse weights, clips in checkpoints.

Trainer's checkpoints hold the weights as any program reads them. The clips lie beside them in
lsq.safetensors, and in
the state that Trainer keeps of its callbacks: that comes back by itself, whatever folder a training
    goes on from.
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
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

import lsq
from lsq.config import require_choice
from lsq.dist import GradientCompression, GradientConfig, compress_gradients
from lsq.layers import ProgramModule, TensorStatistics, observe
from lsq.layers.memory import MODES, release_memory
from lsq.layers.model_formats import decoded_summary
from lsq.layers.signals import complaint, interval_of
from lsq.models.clip_state import clip_names, clip_state, keep_apart, load_clip_state
from lsq.models.huggingface.clip_files import load_clips, save_clips
from lsq.models.huggingface.memory import plan_batch
from lsq.models.huggingface.noise import arguments_of_monitor, noise, plain
from lsq.models.sparsity import Sparsity, sparsity_of, wants_sparsity
from lsq.observe import Monitor
from lsq.run import shards

logger = logging.getLogger(__name__)


class LsqCallback(TrainerCallback, ExportableState):
    """Give it to a Trainer of a converted model: `Trainer(model, ..., callbacks=[LsqCallback()])`.

    Args:
        every_tensor: log the signals of every quantised tensor, and the noise of every module, not
            those of the whole model alone.
        gradients: how workers average gradients, as lsq.dist has it; None: as DDP does by itself.
        largest_batch: inputs of the model, with labels, that no batch exceeds in any dimension.
            Memory is planned for it. None: memory is not planned.
        memory: "planned", or "guard" for a slow training that checks every access; see
            lsq.layers.memory.plan_memory.
        monitor: arguments of lsq.monitor by name, such as {"every": 100}, apart from `writer`: the
            noise of modules is watched, logged, and kept in checkpoints. Memory is planned again
            when a module goes on in floats.

    Raises:
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
        self.every_tensor, self.largest_batch, self.memory = every_tensor, largest_batch, memory
        self.gradients = (
            GradientConfig(**gradients) if isinstance(gradients, Mapping) else gradients
        )
        self.watching = None if monitor is None else arguments_of_monitor(monitor)
        self.model: nn.Module | None = None
        self.monitor: Monitor | None = None
        """From the beginning of the training on, where `monitor` is given."""
        self.last: dict[str, TensorStatistics] = {}
        """The signals that were collected last, by tensor."""
        self.lost: tuple[str, ...] | list[str] = ()
        """Options of the callback that this one was restored from and that its state cannot hold.
        """
        self.clips: str | None = None
        """In the state of a callback: see there."""
        self.looks: dict[str, Any] | None = None
        """The same."""
        self.sparsity: Sparsity | None = None
        """What chooses masks of weights during a training, where QuantConfig(sparsity=...) wants
        some."""
        self._last_step = -1
        self._looked = False
        """Whether the monitor has readings that are not logged yet."""
        self._warned: set[str] = set()
        self._observing, self._installed = ExitStack(), ExitStack()
        self.compression: GradientCompression | None = None
        """Once workers exchange gradients as `gradients` says."""
        self._exchanging: nn.Module | None = None

    # The callback's own state, which Trainer puts into its checkpoints

    def state(self) -> dict[str, Any]:
        """Clips in base64 of safetensors, the state of the monitor, and the options."""
        options = {
            "every_tensor": self.every_tensor,
            "memory": self.memory,
            "gradients": None if self.gradients is None else asdict(self.gradients),
            "monitor": None,
        }
        lost = [] if self.largest_batch is None else ["largest_batch"]
        if self.watching is not None:
            options["monitor"] = plain(self.watching)
            lost += ["group of monitor"] if self.watching.get("group") else []
        attributes = {
            "lost": lost,
            "clips": None if self.model is None else _encoded(self.model),
            "looks": self.monitor and self.monitor.state_dict(),
        }
        return {"args": options, "attributes": attributes}

    # Events

    def on_train_begin(self, args, state, control, *, model: nn.Module, **others) -> None:
        """Take part in a training that begins or goes on.

        Raises:
            ValueError: the model is not converted, or what the options ask for does not fit the
                training.
        """
        if not clip_names(model):
            raise ValueError(
                f"no layer of this {type(model).__name__} is lsq's; call lsq.convert(model) before"
                " the Trainer is "
                "made, or leave LsqCallback out"
            )
        if self.lost:
            raise ValueError(
                f"restore_callback_states_from_checkpoint cannot bring back {', '.join(self.lost)}"
                " of LsqCallback; "
                "leave that option out: the callback restores the clips of a checkpoint without it"
            )
        if self.memory != "planned" and self.largest_batch is None:
            raise ValueError(
                f"memory is {self.memory!r}, but no memory is planned without largest_batch; give"
                " that, too"
            )
        self._installed.close()  # of a training that has failed
        self.model, trainer = model, _trainer_around()
        keep_apart(model)
        self._resume(state)
        # first, so that TensorBoard's callback and others see the signals in logs
        handler = trainer.callback_handler
        handler.callbacks = [self, *(one for one in handler.callbacks if one is not self)]
        self._take_part_in_exchange(trainer)
        self._watch(state)
        if state.is_world_process_zero and (decoded := decoded_summary(model)) is not None:
            logger.info(decoded)
        if wants_sparsity(model):
            self.sparsity = sparsity_of(model, updates=state.global_step)
            self._installed.callback(self.sparsity.leave)
        if self.largest_batch is not None:
            plan_batch(trainer, self.largest_batch, self.memory)
            self._installed.callback(release_memory, model)

    def on_step_begin(self, args, state, control, **others) -> None:
        step = state.global_step + 1
        due = step == 1 or step % interval_of(int(state.logging_steps)) == 0
        if due and state.is_world_process_zero:
            self._last_step = step
            self.last = self._observing.enter_context(observe(self.model))

    def on_substep_end(self, args, state, control, **others) -> None:
        self._observing.close()

    def on_pre_optimizer_step(self, args, state, control, **others) -> None:
        self._observing.close()
        if self._last_step == state.global_step + 1:
            self._warn(self._last_step)
        if self.sparsity is not None:
            self.sparsity.draw()

    def on_optimizer_step(self, args, state, control, **others) -> None:
        if self.sparsity is not None:
            self.sparsity.step()

    def on_step_end(self, args, state, control, **others) -> None:
        """Count a step of the monitor."""
        if self.monitor is None:
            return
        fallen, readings = len(self.monitor.fallen), self.monitor.readings
        self.monitor.step()
        self._looked |= self.monitor.readings is not readings
        if self.largest_batch is not None and len(self.monitor.fallen) > fallen:
            plan_batch(_trainer_around(), self.largest_batch, self.memory)

    def on_log(self, args, state, control, *, logs: dict[str, Any] | None = None, **others) -> None:
        """Put the signals beside the loss, once."""
        if logs is not None and "loss" in logs and 0 < self._last_step <= state.global_step:
            logs |= self.signals()
            state.log_history[-1] |= self.signals()
            self._last_step = -1
        if logs is not None and "loss" in logs and self._looked:
            found = noise(self.monitor, every_module=self.every_tensor)
            logs |= found
            state.log_history[-1] |= found
            self._looked = False

    def on_save(self, args, state, control, **others) -> None:
        """Write lsq.safetensors into the checkpoint that was written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir() and not _sharded(self.model):
            save_clips(self.model, folder)

    def on_train_end(self, args, state, control, *, model: nn.Module, **others) -> None:
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
        if self.sparsity is not None:  # so that whatever saves the model saves its zeros
            self.sparsity.write_zeros()

    # Parts of them

    def _resume(self, state) -> None:
        name = type(self).__name__
        clips = state.stateful_callbacks.get(name, {}).get("attributes", {}).get("clips")
        state.stateful_callbacks.setdefault(name, {})  # which Trainer wants before it saves
        if state.global_step == 0 or _sharded(self.model):
            return
        if clips is not None:
            load_clip_state(self.model, load(base64.b64decode(clips)))
        elif not all(one.schedule.begun for one in _modules(self.model)):
            logger.warning(
                "this checkpoint was written without LsqCallback: clips are measured again"
            )

    def _watch(self, state) -> None:
        if self.watching is None:
            return
        self.monitor = lsq.monitor(self.model, **self.watching)
        self._installed.callback(self.monitor.close)
        looks = (
            state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("looks")
        )
        if state.global_step and looks is not None:
            self.monitor.load_state_dict(looks)

    def _take_part_in_exchange(self, trainer: Trainer) -> None:
        several = (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        )
        # torch.compile's
        wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
        parallel = isinstance(wrapped, DistributedDataParallel)
        if self.gradients is None:
            return
        if not several:
            logger.info("gradients=%s has nothing to do: there is one worker", self.gradients.mode)
        elif not parallel:
            raise ValueError(
                f"gradients={self.gradients.mode!r} is for DistributedDataParallel, but this model"
                " is trained as a "
                f"{type(wrapped).__name__}; leave gradients out"
            )
        elif wrapped is not self._exchanging:  # which a second training goes on with
            self.compression, self._exchanging = (
                compress_gradients(wrapped, self.gradients),
                wrapped,
            )
            if self.gradients.error_feedback and trainer.state.global_step:
                logger.warning(
                    "error feedback starts from zero: checkpoints of Trainer do not hold it"
                )

    def _warn(self, step: int) -> None:
        for name, statistics in self.last.items():
            text = complaint(statistics)
            if text and name not in self._warned:
                self._warned.add(name)
                logger.warning("%s, step %d: %s", name, step, text)

    def signals(self) -> dict[str, float]:
        """What is logged of the last collection: means of clips, the largest shares of clipped
        values and of zeros."""
        found = {}
        for kind in ("weight", "activation"):
            ours = [one for one in self.last.values() if one.kind == kind]
            if ours:
                found[f"lsq/{kind}_clip"] = sum(one.clip for one in ours) / len(ours)
                found[f"lsq/{kind}_clipped_share"] = max(one.clipped_share for one in ours)
                found[f"lsq/{kind}_zero_share"] = max(one.zero_share for one in ours)
        if self.every_tensor:
            for name, one in self.last.items():
                found |= {
                    f"lsq/{what}/{name}": getattr(one, what)
                    for what in ("clip", "clipped_share", "zero_share")
                }
        return found


def _modules(model: nn.Module) -> list[ProgramModule]:
    return [one for one in model.modules() if isinstance(one, ProgramModule)]


def _sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has its parameters, and its checkpoints the clips."""
    return any(map(shards.is_shard, model.parameters()))


def _encoded(model: nn.Module) -> str | None:
    return None if _sharded(model) else base64.b64encode(save(clip_state(model))).decode()


def _trainer_around() -> Trainer:
    """The Trainer that has called: its callbacks are not told which it is, and need what it wraps
    the model in."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    if frame is None:
        raise ValueError(
            "LsqCallback is for transformers' Trainer, but something else has called it"
        )
    return frame.f_locals["self"]
