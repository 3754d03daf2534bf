"""`lsq train`: fairseq-train with lsq's plugin loaded and fairseq's traps removed."""

import contextlib
import importlib.util
import logging
import math
import os
import re
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fairseq_cli.train as fairseq_train
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from omegaconf import DictConfig

from lsq.commands import launch, limits, logs
from lsq.commands.interruption import Interrupted, Interruption, name_of
from lsq.commands.launch import ARCHITECTURE
from lsq.commands.options import (
    HELP,
    HelpFormatter,
    add_options,
    check_writable,
    is_given,
    one_line_errors,
)
from lsq.commands.user_code import UserCode
from lsq.commands.user_dir import user_dir
from lsq.dist import roll_call
from lsq.dist.agreement import any_process
from lsq.fairseq import architectures
from lsq.fairseq.checkpoint import LAST
from lsq.fairseq.compatibility import checkpoints, replaced
from lsq.fairseq.language_model import TASK as LANGUAGE_MODELING
from lsq.files import check_name

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint(_last|_best|_?\d+|_\d+_\d+|\.best_\w+_[\d.]+)\.pt")
TASK = "lsq_translation"
CRITERION = "lsq_label_smoothed_cross_entropy"
OPTIMIZER = "lsq_adam"


def parse(
    parser: ArgumentParser,
    arguments: list[str],
    program: str,
    description: str,
    defaults: dict[str, str | None],
) -> Namespace:
    """Parse with a parser of fairseq's; --help prints all options. ValueError or SystemExit."""
    logs.quieten()
    parser.prog, parser.description = program, description
    parser.usage, parser.formatter_class = f"{program} DATA [options]", HelpFormatter
    one_line_errors(parser)
    add_options(parser, UserCode)
    wants_help = bool(HELP & set(arguments))
    if wants_help:
        arguments = [argument for argument in arguments if argument not in HELP]
    passes = 0

    def modify(parser: ArgumentParser) -> None:  # fairseq calls it before each of its two passes
        nonlocal passes
        passes += 1
        # fairseq's default of 8 drops sentences
        parser.set_defaults(required_batch_size_multiple=1, **defaults)
        if wants_help and passes == 2:
            parser.print_help()
            parser.exit(0)

    if not is_given("--user-dir", arguments):
        arguments = ["--user-dir", str(user_dir()), *arguments]
    check_user_dir(peek(arguments, "--user-dir"))
    args = options.parse_args_and_arch(parser, arguments, modify_parser=modify)
    del vars(args)["import"]  # checkpoints hold what it declared
    # fairseq turns on --tpu with --bf16
    args.tpu = any(argument == "--tpu" for argument in arguments)
    limits.check(args)
    return args


def check_user_dir(folder: str | None) -> None:
    """Raise ValueError unless fairseq finds the folder: as given, in its package or beside it."""
    own = Path(importlib.util.find_spec("fairseq").origin).parent
    roots = Path(), own, own.parent
    if folder is not None and not any((root / folder).is_dir() for root in roots):
        raise ValueError(
            f"--user-dir {folder} is no folder; leave it out for lsq's own plugin, which `lsq"
            " user-dir` names"
        )


def peek(arguments: list[str], *names: str) -> str | None:
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    # fairseq's parser refuses a missing value
    first.add_argument(*names, dest="value", nargs="?")
    return first.parse_known_args(arguments)[0].value


def check_data(args: Namespace) -> None:
    """Raise ValueError unless the folders exist and hold binarised data for the task."""
    for folder in args.data.split(os.pathsep):
        if not Path(folder).is_dir():
            raise ValueError(
                f"there is no data folder {folder}; lsq train-text or fairseq-preprocess makes one"
            )
        if not any(Path(folder).glob("dict*.txt")) and any(Path(folder, "data").glob("dict*.txt")):
            raise ValueError(
                f"there are no binarised data in {folder}; give {Path(folder, 'data')}"
            )
        names = [path.name for path in Path(folder).glob("dict*.txt")]
        if args.task == TASK and names == ["dict.txt"]:
            raise ValueError(
                f"{folder} holds text without translations; language models read it: --task"
                f" {LANGUAGE_MODELING}, which"
                " lsq train takes by itself with --arch lsq_transformer_lm"
            )


def check_save_dir(args: Namespace) -> None:
    """Raise ValueError for a --save-dir that is a file, unwritable, not UTF-8, or has checkpoints
    but none to go on from: fairseq would begin anew and overwrite the best one."""
    check_name(args.save_dir)
    if os.path.exists(args.save_dir) and not os.path.isdir(args.save_dir):
        raise ValueError(f"--save-dir {args.save_dir} is a file; give a folder")
    if not args.no_save:
        check_writable(Path(args.save_dir), "--save-dir", makes_folders=True)
    default = args.restore_file == LAST
    if (
        args.no_save
        or args.no_last_checkpoints
        or not default
        or os.path.lexists(Path(args.save_dir, LAST))
    ):
        return
    found = sorted(
        path.name
        for path in Path(args.save_dir).glob("checkpoint*.pt")
        if CHECKPOINT.fullmatch(path.name)
    )
    if found:
        raise ValueError(
            f"{args.save_dir} holds {found[0]}, but no {LAST} to go on from, and a new training"
            " would write over it;"
            f" give --restore-file {Path(args.save_dir, found[0])}, or another --save-dir"
        )


def parse_training(arguments: list[str], with_data: bool = True) -> Namespace:
    """Parse fairseq's options of a training; ValueError if they do not fit the data or machine."""
    architecture = peek(arguments, "--arch", "-a") or ARCHITECTURE
    defaults = {"arch": ARCHITECTURE, "distributed_world_size": None}
    if architectures.is_ours(architecture):
        defaults |= {"criterion": CRITERION, "optimizer": OPTIMIZER}
    args = parse(
        options.get_training_parser(default_task=architectures.task_of(architecture)),
        arguments,
        "lsq train",
        "Train a model: the options are fairseq-train's and those of lsq's quantisers (--lsq-...).",
        defaults,
    )
    if args.max_tokens is None and args.batch_size is None:
        raise ValueError(
            "give the size of a batch: --max-tokens (in tokens) or --batch-size (in sentences)"
        )
    limits.check_training(args)
    if with_data:
        check_data(args)
        check_save_dir(args)
    launch.choose_device(args, architectures.is_ours(architecture))
    launch.check_precision(args)
    launch.fill_in(args)
    return args


def train_process(cfg: DictConfig) -> None:
    """Run one process of a training; Interrupted after a signal, ExchangeFailed if one is lost."""
    for function in (checkpoint_utils.save_checkpoint, fairseq_train.should_stop_early):
        if hasattr(function, "best"):  # of an earlier training in this process
            del function.best
    with Interruption() as interruption, stopping_between_updates(interruption):
        roll_call.register()
        with roll_call.naming_the_lost(before=interruption.conclude), writing_alone(cfg):
            fairseq_train.main(cfg)


@contextlib.contextmanager
def writing_alone(cfg: DictConfig) -> Iterator[None]:
    """Lock --save-dir within this context, or raise Busy; with --no-save nothing is locked."""
    nobody = {"verify_checkpoint_directory": lambda folder: None} if cfg.checkpoint.no_save else {}
    with replaced(checkpoint_utils, **nobody):
        try:
            yield
        finally:
            checkpoints.release_folder()


@contextlib.contextmanager
def stopping_between_updates(interruption: Interruption) -> Iterator[None]:
    """Let a signal stop fairseq's training after the current update, within this context. A resumed
    training first runs a validation that was left out. It makes no update beyond --max-update."""
    validate_and_save, validate = fairseq_train.validate_and_save, fairseq_train.validate
    train_epoch, load_checkpoint = fairseq_train.train, checkpoint_utils.load_checkpoint
    reached: SimpleNamespace | None = None

    def load(cfg: DictConfig, trainer, **options):
        nonlocal reached
        extra_state, epoch_itr = load_checkpoint(cfg, trainer, **options)
        if extra_state is not None and trainer.get_num_updates() > 0:
            state = extra_state["train_iterator"]
            ended = state["iterations_in_epoch"] == 0  # the state then is of the next epoch
            # stands for the iterator of batches when fairseq writes a checkpoint
            reached = SimpleNamespace(
                epoch=state["epoch"] - ended,
                end_of_epoch=lambda: ended,
                state_dict=lambda: state,
                validated=extra_state.get("val_loss") is not None,
            )
        return extra_state, epoch_itr

    def train_on(cfg: DictConfig, trainer, task, epoch_itr):
        nonlocal reached
        state, reached = reached, None
        if state is None:
            return train_epoch(cfg, trainer, task, epoch_itr)
        most = cfg.optimization.max_update or math.inf
        losses, stop = [None], trainer.get_num_updates() >= most
        if not state.validated:
            subsets = cfg.dataset.valid_subset.split(",")
            losses, stop = after_update(cfg, trainer, task, state, subsets, state.end_of_epoch())
        return (losses, True) if stop else train_epoch(cfg, trainer, task, epoch_itr)

    def save_and_stop(cfg: DictConfig, trainer, epoch_itr) -> None:
        path = checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        # wait for the process that writes: torchrun stops all when the first process ends
        any_process(False, trainer.device)
        # the signal may have reached another process only
        number = interruption.requested or signal.SIGTERM
        what = f"wrote {path}" if path else "this process was not to write a checkpoint"
        raise Interrupted(
            number,
            f"stopped by {name_of(number)} after {trainer.get_num_updates()} updates; {what}",
        )

    def after_update(cfg: DictConfig, trainer, task, epoch_itr, valid_subsets, end_of_epoch):
        interruption.defer()
        if any_process(interruption.requested is not None, trainer.device):
            save_and_stop(cfg, trainer, epoch_itr)
        try:
            return validate_and_save(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        except Interrupted:
            save_and_stop(cfg, trainer, epoch_itr)

    def interruptible_validate(cfg: DictConfig, *arguments):
        alone = cfg.distributed_training.distributed_world_size == 1
        metric = cfg.checkpoint.best_checkpoint_metric
        try:
            with interruption.at_once() if alone else contextlib.nullcontext():
                return validate(cfg, *arguments)
        except KeyError as error:
            if error.args != (metric,):
                raise
            raise ValueError(
                f"--best-checkpoint-metric is {metric}, which this training does not compute"
            ) from error

    with (
        replaced(
            fairseq_train,
            validate_and_save=after_update,
            validate=interruptible_validate,
            train=train_on,
        ),
        replaced(checkpoint_utils, load_checkpoint=load),
    ):
        yield


def run(arguments: list[str]) -> int:
    """Train as the options say; ValueError, OSError, or as `train_process` raises."""
    args = parse_training(arguments)
    command = launch.torchrun_command(args, arguments)
    if command is not None:
        os.execv(command[0], command)
    logging.getLogger().setLevel(logging.INFO)
    distributed_utils.call_main(convert_namespace_to_omegaconf(args), train_process)
    sys.stdout.flush()
    return 0
