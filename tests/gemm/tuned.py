"""Files of tuned products, for tests."""

import itertools
from pathlib import Path

from lsq.gemm import configuration_file, cuda
from lsq.gemm.configuration import CublasConfiguration, Entry, TileConfiguration, Times
from lsq.gemm.configuration_file import ConfigurationFile, Validators
from lsq.gemm.product_key import ProductKey
from tests.gemm.operands import matmul

GENERATIONS = itertools.count(1000, 1000)
DATE = "2026-01-31T23:59:59Z"
GPU = Validators(device="Example GPU", sm=90, multiprocessors=132, library_version="13.0.2")
TIMES = Times(chosen=80.0, default=100.0, float=250.0)


def key(m=64, **changes):
    """The key of project [64, 256] times [128, 256] transposed, or with changes."""
    return ProductKey(**{"op": "project", "m": m, "n": 128, "k": 256} | changes)


def tile(**changes):
    """A tile of lsq's own kernels on a GPU."""
    return TileConfiguration(**{"rows": 64, "columns": 64, "stages": 3} | changes)


def entry(m=64, configuration=None, times=TIMES, **changes):
    """An entry for `key`, by default a tile of five stages."""
    return Entry(
        key=key(m, **changes),
        configuration=configuration or tile(stages=5),
        times=times,
        spread=0.02,
        date=DATE,
    )


def cublas(**changes):
    """Some algorithm of cuBLASLt."""
    usual = {"algorithm": bytes(range(64)), "workspace_bytes": 1024}
    return CublasConfiguration(**usual | changes)


def cublas_entry(configuration=None, **numbers):
    """An entry for int8 [41, 64] times [48, 64] transposed to int32 by itself, or with changes."""
    return Entry(
        key=matmul(**numbers),
        configuration=configuration or cublas(),
        times=TIMES,
        spread=0.0,
        date=DATE,
    )


def file(*entries, validators=GPU):
    """A file of these entries."""
    return ConfigurationFile(validators=validators, entries=entries)


class Machine:
    """A machine with folders of its own, the user's and the package's; `gpu` are the validators of
    its GPU, or None."""

    def __init__(self, monkeypatch, folder: Path, gpu=GPU) -> None:
        self.user = folder / "user" / "lsq" / "gemm"
        self.package = folder / "package"
        self.gpu = gpu
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "user"))
        monkeypatch.setattr(configuration_file, "PACKAGE_FOLDER", self.package)
        monkeypatch.setattr(configuration_file, "here", self._here)
        files = cuda.TunedFiles()
        files.generation = next(GENERATIONS)  # what was answered before is not asked for again
        monkeypatch.setattr(cuda, "files", files)

    def _here(self):
        if self.gpu is None:
            raise RuntimeError("there is no GPU here")
        return self.gpu

    def add(self, folder: Path, name: str, *entries, validators=GPU) -> Path:
        """Write a file."""
        path = folder / f"{name}.json"
        configuration_file.write(path, file(*entries, validators=validators))
        return path
