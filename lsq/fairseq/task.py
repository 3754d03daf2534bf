"""fairseq's tasks with planned memory, signals, sparse weights and gradients in int8."""

import logging
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.distributed import utils as distributed
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.trainer import Trainer
from omegaconf import II

from lsq.fairseq import device, generator, products
from lsq.fairseq.device import DeviceOptions
from lsq.fairseq.gradients import GradientOptions, GradientTask, option
from lsq.fairseq.memory import bounding_batch, plan_training
from lsq.fairseq.model import PADDINGS, Paddings
from lsq.gemm import lookup
from lsq.layers.memory import MODES
from lsq.layers.module import ProgramModule
from lsq.models.sparsity import Sparsity, sparsity_of, wants_sparsity
from lsq.observe import Signals, quantized_tensors
from lsq.observe.signals import interval_of
from lsq.serving.subwords import Words

logger = logging.getLogger(__name__)

DICTIONARIES = "lsq_dictionaries"
"""Key of the checksums of dictionaries in a checkpoint."""


@dataclass
class TaskOptions(GradientOptions, DeviceOptions):
    """Options of LSQTask: gradients, device, memory, tuned products; the last are fairseq's."""

    lsq_memory: ChoiceEnum(MODES) = option(
        "planned",
        "where the tensors of a training step lie: planned ahead for the largest batch (planned),"
        " planned and every access checked (guard, slow), or wherever PyTorch finds room (naive)",
    )
    lsq_gemm_config: Optional[str] = option(  # noqa: UP045  fairseq cannot read str | None
        None,
        "file of tuned matrix products to use, and no other (see `lsq tune` and `lsq configs`)",
    )
    lsq_gemm_coverage: Optional[str] = option(  # noqa: UP045
        None,
        "write to this file, after training on a GPU, which products were not tuned; for `lsq tune"
        " --shapes`",
    )
    max_tokens: Optional[int] = II("dataset.max_tokens")  # noqa: UP045
    batch_size: Optional[int] = II("dataset.batch_size")  # noqa: UP045
    log_interval: int = II("common.log_interval")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")  # noqa: UP045


def with_paddings(
    collate: Callable[[Sequence[Any]], dict[str, Any]], padding_idx: int, samples: Sequence[Any]
) -> dict[str, Any]:
    """Collate a batch by fairseq's `collate`, and add its Paddings."""
    batch = collate(samples)
    if batch:
        names = ("src_tokens", "prev_output_tokens")
        tokens = (batch["net_input"].get(name) for name in names)
        batch[PADDINGS] = Paddings(
            *(None if each is None else each.eq(padding_idx) for each in tokens)
        )
    return batch


class LSQTask(GradientTask):
    """Base of lsq's tasks, before fairseq's class, with TaskOptions in `cfg`."""

    model: BaseFairseqModel | None = None
    signals: Signals | None = None
    sparsity: Sparsity | None = None
    planned = False

    def __init__(self, cfg: TaskOptions, *dictionaries, **options):
        super().__init__(cfg, *dictionaries, **options)
        self.cfg = cfg  # fairseq's older tasks keep it as `args` alone
        if cfg.lsq_gemm_config:
            lookup.set_files([Path(cfg.lsq_gemm_config)])

    def state_dict(self) -> dict[str, Any]:
        """Return the task's state for a checkpoint, with checksums of its dictionaries."""
        return {**super().state_dict(), DICTIONARIES: self._dictionaries()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the task's state in a checkpoint to generate with; see `check_resumed`."""
        self.check_resumed(state_dict)
        kept = {name: value for name, value in state_dict.items() if name != DICTIONARIES}
        super().load_state_dict(kept)

    def check_resumed(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if the checkpoint of this `state_dict` has other dictionaries."""
        trained = state_dict.get(DICTIONARIES)
        if trained is None:
            return
        known = trained if isinstance(trained, dict) else {}
        sides = [
            side
            for side, checksum in self._dictionaries().items()
            if type(known.get(side)) is not int or known[side] != checksum
        ]
        if sides:
            raise ValueError(
                f"{self.cfg.data} has another {' and '.join(sides)} dictionary than the checkpoint"
                " was trained with; use data that was made with the dictionaries (dict.*.txt) of"
                " the training"
            )

    def _dictionaries(self) -> dict[str, int]:
        sides = {"source": self.source_dictionary, "target": self.target_dictionary}
        return {
            side: zlib.crc32("\n".join(words.symbols).encode()) for side, words in sides.items()
        }

    def build_model(self, args: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build a model for the device of the options; ValueError if that does not work."""
        if not from_checkpoint:
            device.check(self.cfg, on_cpu=self.cfg.cpu or not torch.cuda.is_available())
        model = super().build_model(args, from_checkpoint)
        device.use(model, device.chosen(self.cfg))
        return model

    def build_generator(
        self,
        models: list[BaseFairseqModel],
        args: Any,
        seq_gen_cls: Any = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        prefix_allowed_tokens_fn: Any = None,
    ) -> Any:
        """Make lsq's search where fairseq's options `args` allow it, else fairseq's generator."""
        special = {"seq_gen_cls": seq_gen_cls, "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn}
        reason = generator.obstacle(models, args, {**(extra_gen_cls_kwargs or {}), **special})
        if reason is not None:
            logger.info("generating by fairseq's generator, because of %s", reason)
            return super().build_generator(
                models, args, extra_gen_cls_kwargs=extra_gen_cls_kwargs, **special
            )
        by = "its int8 engine" if generator.engine_backend(models) else "the models' own steps"
        logger.info("generating by lsq's search and %s", by)
        return generator.LSQGenerator(models, self.target_dictionary, args)

    def prepare(self, trainer: Trainer) -> None:
        """Prepare as GradientTask does; then begin to watch the model and to choose its masks."""
        super().prepare(trainer)
        self.model = model = trainer.get_model()
        products.check_report(self.cfg.lsq_gemm_coverage)
        if wants_sparsity(model):
            self.sparsity = sparsity_of(model, updates=self.updates_done)
        if distributed.get_global_rank() != 0:
            return
        device.report(model, self.cfg)
        if any(True for _ in quantized_tensors(model)):
            self.signals = Signals(
                model,
                interval=interval_of(self.cfg.log_interval),
                folder=self.cfg.tensorboard_logdir or None,
                step="update",
                option="--lsq-clips {}",
            )
            # fairseq does not say when training ends: summaries come when the task is dropped
            weakref.finalize(self, self.signals.finish)
            weakref.finalize(self, products.report_tuned, self.cfg.lsq_gemm_coverage)

    def train_step(
        self,
        sample: dict[str, Any],
        model,
        criterion,
        optimizer,
        update_num: int,
        ignore_grad: bool = False,
    ):
        # a loop without epochs does not call `prepare`, which sets the model
        if not self.planned and self.model is not None:
            self.planned = True
            if any(isinstance(module, ProgramModule) for module in self.model.modules()):
                batch = self.bounding_batch(self.model)
                plan_training(self.model, criterion, batch, str(self.cfg.lsq_memory))
        with nullcontext() if self.signals is None else self.signals.observing(update_num + 1):
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def get_batch_iterator(self, dataset, *arguments, **options):
        """Make fairseq's iterator over `dataset`; its batches have Paddings."""
        iterator = super().get_batch_iterator(dataset, *arguments, **options)
        collate = iterator.collate_fn
        if getattr(collate, "func", None) is not with_paddings:  # wrap kept iterators once
            iterator.collate_fn = partial(with_paddings, collate, self.source_dictionary.pad())
        return iterator

    def bounding_batch(self, model: BaseFairseqModel) -> dict[str, Any]:
        """Make a batch that bounds every batch of this training; see `memory.bounding_batch`."""
        raise NotImplementedError

    def optimizer_step(self, optimizer, model, update_num: int) -> None:
        """Update the parameters; fairseq calls it once all gradients of an update are there."""
        if self.signals is not None:
            self.signals.record(update_num + 1, getattr(optimizer, "gradient_factor", 1.0))
        if self.sparsity is not None:
            self.sparsity.draw()
        super().optimizer_step(optimizer, model, update_num)
        if self.sparsity is not None:
            self.sparsity.step()


@dataclass
class LSQTranslationConfig(TranslationConfig, TaskOptions):
    """The options of translation."""

    required_seq_len_multiple: int = II("dataset.required_seq_len_multiple")


@register_task("lsq_translation", dataclass=LSQTranslationConfig)
class LSQTranslationTask(LSQTask, TranslationTask):
    """fairseq's translation as a task of lsq."""

    @cached_property
    def _source_words(self) -> Words:
        return generator.words_of(self.source_dictionary)

    def inference_step(
        self,
        search: Any,
        models: list[BaseFairseqModel],
        sample: dict[str, Any],
        *arguments,
        **options,
    ) -> list[list[dict[str, Any]]]:
        """Translate a batch; an empty line has one hypothesis without words."""
        found = super().inference_step(search, models, sample, *arguments, **options)
        words, sources = self.target_dictionary, sample["net_input"]["src_tokens"]
        for number, source in enumerate(generator.without(sources, self.source_dictionary.pad())):
            if self._source_words.says_nothing(source.tolist()):
                found[number] = [generator.without_words(words.eos(), sources.device)]
        return found

    def begin_valid_epoch(self, epoch: int, model) -> None:
        super().begin_valid_epoch(epoch, model)
        found = getattr(self, "sequence_generator", None)
        if isinstance(found, generator.LSQGenerator):
            found.forget_weights()

    def bounding_batch(self, model: BaseFairseqModel) -> dict[str, Any]:
        limits = zip(self.max_positions(), model.max_positions(), strict=True)
        return bounding_batch(
            self.target_dictionary,
            max_tokens=self.cfg.max_tokens,
            max_sentences=self.cfg.batch_size,
            max_positions=tuple(min(pair) for pair in limits),
            length_multiple=self.cfg.required_seq_len_multiple,
        )
