"""Tests of this folder run in a process of their own, the same for all: a device cannot be taken
back from PyTorch."""

import functools
import random
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from tests.device import build, standin
from tests.dist.processes import CONTEXT


@functools.cache
def process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=CONTEXT, initializer=standin.load)


def call(function: Callable, arguments: dict) -> str | None:
    """Run a test in that process: the traceback of a failure."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        function(**arguments)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc(limit=-8)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    try:
        build.library()
    except build.CannotBuild as error:
        pytest.skip(str(error))
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        failure = process().submit(call, pyfuncitem.function, arguments).result()
    except BrokenProcessPool:
        process.cache_clear()
        raise
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True
