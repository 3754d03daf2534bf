"""What is said of each kernel, by what the process that runs them tells."""

import gpu_probe
import pytest

from lsq.native import compiler, device
from tests.ops.test_turns_cuda import CASES
from tests.ops.turns import EXPORT


@pytest.fixture
def found():
    kept = []
    made = gpu_probe.Found(["gated.cu", "rotation.cu"], kept.append)
    made.kept = kept
    return made


def hear(found, *events: str) -> None:
    for event in events:
        found.hear(*event.split(" ", 1))


def states(found) -> dict[str, str]:
    return {row["kernel"]: row["state"] for row in found.rows()}


def test_every_kernel_of_a_source_is_told(found):
    every = "lsq_gated", "lsq_gated_rows", "lsq_rotate", "lsq_rotate_gradient"
    assert states(found) == dict.fromkeys(every, "not reached")


def test_kernels_of_an_operation_are_right_unless_something_differs(found, capsys):
    hear(
        found, "case 0", "operation gated", "launch lsq_gated", "wrong codes differ by more than 1"
    )
    hear(found, "operation rotate", "launch lsq_rotate", "launch cuBLASLt", "end ")
    right = {"lsq_rotate": "ok", "cuBLASLt": "ok"}
    unknown = dict.fromkeys(("lsq_gated_rows", "lsq_rotate_gradient"), "not reached")
    assert states(found) == {"lsq_gated": "wrong", **right, **unknown} and found.ended
    assert (
        "lsq_gated                            wrong  gated: codes differ by more than 1\n"
        in capsys.readouterr().out
    )
    assert found.kept[0][0]["state"] == "wrong", "what is known is kept at once"


def test_the_kernel_that_was_launched_last_faults_or_hangs(found):
    hear(found, "case 3", "operation rotate", "launch lsq_gated", "launch lsq_rotate")
    found.stop(gpu_probe.HANGS, "no word for 60 seconds")
    assert states(found)["lsq_rotate"] == "hangs" and states(found)["lsq_gated"] == "not reached"
    assert found.case == 3 and not found.ended
    hear(found, "case 4", "launch lsq_rotate", "operation rotate")
    assert states(found)["lsq_rotate"] == "hangs", "the worst holds"


def test_a_fault_that_is_told_keeps_its_words(found):
    hear(found, "case 0", "launch lsq_rotate", "fault an illegal memory access")
    found.stop(gpu_probe.FAULT, "its process ended with status 77")
    (row,) = (row for row in found.rows() if row["kernel"] == "lsq_rotate")
    assert (row["state"], row["why"]) == ("fault", "an illegal memory access")


@pytest.mark.thorough
def test_kernels_are_listed_without_a_launch():
    """All but those that are launched after others have given right results."""
    before = device.LaunchList
    found = {kernel.name for kernel in gpu_probe.kernels()}
    texts = [(compiler.KERNELS / source).read_text() for source in CASES]
    every = {name for text in texts for name in EXPORT.findall(text)}
    assert found <= every and len(found) > 0.9 * len(every)
    assert device.LaunchList is before
