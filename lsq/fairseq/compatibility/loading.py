"""Checkpoints from the disk: what may be in them."""

import argparse
import pickle
import typing
from collections import defaultdict

import fairseq.distributed.utils
import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils
from numpy._core import multiarray

_fairseq_load = checkpoint_utils.load_checkpoint_to_cpu
NUMPY_DTYPES = ("bool", "int32", "int64", "float32", "float64")


def register_types() -> None:
    """Let torch.load take the types in fairseq's checkpoints, as on disk and as processes send them to each other."""
    of_numpy = [numpy.ndarray, numpy.dtype, multiarray._reconstruct, multiarray.scalar]
    of_numpy += [type(numpy.dtype(name)) for name in NUMPY_DTYPES]
    of_omegaconf = [omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.base.ContainerMetadata]
    of_omegaconf += [omegaconf.base.Metadata, omegaconf.nodes.AnyNode, typing.Any, defaultdict, dict, list, int]
    own = [argparse.Namespace, fairseq.distributed.utils._TensorPlaceholder]
    torch.serialization.add_safe_globals([*own, *of_numpy, *of_omegaconf])


def load_checkpoint(path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False) -> dict:
    """Takes the place of fairseq's load_checkpoint_to_cpu.

    Raises:
        ValueError: the file is not a checkpoint of fairseq's, or holds types that are not safe to load.
    """
    try:
        return _fairseq_load(path, arg_overrides, load_on_all_ranks)
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is not a checkpoint of fairseq's ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
