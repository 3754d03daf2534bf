"""Calls the matrix products of lsq/csrc/runtime, which run in libcublasLt.

lsq/gemm/cublaslt.py decides which product runs for which tensors; here are numbers and addresses
alone.
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
    """A call of libcublasLt failed, or the library is missing; the message says which."""


class Candidate(NamedTuple):
    """An algorithm of libcublasLt, as bytes, and the workspace that it needs."""

    data: bytes
    workspace_bytes: int


class _Spec(ctypes.Structure):
    """ProductSpec of cublaslt.h: a product described in numbers."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "m n k dtype out_dtype transpose_a transpose_b leading_a leading_b leading_out"
        ).split()
    ]


def find_cublaslt() -> str:
    """Return the path of libcublasLt in CUDA's packages, its toolkit or the system. Raises
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
    """A libcublasLt for one device: the device that is current when an algorithm is first looked
    up.

    `path`: of `find_cublaslt`, or of an emulated library. Raises ProductError: it cannot be loaded
    or lacks a function; RuntimeError: lsq's launcher, which calls it, is not built.
    """

    def __init__(self, path: str) -> None:
        self._handle = ctypes.c_void_p()
        _call("open", os.fsencode(path), ctypes.byref(self._handle))

    def version(self) -> str:
        """Return the version, such as "13.0.2"; algorithms are valid for this version alone."""
        number = runtime.library().lsq_product_version(self._handle)
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def product(self, **spec: int) -> "Matmul":
        """Describe a product by the fields of _Spec, with dtypes as in DTYPES. Raises ProductError:
        the library refuses the description."""
        return Matmul(self._handle, _Spec(**spec))

    def close(self) -> None:
        """Close the library; its products stay usable."""
        runtime.library().lsq_product_close(self._handle)
        self._handle = ctypes.c_void_p()


class Matmul:
    """A product in C++ (MatrixProduct of cublaslt.h), which a launcher runs through `address`."""

    def __init__(self, library: ctypes.c_void_p, spec: _Spec) -> None:
        self._handle = ctypes.c_void_p()
        _call("create", library, ctypes.byref(spec), ctypes.byref(self._handle))

    @property
    def address(self) -> int:
        """Handle of the C++ object; valid until `close`."""
        return self._handle.value

    def candidates(self, workspace_bytes: int, limit: int) -> list[Candidate]:
        """Return at most `limit` algorithms that the library proposes, best first; perhaps none.
        Raises ProductError: the product is not supported, or no CUDA context is current."""
        algorithms = ctypes.create_string_buffer(limit * ALGORITHM_BYTES)
        workspaces, count = (ctypes.c_int64 * limit)(), ctypes.c_int64()
        arguments = algorithms, workspaces, ctypes.byref(count)
        _call("candidates", self._handle, workspace_bytes, limit, *arguments)
        return [
            Candidate(algorithms.raw[ALGORITHM_BYTES * i :][:ALGORITHM_BYTES], workspaces[i])
            for i in range(count.value)
        ]

    def check(self, data: bytes) -> Candidate:
        """Return an algorithm and the workspace that it needs here. Raises ValueError: `data` is
        not 64 bytes; ProductError: the algorithm does not run this product on this device."""
        workspace_bytes = ctypes.c_int64()
        _call("check", self._handle, _checked(data), ctypes.byref(workspace_bytes))
        return Candidate(bytes(data), workspace_bytes.value)

    def choose(self, data: bytes) -> None:
        """Use this algorithm from now on. Raises as `check`."""
        _call("choose", self._handle, _checked(data))

    def run(
        self,
        operands: Sequence[int],
        *,
        workspace: int = 0,
        workspace_bytes: int = 0,
        stream: int = 0,
    ) -> None:
        """Queue the product. `operands`: addresses of a, b and out, multiples of 16. `workspace`:
        its address, a multiple of 256. `stream`: a cudaStream_t. Raises ProductError: the product
        cannot be queued; the message says why, with the shapes."""
        pointers = [ctypes.c_void_p(address) for address in operands]
        addresses = ctypes.c_void_p(workspace), workspace_bytes, ctypes.c_void_p(stream)
        _call("run", self._handle, *pointers, *addresses)

    def close(self) -> None:
        """Free the product, which must not run any more."""
        runtime.library().lsq_product_destroy(self._handle)
        self._handle = ctypes.c_void_p()
