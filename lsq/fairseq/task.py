"""Tasks of lsq: fairseq's, with planned memory, signals, sparse weights and the gradients of
lsq.fairseq.gradients."""

import logging
import weakref
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.distributed import utils as distributed
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II

from lsq.fairseq import device, generator, tuned_products
from lsq.fairseq.device import DeviceOptions
from lsq.fairseq.gradients import GradientOptions, GradientTask
from lsq.fairseq.memory import bounding_batch, plan_training
from lsq.fairseq.paddings import Collater
from lsq.gemm import lookup
from lsq.layers.memory import MODES
from lsq.layers.module import ProgramModule
from lsq.models.sparsity import Sparsity, sparsity_of, wants_sparsity
from lsq.observe import Signals, quantized_tensors
from lsq.observe.signals import interval_of
from lsq.serving.subwords import Words

logger = logging.getLogger(__name__)

DICTIONARIES = "lsq_dictionaries"
"""Under which name a checkpoint keeps the checksums of its dictionaries."""


@dataclass
class TaskOptions(GradientOptions, DeviceOptions):
    """Options of LSQTask: gradients, device, memory, tuned products; the last are fairseq's."""

    lsq_memory: ChoiceEnum(MODES) = field(
        default="planned",
        metadata={
            "help": "where the tensors of a training step lie: planned ahead for the largest batch"
            " (planned), planned "
            "and every access checked (guard, slow), or wherever PyTorch finds room (naive)"
        },
    )
    lsq_gemm_config: Optional[str] = field(  # noqa: UP045  fairseq cannot read str | None
        default=None,
        metadata={
            "help": (
                "file of tuned matrix products to use, and no other (see `lsq tune` and `lsq"
                " configs`)"
            )
        },
    )
    lsq_gemm_coverage: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": (
                "write to this file, after training on a GPU, which products were not tuned; for"
                " `lsq tune --shapes`"
            )
        },
    )
    max_tokens: Optional[int] = II("dataset.max_tokens")  # noqa: UP045  fairseq cannot read int | None
    batch_size: Optional[int] = II("dataset.batch_size")  # noqa: UP045
    log_interval: int = II("common.log_interval")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")  # noqa: UP045  fairseq cannot read str | None


class LSQTask(GradientTask):
    """Base of lsq's tasks, before fairseq's class, with TaskOptions in `cfg`."""

    signals: Signals | None = None
    model: BaseFairseqModel | None = None
    planned: bool = False
    sparsity: Sparsity | None = None
    """Chooses masks, where --lsq-sparsity is given."""

    def __init__(self, cfg: TaskOptions, *dictionaries, **options):
        super().__init__(cfg, *dictionaries, **options)
        self.cfg = cfg  # fairseq's older tasks keep it as `args` alone
        if cfg.lsq_gemm_config:
            lookup.set_files([Path(cfg.lsq_gemm_config)])

    def state_dict(self) -> dict[str, Any]:
        """What fairseq keeps of the task in a checkpoint: also which words the model was trained
        with."""
        return {**super().state_dict(), DICTIONARIES: self._dictionaries()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by fairseq for each checkpoint that it generates with.

        Raises:
            ValueError: see `check_resumed`.
        """
        self.check_resumed(state_dict)
        super().load_state_dict(
            {name: value for name, value in state_dict.items() if name != DICTIONARIES}
        )

    def check_resumed(self, state_dict: dict[str, Any]) -> None:
        """Look at what `state_dict` gave when the checkpoint was written, before a training goes on
        from it.

        Raises:
            ValueError: the checkpoint is of other words, or of the same in another order, which the
                data cannot tell.
        """
        trained = state_dict.get(DICTIONARIES)
        if trained is None:
            return
        known = trained if isinstance(trained, dict) else {}
        here = self._dictionaries().items()
        sides = [
            side
            for side, checksum in here
            if type(known.get(side)) is not int or known[side] != checksum
        ]
        if sides:
            raise ValueError(
                f"{self.cfg.data} has another {' and '.join(sides)} dictionary than the checkpoint"
                " was trained with;"
                " use data that was made with the dictionaries (dict.*.txt) of the training"
            )

    def _dictionaries(self) -> dict[str, int]:
        """CRC-32 of the words of each side."""
        sides = {"source": self.source_dictionary, "target": self.target_dictionary}
        return {
            side: zlib.crc32("\n".join(words.symbols).encode()) for side, words in sides.items()
        }

    def build_model(self, args: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model of these options, to compute where the task's own options say.

        Raises:
            ValueError: that place does not work; or see the model's `build_model`.
        """
        if not from_checkpoint:
            device.check(self.cfg, on_cpu=self.cfg.cpu or not torch.cuda.is_available())
        model = super().build_model(args, from_checkpoint)
        device.place(model, self.cfg)
        return model

    def build_generator(
        self,
        models: list[BaseFairseqModel],
        args: Any,
        seq_gen_cls: Any = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        prefix_allowed_tokens_fn: Any = None,
    ) -> Any:
        """What generates with `models`: lsq's search where fairseq's options `args` allow, else
        fairseq's generator.

        Raises:
            ValueError: an option is out of its range.
        """
        special = {"seq_gen_cls": seq_gen_cls, "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn}
        reason = generator.obstacle(models, args, {**(extra_gen_cls_kwargs or {}), **special})
        if reason is None:
            by = "its int8 engine" if generator.engine_place(models) else "the models' own steps"
            logger.info("generating by lsq's search and %s", by)
            return generator.LSQGenerator(models, self.target_dictionary, args)
        logger.info("generating by fairseq's generator, because of %s", reason)
        return super().build_generator(
            models, args, extra_gen_cls_kwargs=extra_gen_cls_kwargs, **special
        )

    def begin_epoch(self, epoch: int, model) -> None:
        """Called by fairseq before each epoch, with the model itself."""
        super().begin_epoch(epoch, model)
        tuned_products.check(self.cfg.lsq_gemm_coverage)
        if self.model is None and distributed.get_global_rank() == 0:
            device.report(model, self.cfg)
        self.model = model
        if self.sparsity is None and wants_sparsity(model):
            self.sparsity = sparsity_of(model, updates=self.updates_done)
        if (
            self.signals is None
            and distributed.get_global_rank() == 0
            and any(True for _ in quantized_tensors(model))
        ):
            self.signals = Signals(
                model,
                interval=interval_of(self.cfg.log_interval),
                folder=self.cfg.tensorboard_logdir or None,
                step="update",
                option="--lsq-clip-init {}",
            )
            # fairseq tells no task that training is over: the summaries come when it drops the
            # task, or at exit
            weakref.finalize(self, self.signals.finish)
            weakref.finalize(self, tuned_products.report, self.cfg.lsq_gemm_coverage)

    def train_step(
        self,
        sample: dict[str, Any],
        model,
        criterion,
        optimizer,
        update_num: int,
        ignore_grad: bool = False,
    ):
        """Called by fairseq for each batch; `update_num` counts the updates that are done."""
        if not self.planned:
            self.plan_memory(criterion)
        with nullcontext() if self.signals is None else self.signals.observing(update_num + 1):
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def plan_memory(self, criterion) -> None:
        """Plan the memory of a training step, once, for the largest batch of this training.

        Raises:
            ValueError: the step cannot be planned.
        """
        self.planned = True
        if self.model is not None and any(
            isinstance(module, ProgramModule) for module in self.model.modules()
        ):
            plan_training(
                self.model, criterion, self.bounding_batch(self.model), str(self.cfg.lsq_memory)
            )

    def get_batch_iterator(self, dataset, *arguments, **options):
        """fairseq's iterator over `dataset`, whose batches have their Paddings."""
        found = super().get_batch_iterator(dataset, *arguments, **options)
        if not isinstance(found.collate_fn, Collater):  # fairseq keeps iterators
            found.collate_fn = Collater(found.collate_fn, self.source_dictionary.pad())
        return found

    def bounding_batch(self, model: BaseFairseqModel) -> dict[str, Any]:
        """A batch that bounds every batch of this training.

        See `lsq.fairseq.memory.bounding_batch`.
        """
        raise NotImplementedError

    def optimizer_step(self, optimizer, model, update_num: int) -> None:
        """Called by fairseq once the gradients of an update are there."""
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
        """Called by fairseq to translate a batch with `search`, any generator.

        Returns:
            The hypotheses of each sentence; of an empty line one without words, as `lsq translate`.
        """
        found = super().inference_step(search, models, sample, *arguments, **options)
        words, sources = self.target_dictionary, sample["net_input"]["src_tokens"]
        for number, source in enumerate(generator.without(sources, self.source_dictionary.pad())):
            if self._source_words.says_nothing(source.tolist()):
                found[number] = [generator.without_words(words.eos(), sources.device)]
        return found

    def begin_valid_epoch(self, epoch: int, model) -> None:
        """Called by fairseq before each validation, which translates with --eval-bleu."""
        super().begin_valid_epoch(epoch, model)
        found = getattr(self, "sequence_generator", None)
        if isinstance(found, generator.LSQGenerator):
            found.forget_weights()

    def bounding_batch(self, model: BaseFairseqModel) -> dict[str, Any]:
        """A batch that bounds every batch of this training.

        See `lsq.fairseq.memory.bounding_batch`.
        """
        limits = zip(self.max_positions(), model.max_positions(), strict=True)
        return bounding_batch(
            self.target_dictionary,
            max_tokens=self.cfg.max_tokens,
            max_sentences=self.cfg.batch_size,
            max_positions=tuple(min(pair) for pair in limits),
            length_multiple=self.cfg.required_seq_len_multiple,
        )
