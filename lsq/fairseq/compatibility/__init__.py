"""Make fairseq 0.12 work with this PyTorch and NumPy, on machines without a GPU and on full disks.

Importing this package replaces functions of fairseq once for the whole process: how checkpoints are
read and written, where an epoch of a resumed training goes on, and what a diverged training says.
"""

import contextlib
from types import SimpleNamespace

import fairseq.models.distributed_fairseq_model
import fairseq.trainer
import numpy
from fairseq import checkpoint_utils
from fairseq.data import data_utils, iterators, token_block_dataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.file_io import PathManager
from fairseq.optim import FairseqOptimizer
from fairseq.trainer import Trainer

from lsq.fairseq.compatibility import batches, checkpoints, training
from lsq.fairseq.compatibility.checkpoints import CheckpointNotWritten, replaced
from lsq.fairseq.compatibility.training import CPUSafeDataParallel

__all__ = ["CPUSafeDataParallel", "CheckpointNotWritten", "replaced"]

checkpoints.register_types()
checkpoint_utils.load_checkpoint_to_cpu = checkpoints.load_checkpoint
Trainer.load_checkpoint = checkpoints.load_training
checkpoint_utils.verify_checkpoint_directory = checkpoints.claim_folder
checkpoint_utils.torch_persistent_save = checkpoints.save_checkpoint
PathManager.copy = staticmethod(checkpoints.copy_checkpoint)
data_utils.batch_by_size = batches.batch_by_size
token_block_dataset.np = SimpleNamespace(**vars(numpy) | {"compat": SimpleNamespace(long=int)})
iterators.GroupedIterator = batches.GroupedIterator
EpochBatchIterator.state_dict = batches.iterator_state
EpochBatchIterator.load_state_dict = batches.load_iterator_state
EpochBatchIterator._get_iterator_for_epoch = batches.iterator_for_epoch
FairseqOptimizer.load_state_dict = batches.load_optimizer_state
Trainer.get_train_iterator = batches.train_iterator
Trainer.reset_dummy_batch = batches.keep_dummy_batch
Trainer.clip_grad_norm = training.clip_grad_norm
Trainer.train_step = training.train_step
# this PyTorch refuses NanDetector's hooks on modules that return a dict
fairseq.trainer.NanDetector = contextlib.nullcontext
fairseq.models.distributed_fairseq_model.DistributedDataParallel = CPUSafeDataParallel
