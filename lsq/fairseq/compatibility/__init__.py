"""What fairseq 0.12 needs to work with this PyTorch, on machines without a GPU and on full disks.

Importing this package prepares fairseq once for the whole process:

* loading: the types that fairseq puts into its own checkpoints are registered as safe for
  torch.load, which stays as strict as it is by default about all others; files that are damaged,
  missing or no checkpoints of fairseq's are named;
* saving: under another name first, then renamed. fairseq does so for the first file of a save but
  copies checkpoint_best.pt and checkpoint_last.pt over the previous ones, which are lost when the
  disk is full;
* resuming: every epoch goes on with the batches of a training that was not interrupted, and on
  another number of processes without skipping any; an optimizer of other parameters is refused;
* blocks: text is cut into sentences for language models, with a NumPy that has no numpy.compat;
* batches: a sentence beyond --max-tokens is named, and so is a data set of which nothing is left;
* divergence: the first tensor that holds NaN or infinity is named, and no checkpoint of it is
  written;
* data parallel training on the CPU: fairseq names a device for every module, which PyTorch accepts
  for GPUs only.
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

from lsq.fairseq.compatibility import batches, divergence, loading, resuming, saving
from lsq.fairseq.compatibility.data_parallel import CPUSafeDataParallel
from lsq.fairseq.compatibility.replacement import replaced
from lsq.fairseq.compatibility.saving import CheckpointNotWritten

__all__ = ["CPUSafeDataParallel", "CheckpointNotWritten", "replaced"]

loading.register_types()
checkpoint_utils.load_checkpoint_to_cpu = loading.load_checkpoint
Trainer.load_checkpoint = loading.load_training
checkpoint_utils.torch_persistent_save = saving.save_checkpoint
PathManager.copy = staticmethod(saving.copy_checkpoint)
data_utils.batch_by_size = batches.batch_by_size
token_block_dataset.np = SimpleNamespace(**vars(numpy) | {"compat": SimpleNamespace(long=int)})
iterators.GroupedIterator = resuming.GroupedIterator
EpochBatchIterator.state_dict = resuming.iterator_state
EpochBatchIterator.load_state_dict = resuming.load_iterator_state
EpochBatchIterator._get_iterator_for_epoch = resuming.iterator_for_epoch
FairseqOptimizer.load_state_dict = resuming.load_optimizer_state
Trainer.get_train_iterator = resuming.train_iterator
Trainer.reset_dummy_batch = resuming.keep_dummy_batch
Trainer.clip_grad_norm = divergence.clip_grad_norm
Trainer.train_step = divergence.train_step
# this PyTorch refuses its hooks on modules that return a dict
fairseq.trainer.NanDetector = contextlib.nullcontext
fairseq.models.distributed_fairseq_model.DistributedDataParallel = CPUSafeDataParallel
