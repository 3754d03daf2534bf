"""Calls the matrix products of lsq/csrc/runtime, which run in libcublasLt.

Which product for which tensors is decided in lsq/gemm/cublaslt.py; here everything is numbers and
addresses.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lsq import extras
from lsq.native import runtime

ALGORITHM_BYTES = 64

DTYPES = {torch.float32: 0, torch.int8: 3, torch.int32: 10, torch.bfloat16: 14}
"""torch's dtype -> cudaDataType."""


class ProductError(RuntimeError):
    """A call of libcublasLt that failed, or the library is missing; the message says which."""


class Candidate(NamedTuple):
    """An algorithm of libcublasLt as bytes, with the workspace that it needs."""

    data: bytes
    workspace_bytes: int


class _Spec(ctypes.Structure):
    """ProductSpec of cublaslt.h: what a product is to the library, all of it numbers."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "m n k dtype out_dtype transpose_a transpose_b leading_a leading_b leading_out"
        ).split()
    ]


def find_cublaslt() -> str:
    """Path of libcublasLt where CUDA's packages, its toolkit or the system have it. Raises
    RuntimeError: there is none."""
    try:
        from cuda import pathfinder

        return pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"no libcublasLt was found ({reason}): install CUDA's libraries with"
            f" `{extras.command('cuda13')}`, or a build of torch for CUDA"
        ) from error


def _call(name: str, *arguments) -> None:
    """Call a function of the launcher. Raises ProductError: its status is not 0."""
    status, message = runtime.call(f"lsq_product_{name}", *arguments)
    if status:
        raise ProductError(message)


def _checked(data: bytes) -> bytes:
    if len(data) != ALGORITHM_BYTES:
        raise ValueError(
            f"an algorithm of cuBLASLt is {ALGORITHM_BYTES} bytes, these are {len(data)}; the file"
            " that they come from is damaged: tune again"
        )
    return bytes(data)


class ProductLibrary:
    """One libcublasLt, for one device: the one that is current when an algorithm is first looked
    up.

    `path`: what `find_cublaslt` returns, or an emulated library. Raises ProductError: it cannot be
    loaded or lacks a function; RuntimeError: lsq's own library, which calls it, is not built.
    """

    def __init__(self, path: str) -> None:
        self._handle = ctypes.c_void_p()
        _call("open", os.fsencode(path), ctypes.byref(self._handle))

    def version(self) -> str:
        """Such as "13.0.2"; algorithms are valid for this version alone."""
        number = runtime.library().lsq_product_version(self._handle)
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def product(self, **spec: int) -> "Matmul":
        """Describe a product; keyword arguments as the fields of _Spec, dtypes as in DTYPES.
        Raises ProductError: the library refuses the description."""
        return Matmul(self._handle, _Spec(**spec))

    def close(self) -> None:
        """Let the library go; its products stay usable."""
        runtime.library().lsq_product_close(self._handle)
        self._handle = ctypes.c_void_p()


class Matmul:
    """One product in C++ (class MatrixProduct of cublaslt.h), which a launcher runs through
    `address`."""

    def __init__(self, library: ctypes.c_void_p, spec: _Spec) -> None:
        self._handle = ctypes.c_void_p()
        _call("create", library, ctypes.byref(spec), ctypes.byref(self._handle))

    @property
    def address(self) -> int:
        """Handle of the C++ object; valid until `close`."""
        return self._handle.value

    def candidates(self, workspace_bytes: int, limit: int) -> list[Candidate]:
        """The algorithms that the library proposes, best first; perhaps none. Raises ProductError:
        the product is not supported, or no CUDA context is current."""
        algorithms = ctypes.create_string_buffer(limit * ALGORITHM_BYTES)
        workspaces, count = (ctypes.c_int64 * limit)(), ctypes.c_int64()
        arguments = algorithms, workspaces, ctypes.byref(count)
        _call("candidates", self._handle, workspace_bytes, limit, *arguments)
        return [
            Candidate(algorithms.raw[ALGORITHM_BYTES * i :][:ALGORITHM_BYTES], workspaces[i])
            for i in range(count.value)
        ]

    def check(self, data: bytes) -> Candidate:
        """An algorithm with its workspace for this product. Raises ValueError: not 64 bytes;
        ProductError: the algorithm does not run this product on this device."""
        workspace_bytes = ctypes.c_int64()
        _call("check", self._handle, _checked(data), ctypes.byref(workspace_bytes))
        return Candidate(bytes(data), workspace_bytes.value)

    def choose(self, data: bytes) -> None:
        """Run with this algorithm from now on; raises as `check`."""
        _call("choose", self._handle, _checked(data))

    def run(
        self,
        operands: Sequence[int],
        *,
        workspace: int = 0,
        workspace_bytes: int = 0,
        stream: int = 0,
    ) -> None:
        """Queue the product.

        `operands`: addresses of a, b and out, multiples of 16. `workspace`: address of the
        workspace, a multiple of 256. `workspace_bytes`: its size. `stream`: a cudaStream_t. Raises
        ProductError: it cannot be queued; the message says why, with the shapes.
        """
        pointers = [ctypes.c_void_p(address) for address in operands]
        addresses = ctypes.c_void_p(workspace), workspace_bytes, ctypes.c_void_p(stream)
        _call("run", self._handle, *pointers, *addresses)

    def close(self) -> None:
        """Free it; nothing may run it any more."""
        runtime.library().lsq_product_destroy(self._handle)
        self._handle = ctypes.c_void_p()
