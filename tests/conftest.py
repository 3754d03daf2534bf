"""What every test shares: few threads, fixed seeds, what a run leaves out, and where kernels
run."""

import os
import random
import signal
import sys
from collections.abc import Iterator

# Processes of pytest-xdist, and those that tests start, share the cores: threads that spin while
# they wait take them from others. OpenMP reads this once, when PyTorch is imported.
cores = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
os.environ.setdefault("OMP_NUM_THREADS", str(cores))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from lsq.quant.numbers import BUILT_IN, NUMBER_FORMATS, find_number, scaled_format  # noqa: E402
from tests import sampling  # noqa: E402
from tests.ops import cuda  # noqa: E402

# A shell's background job ignores SIGINT and passes that on; tests of interruption need it as at a
# terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["CT2_USE_MKL"] = (
    "1"  # read once: CTranslate2's sums of int8 saturate by oneDNN on AMD without VNNI
)
torch.set_num_threads(min(2, cores, torch.get_num_threads()))

os.environ.pop("COLUMNS", None)  # of processes of pytest-xdist; tables are as wide as in a file

LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""Why tests were left out -> how many."""


LOST = 77
"""Exit status of a process whose GPU is lost; pytest-xdist starts another one."""


def pytest_configure(config: pytest.Config) -> None:
    """Tell failures as they come, but for processes of pytest-xdist, which hand theirs to
    another."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))


class Failures:
    """Tells each failure at once: a run that is cut short prints no summary."""

    def __init__(self, config: pytest.Config):
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"failed: {report.nodeid}: {_reason(report)}")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().partition("\n")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """After a failure on a GPU, end the process if a kernel's fault has lost it: all later tests
    would fail."""
    report = yield
    if report.failed and item.get_closest_marker("gpu") and (why := cuda.lost_gpu()):
        print(
            f"lost the GPU: {item.nodeid}: {_reason(report)}: {why}",
            file=sys.__stderr__,
            flush=True,
        )
        os._exit(LOST)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a run of all tests in which a folder has none; leave out what tests/sampling.py
    says."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        sampling.check_folders([config.rootpath / path for path in config.args], items)
    sampling.mark_rest(items)
    config.stash[LEFT_OUT] = sampling.leave_out(items, config)
    # of pytest-xdist: this process runs a part of the tests for another
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take over what a process of pytest-xdist left out; each collects the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were left out, and why."""
    for reason, count in terminalreporter.config.stash.get(LEFT_OUT, {}).items():
        terminalreporter.write_line(
            f"left out: {count:,} {'test' if count == 1 else 'tests'} {reason}"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests named ..._on_cuda, and those in files named ..._cuda.py, run kernels: in the emulator
    and on a GPU."""
    if metafunc.function.__name__.endswith("_on_cuda") or metafunc.module.__name__.endswith(
        "_cuda"
    ):
        metafunc.fixturenames.append("kernels_run_on")
        places = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
        metafunc.parametrize("kernels_run_on", places, indirect=True)


@pytest.fixture
def kernels_run_on(request, monkeypatch) -> None:
    """Where the kernels of a test run."""
    monkeypatch.setattr(cuda, "place", request.param)


@pytest.fixture(scope="session", autouse=True)
def no_tuned_products_of_the_user(tmp_path_factory) -> None:
    """Tests run products as the package has them, whatever was tuned on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same random numbers."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore PyTorch's number of threads after each test: CTranslate2 sets it to the number of
    cores. Processes with more threads than cores run ten times as long."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_declared_numbers() -> Iterator[None]:
    """Remove the number formats that a test declares. Programs with them stay in caches, so that
    tests of layers give each table of values a name of its own."""
    yield
    for name in NUMBER_FORMATS.keys() - BUILT_IN:
        del NUMBER_FORMATS[name]
    find_number.cache_clear()
    scaled_format.cache_clear()
