"""Files of tuned products, for tests."""

from pathlib import Path

from lsq.gemm.device import CpuValidators, CudaValidators

from lsq.gemm import configuration_file, device, lookup
from lsq.gemm.configuration import (
    CpuConfiguration,
    CublasConfiguration,
    Entry,
    TileConfiguration,
    Times,
)
from lsq.gemm.configuration_file import ConfigurationFile
from lsq.gemm.product_key import ProductKey
from tests.gemm.operands import matmul

DATE = "2026-01-31T23:59:59Z"
CPU = CpuValidators(
    device="Example CPU", features=("avx2", "avx512f"), threads=2, library_version="3.7.1"
)
GPU = CudaValidators(device="Example GPU", sm=90, multiprocessors=132, library_version="13.0.2")
TIMES = Times(chosen=80.0, default=100.0, float=250.0)


def key(m=64, **changes):
    """The key of project [64, 256] times [128, 256] transposed, or with changes."""
    return ProductKey(**{"op": "project", "m": m, "n": 128, "k": 256} | changes)


def rows(count, kernel="plain"):
    """A configuration of a CPU."""
    return CpuConfiguration(kernel=kernel, rows=count)


def entry(m=64, configuration=None, times=TIMES, **changes):
    """An entry for `key`, which takes 96 rows at a time."""
    configuration = configuration or rows(96)
    return Entry(
        key=key(m, **changes), configuration=configuration, times=times, spread=0.02, date=DATE
    )


def cublas(**changes):
    """Some algorithm of cuBLASLt."""
    numbers = dict(tile=20, stages=8, split_k=1, reduction_scheme=0, swizzle=0, custom_option=0)
    numbers |= dict(id=66, inner_shape=0, cluster_shape=2, workspace_bytes=1024)
    return CublasConfiguration(**{"algorithm": bytes(range(64)), **numbers} | changes)


def tile(**changes):
    """A tile of lsq's own kernels on a GPU."""
    return TileConfiguration(**{"rows": 64, "columns": 64, "stages": 3} | changes)


def cublas_entry(configuration=None, **numbers):
    """An entry for int8 [41, 64] times [48, 64] transposed to int32 by itself, or with changes."""
    return Entry(
        key=matmul(**numbers),
        configuration=configuration or cublas(),
        times=TIMES,
        spread=0.0,
        date=DATE,
    )


def file(*entries, validators=CPU):
    """A file of these entries."""
    return ConfigurationFile(validators=validators, entries=entries)


class Machine:
    """A device with folders of its own, the user's and the package's.

    `here` are its validators by kind; a kind that is missing is not there.
    """

    def __init__(self, monkeypatch, folder: Path) -> None:
        self.user = folder / "user" / "lsq" / "gemm"
        self.package = folder / "package"
        self.here = {"cpu": CPU}
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "user"))
        monkeypatch.setattr(configuration_file, "PACKAGE_FOLDER", self.package)
        monkeypatch.setattr(device, "here", self._here)
        monkeypatch.setattr(lookup, "_tables", {})
        monkeypatch.setattr(lookup, "_explicit", False)
        monkeypatch.setattr(lookup, "_warned", set())

    def _here(self, kind="cpu"):
        if kind not in self.here:
            raise RuntimeError(f"there is no {kind} here")
        return self.here[kind]

    def add(self, folder: Path, name: str, *entries, validators=CPU) -> Path:
        """Write a file."""
        path = folder / f"{name}.json"
        configuration_file.write(path, file(*entries, validators=validators))
        return path
