"""The task: fairseq's translation with training signals."""

import weakref
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.distributed import utils as distributed
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II

from lsq.fairseq.signals import TrainingSignals
from lsq.layers import quantized_tensors


@dataclass
class LSQTranslationConfig(TranslationConfig):
    """fairseq's options of translation, and the common ones that the signals go by."""

    log_interval: int = II("common.log_interval")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")  # noqa: UP045  fairseq cannot read str | None


@register_task("lsq_translation", dataclass=LSQTranslationConfig)
class LSQTranslationTask(TranslationTask):
    """Translation that watches the quantisers of the model in the first process."""

    signals: TrainingSignals | None = None

    def begin_epoch(self, epoch: int, model) -> None:
        """Called by fairseq before each epoch, with the model itself."""
        super().begin_epoch(epoch, model)
        if self.signals is None and distributed.get_global_rank() == 0 and any(True for _ in quantized_tensors(model)):
            self.signals = TrainingSignals(
                model,
                bits=model.decoder.output_projection.quant.bits,
                interval=self.cfg.log_interval,
                folder=self.cfg.tensorboard_logdir or None,
            )
            # fairseq tells no task that training is over: the summary comes when it drops the task, or at exit
            weakref.finalize(self, self.signals.finish)

    def train_step(
        self, sample: dict[str, Any], model, criterion, optimizer, update_num: int, ignore_grad: bool = False
    ):
        """Called by fairseq for each batch; `update_num` counts the updates that are done."""
        if self.signals is None:
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        with self.signals.observing(update_num + 1):
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def optimizer_step(self, optimizer, model, update_num: int) -> None:
        """Called by fairseq once the gradients of an update are there."""
        if self.signals is not None:
            self.signals.record(update_num + 1)
        super().optimizer_step(optimizer, model, update_num)
