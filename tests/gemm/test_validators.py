"""Validators: what they refuse, and the words for what differs."""

import dataclasses

import pytest

from lsq.gemm.validators import difference
from tests.gemm.tuned import CPU, GPU


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format is 2; this version of lsq reads format 1"),
        ({"format": True}, "format is True; this"),
        ({"device": ""}, "device is ''; it must be a printable text"),
        ({"device": "a\nb"}, r"device is 'a\\nb'; it must be a printable text"),
        ({"device": "\ud800"}, r"device is '\\ud800'; it must be a printable text"),
        ({"device": "x" * 201}, "device is 'xxx.*\\.\\.\\.; it must be a printable text of 1 to 200"),
        ({"threads": 0}, "threads is 0; it must be a whole number from 1"),
        ({"features": ["avx2"]}, "features is a list; it must"),
        ({"features": ("b", "a")}, "features is a tuple; the names must be sorted"),
        ({"features": ("a", "a")}, "features is a tuple; the names must be sorted"),
        ({"features": (1,)}, r"features\[0\] is 1; it must be a printable text"),
        ({"features": tuple(map(str, range(101)))}, "features is a tuple; it must be a list of at most 100"),
    ],
)
def test_no_such_cpu(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(CPU, **changes)


@pytest.mark.parametrize("changes", [{"sm": 9}, {"multiprocessors": 0}, {"library": None}])
def test_no_such_gpu(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} is "):
        dataclasses.replace(GPU, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"device": "Other"}, "device differs: the file says 'Other', here it is 'Example CPU'"),
        ({"threads": 4}, "threads differs: the file says 4, here it is 2"),
        ({"library_version": "2.0"}, "library_version differs: the file says '2.0', here it is '3.7.1'"),
        ({"features": ("amx", "avx2")}, "features differ: the file alone has amx, this CPU alone has avx512f"),
        ({"features": ("avx2",)}, "features differ: the file alone has none, this CPU alone has avx512f"),
    ],
)
def test_difference(changes, words):
    assert difference(dataclasses.replace(CPU, **changes), CPU) == words


def test_difference_of_kinds():
    assert difference(GPU, CPU) == "kind differs: the file is for the GPU 'Example GPU', here is the CPU 'Example CPU'"
    assert difference(dataclasses.replace(GPU, sm=100), GPU) == "sm differs: the file says 100, here it is 90"
