"""Named barriers in the emulator: warps that take turns, races between them, and misuse."""

import pytest
import torch

from tests.emulator.emulated import ORDERS, Module, fails, memory

SOURCE = "barriers.cu"
RACE = r"shared memory that warp \d (wrote|read) with no barrier between the two"
COPY = r"shared memory that a copy of thread \d+ still fills"
AGAIN = r"to which it has come already, and not all others"
BEFORE = r"to which warp \d came before by bar.sync \(.*\) with nothing that orders the two"


def added_up(order, steps=7, fault=0):
    """What two warps find of rows that another one copies, and what was to be found."""
    x = torch.arange(32 * steps, dtype=torch.int32).reshape(steps, 32).square()
    out = torch.zeros(64, dtype=torch.int32)
    Module(SOURCE, order).launch("ring", 1, 96, x, out, steps, fault)
    return out, x.sum(0).int().flip(0).repeat(2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_ring_that_one_warp_fills_and_others_read(order, steps):
    found, expected = added_up(order, steps)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "steps", "message"),
    [
        (1, 2, f"{RACE}|{COPY}"),  # readers only arrive
        (2, 2, f"{RACE}|{COPY}"),  # no barrier that says "full"
        (3, 3, f"{RACE}|{AGAIN}|{BEFORE}"),  # the writer only arrives
        (4, 3, f"{RACE}|{AGAIN}|{BEFORE}"),  # no barrier that says "empty"
        (5, 2, COPY),
        (6, 2, f"thread .5, 0, 0. writes {RACE}|thread .* reads {RACE}"),
    ],
)
def test_a_barrier_that_is_missing_from_a_ring(order, fault, steps, message):
    with fails(rf"kernel ring, block \(0, 0, 0\): .*({message})"):
        added_up(order, steps, fault)


@pytest.mark.parametrize("fault", [3, 4])
def test_a_stage_that_is_filled_too_early_is_named_if_readers_come_first(fault):
    with fails(rf"warp 0 comes to barrier 1 of 96 threads by bar.arrive .*{BEFORE}"):
        added_up(1, 3, fault)


@pytest.mark.parametrize("order", ORDERS)
def test_groups_that_take_turns(order):
    out, rounds = torch.zeros(64, dtype=torch.int32), 3
    Module(SOURCE, order).launch("turns", 1, 128, out, rounds, 0)
    assert torch.equal(out, 2 * rounds * torch.arange(64, 0, -1, dtype=torch.int32))
    with fails(rf"kernel turns, .*{RACE}, after it waited at barriers.cuh:\d+"):
        Module(SOURCE, order).launch("turns", 1, 128, out, rounds, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_barrier_that_others_may_come_to_first(order):
    """Two groups of warps: one group's first warp could meet the other's."""
    out = torch.zeros(128, dtype=torch.int32)
    Module(SOURCE, order).launch("groups", 1, 128, out, 0)
    assert torch.equal(out, torch.arange(128, dtype=torch.int32) ^ 63)
    with fails(rf"kernel groups, block \(0, 0, 0\): .*({BEFORE}|{RACE})"):
        Module(SOURCE, order).launch("groups", 1, 128, out, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_all_readers_come_before_a_writer(order):
    out = torch.zeros(128, dtype=torch.int32)
    Module(SOURCE, order).launch("overwritten", 1, 128, out, 3)
    assert out.tolist() == [8] * 32 + [7] * 96
    # the third reader does not come
    with fails(r"(writes .* warp 3 read|thread \(\d+, 0, 0\) reads .* warp 0 wrote) with no"):
        Module(SOURCE, order).launch("overwritten", 1, 128, out, 2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            0,
            r"no thread can go on: thread \(0, 0, 0\) and 63 more: wait at bar.sync \(faulty.cu:"
            r"\d+\); thread \(64, 0, 0\) and 31 more finished; barrier 3 waits for 96"
            r" threads, of which 64 have come: warp \d by bar.sync \(faulty.cu:\d+\), warp \d by",
        ),
        (
            1,
            r"warp \d comes to barrier 1 of (64|96) threads by bar.sync \(faulty.cu:\d+\), to which"
            r" warp \d has come as barrier 1 of (64|96) threads by bar.sync \(faulty.cu:\d+\)",
        ),
        (2, rf"warp 1 comes to barrier 2 of 64 threads by bar.arrive .*, {AGAIN}"),
        (3, r"thread .* comes to barrier 16 of 96 threads .*, but named barriers are 1 to 15"),
        (4, r"comes to barrier 0 of 96 threads by bar.arrive .*, but named barriers are 1 to 15"),
        (5, r"barrier 1 of 128 threads .*, but its threads are whole warps of 32, and .* has 96"),
        (6, r"barrier 1 of 40 threads .*, but its threads are whole warps of 32, and"),
        (7, r"some lanes of the mask of bar.sync do not arrive .*16 more: wait|and 47 more: wait"),
        (8, r"\(\d+, 0, 0\) comes to barrier 1 of .*, but thread .* of its warp to barrier 2 of"),
        (9, r"comes to barrier 1 of 96 threads by bar.sync .* of its warp to .* by bar.arrive"),
        (
            10,
            r"all threads have finished; barrier 4 waits for 96 threads, of which 32 have come:"
            r" warp 2 by bar.arrive \(faulty.cu:\d+\)$",
        ),
        (11, r"no thread can go on: .* 63 more: wait at __syncthreads .*barrier 5 waits for 96"),
    ],
)
def test_misused_barriers(order, fault, message):
    with fails(rf"kernel misused, block \(0, 0, 0\): .*{message}"):
        Module("faulty.cu", order).launch("misused", 1, 96, memory(96), fault)


def test_a_launch_begins_with_no_open_barrier():
    with fails("barrier 4 waits"):
        Module("faulty.cu").launch("misused", 1, 96, memory(96), 10)
    with fails("barrier 4 waits for 96 threads, of which 32 have come"):
        Module("faulty.cu").launch("misused", 1, 96, memory(96), 10)
