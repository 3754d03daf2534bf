"""Exchange of gradients between workers by `lsq.dist`, for any task of fairseq. Its options derive
from GradientOptions, and the task from GradientTask, before fairseq's classes."""

import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from omegaconf import II
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientCompression, GradientConfig, compress_gradients, roll_call
from lsq.dist.config import MODES

logger = logging.getLogger(__name__)

NONE = "none"
DDP_BACKENDS = ("pytorch_ddp", "c10d")
"""fairseq's names of PyTorch's DistributedDataParallel."""
_fairseq_begin_epoch = Trainer.begin_epoch


def option(default: Any, text: str) -> Any:
    """Make a field for fairseq's dataclasses of options, with its help."""
    return field(default=default, metadata={"help": text})


@dataclass
class GradientOptions:
    """Options of the exchange between workers; the last ones are fairseq's own."""

    lsq_gradients: ChoiceEnum((NONE, *MODES)) = option(
        NONE,
        "how workers average gradients: as DDP does by itself (none), in int8 (int8: in two hops;"
        " int8_hier: between nodes only; gcq: LightSeq's scheme, for few workers), in 4.5 or 5.25"
        " bits (lean, lean5), in bf16 or fp16, or by what a trial finds fastest (auto)",
    )
    lsq_gradients_node_size: Optional[int] = option(  # noqa: UP045  fairseq cannot read X | None
        None, "workers on a node; default: as torchrun started them"
    )
    lsq_timeout: float = option(
        GradientConfig.timeout_s,
        "seconds that a worker waits for the others in an exchange before the training fails",
    )
    ddp_backend: str = II("distributed_training.ddp_backend")
    ddp_comm_hook: str = II("distributed_training.ddp_comm_hook")


class GradientTask:
    """Mixin of tasks that exchange gradients by the GradientOptions in `cfg`."""

    compression: GradientCompression | None = None
    updates_done: int | None = None
    """Updates of the checkpoint that this training resumes; None before the first epoch."""

    def prepare(self, trainer: Trainer) -> None:
        """Set up the exchange, before the first epoch: an error in a step would make fairseq write
        crash.pt. ValueError: the options do not fit each other or the launch."""
        self.updates_done = trainer.get_num_updates()
        limit_waiting(self.cfg.lsq_timeout)
        roll_call.register()
        if str(self.cfg.lsq_gradients) != NONE:
            self.compression = install(self.cfg, trainer.model)

    def train_step(
        self, sample: dict[str, Any], model, criterion, optimizer, update_num: int, *rest, **options
    ):
        """Compute a batch, as fairseq does; RankLost if other processes are gone."""
        try:
            return super().train_step(
                sample, model, criterion, optimizer, update_num, *rest, **options
            )
        except RuntimeError as error:
            roll_call.raise_named(error)


def begin_epoch(trainer: Trainer, epoch: int) -> None:
    """Replace Trainer.begin_epoch to call `prepare`: fairseq shows a task the model unwrapped."""
    if isinstance(trainer.task, GradientTask) and trainer.task.updates_done is None:
        trainer.task.prepare(trainer)
    _fairseq_begin_epoch(trainer, epoch)


Trainer.begin_epoch = begin_epoch


def install(options: GradientOptions, model: nn.Module) -> GradientCompression | None:
    """Exchange the gradients of `model`, wrapped for data parallel training; None with one worker.
    ValueError: the options do not fit each other or the launch."""
    mode, config = str(options.lsq_gradients), configuration(options)
    together = distributed.is_available() and distributed.is_initialized()
    if not together or distributed.get_world_size() == 1:
        logger.info("--lsq-gradients %s has nothing to do: there is one worker", mode)
        return None
    if str(options.ddp_backend) not in DDP_BACKENDS:
        raise ValueError(
            f"--lsq-gradients {mode} works with --ddp-backend {' or '.join(DDP_BACKENDS)}, but"
            f" {options.ddp_backend} was given; leave one of the two out"
        )
    if str(options.ddp_comm_hook) != "none":
        raise ValueError(
            f"--lsq-gradients {mode} and --ddp-comm-hook {options.ddp_comm_hook} are two ways to"
            " exchange gradients; leave one of them out"
        )
    wrapped = (one for one in model.modules() if isinstance(one, DistributedDataParallel))
    parallel = next(wrapped, None)
    if parallel is None:
        raise ValueError(
            f"--lsq-gradients {mode} needs fairseq's data parallel training, but the model is not"
            " wrapped for it; leave out --use-bmuf and whatever else replaces it"
        )
    compression = compress_gradients(parallel, config)
    logger.info(
        "gradients: %s between %d workers", compression.mode, compression.topology.world_size
    )
    return compression


def configuration(options: GradientOptions) -> GradientConfig:
    """Make the GradientConfig of options other than "none"; ValueError if a value is wrong."""
    try:
        return GradientConfig(
            mode=str(options.lsq_gradients),
            node_size=options.lsq_gradients_node_size,
            timeout_s=options.lsq_timeout,
        )
    except ValueError as error:
        raise ValueError(
            f"--lsq-gradients {options.lsq_gradients} and its options: {error}"
        ) from error


def limit_waiting(seconds: float) -> None:
    """Set the timeout of exchanges in fairseq's groups; ValueError if it is not above 0."""
    if not seconds > 0:
        raise ValueError(f"--lsq-timeout is {seconds}; it must be a number of seconds above 0")
    if distributed.is_available() and distributed.is_initialized():
        for group in (distributed.group.WORLD, distributed_utils.get_global_group()):
            group.set_timeout(timedelta(seconds=seconds))
