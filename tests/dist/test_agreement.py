import pytest
import torch
from torch import distributed

from lsq.dist.agreement import any_process, gather_text, least_of_all, require_same
from tests.dist.processes import ProcessFailed, run

CPU = torch.device("cpu")


def test_one_process_decides_alone():
    assert any_process(True, CPU) and not any_process(False, CPU)


def votes(rank: int) -> list[bool]:
    return [any_process(flag, CPU) for flag in (False, rank == 0, rank == 1, True)]


def test_one_of_two_processes_is_enough():
    assert run(votes, 2) == [[False, True, True, True]] * 2


def texts(rank: int) -> list[str]:
    return gather_text("näher" * rank, distributed.group.WORLD, CPU)


def test_texts_come_in_order_of_ranks():
    assert run(texts, 3) == [["", "näher", "nähernäher"]] * 3


def settings(rank: int) -> str | None:
    require_same("the settings", {"same": 1, "other": [2.5, None]}, distributed.group.WORLD, CPU)
    try:
        require_same(
            "the settings", {"same": 1, "odd": "ab"[rank // 2]}, distributed.group.WORLD, CPU
        )
    except ValueError as error:
        return str(error)


def test_settings_that_differ_are_named_on_all():
    (message,) = set(run(settings, 3))
    assert message.startswith("the settings must be the same in every process")
    assert "rank 0 has odd='a' and rank 2 has odd='b'" in message and "same=" not in message


def least(rank: int) -> list[float]:
    return least_of_all(torch.tensor([float(rank), -rank, torch.inf])).tolist()


def test_the_least_of_all_processes():
    assert run(least, 3) == [[0.0, -2.0, torch.inf]] * 3
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(least_of_all(values), values)


def raises(rank: int) -> None:
    raise RuntimeError("on purpose")


def test_the_harness_sees_failures():
    with pytest.raises(ProcessFailed, match="on purpose"):
        run(raises, 1)
