"""The arithmetic of modelled times, on cases that can be worked out by hand."""

import dataclasses

import gpu_model
import pytest
from gpu_model import (
    GPUS,
    H100,
    SECTOR,
    TILES,
    Clock,
    Moved,
    Multiplied,
    Work,
    tile_rate,
    variant,
)

from lsq.gemm.configuration import TileConfiguration

GIGABYTE = 1e9
GPU = dataclasses.replace(H100, gap=0.0)
TILE = TileConfiguration(rows=128, columns=128, stages=3)


def work(**given):
    nothing = {"reads": {}, "writes": {}, "sectors": 0.0, "shared_passes": 0.0, "instructions": {}}
    return Work(**{**nothing, "warps": 1 << 20, "warps_of_block": 8, **given})


def test_a_copy_runs_at_the_rate_of_copies():
    found = Clock(GPU).moved(Moved(reads={0: GIGABYTE}, writes={1: GIGABYTE}))
    assert found.bound == "memory" and found.bytes == 2 * GIGABYTE
    assert found.seconds == pytest.approx(2 * GIGABYTE / (3.35e12 * 0.9))


def test_what_was_written_last_is_read_from_the_cache():
    clock, small = Clock(GPU), 8e6
    assert clock.moved(Moved(reads={"x": small}, writes={"y": small})).bytes == 2 * small
    assert clock.moved(Moved(reads={"y": small}, writes={})).bytes == 0
    clock.moved(Moved(reads={"z": 28e6}, writes={}))
    assert clock.moved(Moved(reads={"y": small}, writes={})).bytes == small


def test_a_kernel_takes_as_long_as_the_slowest_of_what_it_needs():
    def bound(**given):
        found = Clock(GPU).kernel(work(**given), 32, 0)
        return found.bound, found.seconds

    assert bound(reads={0: GIGABYTE}, sectors=GIGABYTE / SECTOR)[0] == "memory"
    again, seconds = bound(reads={0: 1e6}, sectors=GIGABYTE / SECTOR)
    assert again == "L2 cache" and seconds == pytest.approx(0.85 * GIGABYTE / GPU.l2)
    assert bound(shared_passes=1e9, sectors=1.0)[0] == "L1 cache"
    busy, seconds = bound(instructions={"float": 1e9})
    assert busy == "instructions" and seconds == pytest.approx(
        1e9 / 4 / (132 * 1.7e9) / 0.6, rel=1e-3
    )


def test_few_blocks_leave_multiprocessors_idle_and_few_warps_memory():
    def seconds(registers=32, **given):
        return Clock(GPU).kernel(work(**given), registers, 0).seconds

    busy = {"instructions": {"float": 1e6}}
    assert seconds(**busy, warps=66 * 8) == pytest.approx(2 * seconds(**busy), rel=1e-3)
    reading = {"reads": {0: GIGABYTE}, "warps_of_block": 4}
    assert seconds(255, **reading) > 1.2 * seconds(**reading)


@pytest.mark.parametrize(
    ("kind", "cycles"), [("float", 0.25), ("integer", 0.5), ("exchange", 1.0), ("division", 2.25)]
)
def test_instructions_wait_for_their_units(kind, cycles):
    gpu = dataclasses.replace(GPU, integers=1.0)
    assert gpu_model.instruction_cycles({kind: 100}, gpu) == pytest.approx(100 * cycles)


def test_every_kind_of_instruction_has_a_cost():
    from lsq.emulator.profile import CALLED, KINDS

    assert {kind for kind, _ in KINDS} | set(CALLED.values()) == set(gpu_model.SLOTS)


def test_products_that_fill_no_wave_are_slower():
    def rate(m, n, k=1 << 20):
        product = Multiplied(m=m, n=n, k=k, reads={}, writes={})
        return max(tile_rate(product, tile, 132) for tile in TILES)

    assert rate(256 * 12, 128 * 11) == pytest.approx(1.0, abs=1e-3)
    assert 0.5 < rate(256 * 12, 128 * 12) < 0.9
    assert rate(128, 128) < 0.03
    assert rate(256 * 12, 128 * 11, k=128) == pytest.approx(0.5)


def test_int8_products_are_faster():
    def seconds(int8):
        product = Multiplied(m=8192, n=8192, k=8192, int8=int8, reads={}, writes={})
        return Clock(GPU).product(product).seconds

    assert 1.4 < seconds(False) / seconds(True) < 2


def ended(gpu=GPU, product=None, tile=TILE, **end):
    end = {"reads": {"sums": GIGABYTE}, "writes": {"codes": 1e6}} | end
    product = product or Multiplied(
        m=8448, n=8192, k=8192, int8=True, reads={"a": 1e6}, writes={"sums": GIGABYTE}
    )
    return Clock(gpu).ended_product(product, work(**end), tile)


def test_a_product_that_its_kernel_ends_takes_part_of_it_longer_and_keeps_its_sums():
    gpu = dataclasses.replace(GPU, l2=1e15)
    found, rate = ended(gpu), 1979e12 * 0.65 * 0.62 * 0.93 * 8192 / (8192 + 128)
    assert found.bytes == 2e6 and found.bound == "products"
    assert found.seconds == pytest.approx(2 * 8448 * 8192 * 8192 / rate)
    alone = 1e8 / 4 / (132 * 1.7e9) / 0.6
    taking_turns = dataclasses.replace(TILE, stages=3, instruction="wgmma")
    # A block makes 32 tiles, of which nothing hides the last one's end, by half of the warps.
    for tile, beside in ((TILE, 0.5), (taking_turns, 1 - 1.5 / 32)):
        pair = [ended(gpu, tile=tile, instructions={"float": count}) for count in (1e8, 0)]
        assert pair[0].seconds - pair[1].seconds == pytest.approx((1 - beside) * alone)


def test_wgmma_reaches_a_part_of_a_library():
    gpu = dataclasses.replace(GPU, l2=1e15)
    taking_turns = dataclasses.replace(TILE, stages=3, instruction="wgmma")
    ratio = 0.85 / 0.62 * (8192 + 128) / (8192 + 128 / 32)  # the next tile's copies have begun
    assert ended(gpu).seconds / ended(gpu, tile=taking_turns).seconds == pytest.approx(ratio)


def test_a_library_reads_tiles_from_the_l2_cache_again():
    def seconds(**changed):
        product = Multiplied(m=8448, n=8192, k=8192, int8=True, reads={"a": 1e6}, writes={})
        return Clock(dataclasses.replace(GPU, int8_reached=10.0, **changed)).product(product)

    read = 8448 * 8192 * 8192 * (1 / 256 + 1 / 128)
    assert seconds().bound == "L2 cache"
    assert seconds(multicast=1.0).seconds == pytest.approx(read / GPU.l2)
    assert seconds().seconds == pytest.approx(2 / 3 * read / GPU.l2)


@pytest.mark.parametrize(("blocks", "waves"), [(264, 1.0), (528, 2.0), (330, 1.5), (297, 1.5)])
def test_blocks_that_do_not_fit_come_after_the_others(blocks, waves):
    """Two fit; in the last wave each of the few has a multiprocessor for itself."""
    registers, per_block = 128, 1e4

    def seconds(blocks):
        busy = {"float": per_block * blocks}
        return Clock(GPU).kernel(work(instructions=busy, warps=8 * blocks), registers, 0).seconds

    assert seconds(blocks) / seconds(264) == pytest.approx(waves)


def test_small_tiles_read_more_of_the_l2_cache_and_parts_fill_a_gpu():
    fast = dataclasses.replace(GPU, int8_reached=10.0)
    found = ended(fast, tile=dataclasses.replace(TILE, rows=64))
    assert found.bound == "L2 cache"
    assert found.seconds == pytest.approx((8448 * 8192 * 8192 * (1 / 64 + 1 / 128) + 1e6) / GPU.l2)
    small = Multiplied(m=512, n=512, k=8192, int8=True, reads={}, writes={"sums": 1.0})
    alone, split = (
        ended(product=small, tile=dataclasses.replace(TILE, split=parts)).seconds
        for parts in (1, 8)
    )
    sums = 4 * 512 * 512 * (8 + 7) / GPU.l2  # of 8 parts, of which 7 are read
    assert alone / (split - sums) == pytest.approx(8 * (8192 + 128) / (8192 + 8 * 128))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_luck_changes_what_is_uncertain_alone(gpu):
    lucky, unlucky = variant(gpu, 1.0), variant(gpu, -1.0)
    assert lucky.memory == unlucky.memory == gpu.memory
    for better, worse in ((lucky, gpu), (gpu, unlucky)):
        assert better.int8_reached > worse.int8_reached and better.gap < worse.gap
        assert better.integers < worse.integers and better.past_l1 < worse.past_l1
        assert better.wgmma >= worse.wgmma and better.wgmma <= 1
        assert 0 < worse.reached < better.reached < 1 and 0 < worse.kept < better.kept < 1
