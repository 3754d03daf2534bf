"""What is counted at few tokens says what would be counted at more."""

import dataclasses
import shutil
from collections import Counter, defaultdict

import gpu_lists
import model_gpu_step
import pytest
from gpu_lists import key_of
from gpu_model import GPUS, Work
from gpu_opponents import SIDES, Model
from operations import QUICK, sizes

from lsq.emulator import profile
from lsq.native import geometry
from lsq.native.launch import Launch, Product
from tests.ops.test_vocabulary_loss import of_codes
from tests.ops.tiles import launches

SIZE = dataclasses.replace(QUICK, hidden=64, heads=2, length=8)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("objdump") is None,
    reason="kernels are counted in the emulator",
)


@needs_compiler
@pytest.mark.parametrize("name", ["Round", "ResidualNorm"])
def test_counts_grow_as_they_are_scaled(name):
    def chosen(sentences):
        size = dataclasses.replace(SIZE, sentences=sentences)
        programs = (program for _, program in gpu_lists.training(size, model_gpu_step.QUANT))
        return next(one for program in programs for one in program.operations if one.name == name)

    few, many = (gpu_lists.launches(chosen(sentences), "cpu", None) for sentences in (16, 64))
    for small, large, counted, real in zip(
        few, many, profile.profile(few), profile.profile(many), strict=True
    ):
        assert key_of(small) == key_of(large)
        scaled = Work.of(counted, large)
        traffics = [one for place in real.operands for one in (place.reads, place.writes)]
        assert scaled.sectors == pytest.approx(sum(one.sectors for one in traffics), rel=0.1)
        touched = sum(scaled.reads.values()) + sum(scaled.writes.values())
        assert touched == pytest.approx(32 * sum(one.touched for one in traffics), rel=0.1)
        total = sum(scaled.instructions.values())
        assert total == pytest.approx(sum(real.instructions.values()), rel=0.1)
        assert scaled.warps == real.warps


def test_blocks_that_sum_over_rows_have_as_many_rows_where_they_are_counted():
    size = dataclasses.replace(SIZE, sentences=16 * gpu_lists.FEW)
    few, blocks = gpu_lists.few_sentences(size), geometry.summing_blocks()
    with gpu_lists.small_grids(size):
        assert geometry.row_blocks(1 << 20, 64) == blocks // 16
    assert few.tokens * 16 == size.tokens
    assert geometry.row_blocks(1 << 20, 64) == blocks


@needs_compiler
def test_ends_of_tiles_are_told_from_their_main_loop():
    """Whatever is multiplied, as much is counted of the end."""
    few, many = (
        Work.of(found, entry)
        for inner in (64, 192)
        for entry in launches(
            of_codes(128, 128, 128, inner=inner), gpu_lists.tile_of(sizes(8192)[0])
        )[:1]
        for found in profile.profile([entry])
    )
    assert many.instructions["mma"] == 3 * few.instructions["mma"]
    ends = [model_gpu_step.without_main_loop(work).instructions for work in (few, many)]
    assert ends[0]["mma"] == 0 and ends[1] == pytest.approx(ends[0], rel=0.05)


def test_a_step_has_every_launch():
    (size,) = (size for size in sizes(8192) if size.name == "big")
    parts = {part.name: part for part in gpu_lists.step(size, model_gpu_step.QUANT)}
    layers = [part for name, part in parts.items() if "layer" in name]
    assert [part.times for part in layers] == [6] * 4
    products = sum(
        part.times * isinstance(entry, Product) for part in layers for entry in part.entries
    )
    assert products == 3 * 6 * (4 + 7)
    updates = [entry.kernel.name for entry in parts["update"].entries]
    assert updates == ["lsq_adam", "lsq_adam_codes"]
    assert gpu_lists.parameters(size, model_gpu_step.QUANT) == pytest.approx(210e6, rel=0.02)


def test_what_was_not_counted_is_named():
    with pytest.raises(ValueError, match="not counted, such as lsq_.*; run with --count"):
        model_gpu_step.Step(SIZE, {})


def test_every_kernel_belongs_to_a_part():
    parts = gpu_lists.step(SIZE, model_gpu_step.QUANT)
    launches = [one for part in parts for one in part.entries if isinstance(one, Launch)]
    groups = {model_gpu_step.group_of(entry.kernel.name) for entry in launches}
    assert groups == set(model_gpu_step.GROUPS) - {"products"}


def test_one_kernel_is_modelled_where_it_ends_its_product(monkeypatch):
    monkeypatch.setattr(model_gpu_step, "resources", lambda entry, target: (64, 0))
    step = object.__new__(model_gpu_step.Step)  # whatever its kernels do
    step.size = next(size for size in sizes(8192) if size.name == "base")
    step.parts, step.parameters = gpu_lists.step(step.size, model_gpu_step.QUANT), 1
    counted = {"sectors": 1.0, "shared_passes": 0.0, "instructions": {"mma": 0.0}}
    some = Work(reads={}, writes={}, **counted, warps=8, warps_of_block=8)
    step.work = defaultdict(lambda: some)
    found = {}
    for gpu in GPUS:
        found[gpu.name] = Counter()
        for name, times, _ in step.times(gpu):
            found[gpu.name][name] += times
    ended = {name: counts["lsq_project_product"] for name, counts in found.items()}
    assert set(ended.values()) == {66}
    assert not any(counts["lsq_end"] for counts in found.values())
    of_all = {
        name: sum(counts[kernel] for kernel in model_gpu_step.ENDED.values())
        for name, counts in found.items()
    }
    assert all(counts["product"] == 200 - of_all[name] for name, counts in found.items())
    assert all(counts[kernel] == 1 for kernel in model_gpu_step.ALONE for counts in found.values())


def test_opponents_multiply_the_same():
    (size,) = (size for size in sizes(8192) if size.name == "big")

    def multiplications(passes):
        found = Counter()
        for one in passes:
            for name, moved in one.kernels:
                if name == "product":
                    found[moved.int8] += one.times * moved.m * moved.n * moved.k
        return found

    found = {side: multiplications(Model(size, side, 1).step()) for side in SIDES}
    assert not found["compiled"][True]
    assert sum(found["int8"].values()) == sum(found["compiled"].values())
    own = sum(
        part.times * one.a.shape[0] * one.a.shape[1] * one.b.shape[0]
        for part in gpu_lists.step(size, model_gpu_step.QUANT)
        for one in part.entries
        if isinstance(one, Product)
    )
    logits = size.tokens * size.hidden * size.padded  # which kernels of lsq make, in both passes
    assert own + logits == pytest.approx(sum(found["compiled"].values()), rel=0.01)
