"""The interpreter names what a GPU leaves undefined, and computes as PTX says."""

import math
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch

from lsq.native.launch import Kernel
from tests.emulator.emulated import FOLDER
from tests.ptx.interpreter import Module, ptx_of

KERNELS = Path(__file__).parent / "kernels"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
ORDERS = (0, 1, 77)


def module(source: Path, **defines: int) -> Module:
    """A file of kernels, as NVRTC compiles it."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC makes the PTX")
    kernel = Kernel(source=str(source), name="", defines=tuple(sorted(defines.items())))
    return Module(ptx_of(kernel, "compute_90a"))


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def fails(message: str):
    return pytest.raises(RuntimeError, match=message)


# Faults


def neighbours(fault: int, order: int) -> torch.Tensor:
    x, out = torch.randn(64), torch.zeros(64)
    given = module(KERNELS / "faults.cu")
    given.launch("neighbours", x, out, fault, block=(64, 1, 1), order=order)
    return torch.equal(out, x.roll(-1))


@pytest.mark.parametrize("order", ORDERS)
def test_threads_that_exchange_values(order):
    assert neighbours(0, order)


FAULTS = {
    1: r"ld.global.f32.*lies outside every tensor of the launch",
    2: r"bar.sync.*waits for ever; 24 of the block's threads have ended|nobody has written it",
    3: r"nobody has written it|wrote it, and no barrier lies between",
    4: r"shared memory at 256: the block has 256 bytes",
    5: r"warp 1 read it, and no barrier lies between|wrote it, and no barrier lies between",
    6: r"\(st.* is no multiple of 4",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_memory_and_barriers(fault, order):
    with fails(rf"neighbours, block 0 0 0, thread \d+, line \d+ .*({FAULTS[fault]})"):
        neighbours(fault, order)


FAULTS_OF_LANES = {
    1: "nobody has written it|wrote it, and no barrier lies between",
    2: "lane 3 does not take part",
    3: "the thread's lane is not in the mask",
    4: "lane 1 does not take part",
}


@pytest.mark.parametrize("fault", FAULTS_OF_LANES)
def test_faults_of_lanes(fault):
    out = torch.zeros(32, dtype=torch.int32)
    with fails(FAULTS_OF_LANES[fault]):
        module(KERNELS / "faults.cu").launch("lanes", out, fault)


def test_lanes_that_exchange_values():
    out = torch.zeros(32, dtype=torch.int32)
    module(KERNELS / "faults.cu").launch("lanes", out, 0)
    lanes = torch.arange(32)
    assert torch.equal(out, ((lanes + 1) % 32 + (lanes ^ 2)).int())


def test_a_register_that_a_constraint_does_not_give():
    out = torch.zeros(32, dtype=torch.int32)
    with fails(r"add.s32.*%r1 is read, but nothing has written it"):
        module(KERNELS / "faults.cu").launch("constraints", out)


def test_a_register_that_nothing_has_written_may_be_copied_but_not_used():
    text = "{{ .reg .b32 no; .reg .pred p; setp.ge.s32 p, %a, {}; selp.b32 %d, %a, no, p; }}"
    given = torch.arange(32, dtype=torch.int32)
    assert torch.equal(evaluate(text.format(0), torch.int32, given), given)
    with fails(r"thread 0, line \d+ \(st.global.*%d is read, but nothing has written it"):
        evaluate(text.format(1), torch.int32, given)


def test_a_register_of_another_width():
    with fails(r"widths, line \d+ \(add.s32.*%rd1 has 64 bits, not 32"):
        module(KERNELS / "faults.cu", WIDTHS=1)


def copied(fault: int, order: int) -> bool:
    """Three groups of copies, which others read."""
    x = torch.arange(3 * 128, dtype=torch.int32).reshape(3, 128)
    out = torch.zeros(3, 128, dtype=torch.int32)
    given = module(FOLDER / "tensor_cores.cu", SIZE=16)
    given.launch("copies", x, out, 128, fault, order=order)
    return torch.equal(out, x)


@pytest.mark.parametrize("order", ORDERS)
def test_copies(order):
    assert copied(0, order)


def added_up(steps: int, fault: int, order: int) -> bool:
    """Two warps add up what another one copies to a ring."""
    x = torch.arange(32 * steps, dtype=torch.int32).reshape(steps, 32)
    out = torch.zeros(64, dtype=torch.int32)
    given = module(FOLDER / "barriers.cu")
    given.launch("ring", x, out, steps, fault, block=(96, 1, 1), order=order)
    return torch.equal(out, x.sum(0).int().flip(0).repeat(2))


@pytest.mark.parametrize("order", ORDERS)
def test_warps_that_take_turns(order):
    assert added_up(7, 0, order)


FAULTS_OF_TURNS = {
    1: "nobody has written it|no barrier lies between|has not been waited for",
    2: "nobody has written it|no barrier lies between|has not been waited for",
    5: "cp.async to it has not been waited for",
    6: "thread 5 wrote it, and no barrier lies between|warp . read it, and no barrier lies between",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS_OF_TURNS)
def test_faults_of_warps_that_take_turns(fault, order):
    """Readers who come and do not wait, a lane that writes after it has come, and others."""
    with fails(rf"ring, block 0 0 0, thread \d+, line \d+ .*({FAULTS_OF_TURNS[fault]})"):
        added_up(2, fault, order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_barrier_that_others_may_come_to_first(order):
    """Two groups of warps: one group's first warp could meet the other's."""
    out = torch.zeros(128, dtype=torch.int32)
    given = module(FOLDER / "barriers.cu")
    given.launch("groups", out, 0, block=(128, 1, 1), order=order)
    assert torch.equal(out, torch.arange(128, dtype=torch.int32) ^ 63)
    early = "warp . came to this barrier before, and nothing orders the two"
    with fails(f"{early}|no barrier lies|nobody has written it"):
        given.launch("groups", out, 1, block=(128, 1, 1), order=order)


FAULTS_OF_COPIES = {
    1: "cp.async to it has not been waited for",
    2: "nobody has written it|cp.async to it has not been waited for",
    3: "st.shared.*cp.async to it has not been waited for",
    4: "cp.async to it has not been waited for",
    5: "warp 0 read it, and no barrier lies between|cp.async to it has not been waited for",
    6: "no multiple of the bytes that are copied",
    7: "outside the block's shared memory|no multiple of the bytes",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS_OF_COPIES)
def test_faults_of_copies(fault, order):
    with fails(FAULTS_OF_COPIES[fault]):
        copied(fault, order)


def multiplied(fault: int, order: int) -> bool:
    a, b = codes(64, 64), codes(64, 64)
    sums = torch.arange(64 * 64, dtype=torch.int32).reshape(64, 64)
    expected = sums + a.int() @ b.int().t()
    given = module(FOLDER / "warpgroups.cu", COLUMNS=64)
    given.launch(
        "one_product", a, b, sums, fault, block=(128, 1, 1), shared=2 * 64 * 128, order=order
    )
    return torch.equal(sums, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_product_of_a_warpgroup(order):
    assert multiplied(0, order)


FAULTS_OF_WARPGROUPS = {
    1: "no fence.proxy.async lies between its write and wgmma",
    2: "no fence.proxy.async lies between its write and wgmma",
    3: "no barrier lies between|nobody has written it|cp.async to it has not been waited for",
    6: "the block has 16384 bytes|nobody has written it",
    8: "no wgmma.fence lies between a write of its sums and wgmma",
    9: "the warps of its warpgroup have not begun the same products",
    10: "wgmma still reads it",
    11: "wgmma still reads it",
    12: "is read, but wgmma has not been waited for",
    13: r"warp \d read it, and no barrier lies between|wgmma still reads it",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS_OF_WARPGROUPS)
def test_faults_of_warpgroups(fault, order):
    with fails(FAULTS_OF_WARPGROUPS[fault]):
        multiplied(fault, order)


# Instructions

TEXT = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry one({parameters})
{{
    .reg .b32 %at;
    .reg .b64 %p<5>, %wide;
    {registers}
    mov.u32 %at, %tid.x;
    {loads}
    {instruction};
    mul.wide.u32 %wide, %at, {bytes};
    ld.param.u64 %p0, [given0];
    add.s64 %p0, %p0, %wide;
    st.global.{kind} [%p0], %d;
    ret;
}}
"""
KINDS = {torch.float32: "f32", torch.int32: "b32", torch.int64: "b64", torch.int16: "b16"}
LOAD = """
    mul.wide.u32 %wide, %at, {bytes};
    ld.param.u64 %p{n}, [given{n}];
    add.s64 %p{n}, %p{n}, %wide;
    ld.global.{kind} %{name}, [%p{n}];
"""


def evaluate(instruction: str, dtype: torch.dtype, *operands: torch.Tensor) -> torch.Tensor:
    """%d of an instruction on %a, %b and %c, one thread for each element."""
    out = torch.empty(len(operands[0]), dtype=dtype)
    names = dict(zip("abc", operands, strict=False))
    registers = "".join(
        f".reg .{KINDS[one.dtype]} %{name};" for name, one in {**names, "d": out}.items()
    )
    loads = "".join(
        LOAD.format(bytes=one.itemsize, n=n, kind=KINDS[one.dtype], name=name)
        for n, (name, one) in enumerate(names.items(), 1)
    )
    parameters = ", ".join(f".param .u64 given{n}" for n in range(len(operands) + 1))
    text = TEXT.format(
        parameters=parameters,
        registers=registers,
        loads=loads,
        instruction=instruction,
        bytes=out.itemsize,
        kind=KINDS[dtype],
    )
    Module(text).launch("one", out, *operands, block=(len(out), 1, 1))
    return out


SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -3e-42, 3e38, 0.5, -1.5, 2.5)


def floats(*others: float) -> torch.Tensor:
    """Of all magnitudes."""
    drawn = torch.randn(200) * 2.0 ** torch.randint(-140, 120, (200,))
    return torch.cat([drawn.float(), torch.tensor([*SPECIAL, *others])])


def rounded(x: Fraction, mode: str) -> float:
    """The float32 that a number is rounded to."""
    if x == 0:
        return 0.0
    power = max(math.floor(math.log2(abs(x))), -126) - 23
    power += abs(x) >= Fraction(2) ** (power + 24)  # the logarithm is not exact
    whole, rest = divmod(x / Fraction(2) ** power, 1)
    up = {"rm": False, "rp": rest > 0, "rz": rest > 0 and x < 0}.get(mode)
    if up is None:
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    found = (whole + up) * Fraction(2) ** power
    largest = Fraction(2 - 2.0**-23) * 2**127
    if abs(found) <= largest:
        return float(found)
    stays = mode == "rz" or mode == ("rm" if x > 0 else "rp")
    return math.copysign(float(largest) if stays else math.inf, x)


ROUNDED: dict[str, Callable] = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b, c: a / b if b else None,
    "rcp": lambda a, b, c: 1 / a if a else None,
}


@pytest.mark.parametrize("name, mode", [(name, "rn") for name in ROUNDED] + [("add", "rm")])
def test_rounded_arithmetic(name, mode):
    """Exact sums and products, rounded once; borders between floats included."""
    a = floats(1.0, 1.0, 1 + 2.0**-23)
    b = floats(2.0**-24, 2.0**-24 + 2.0**-47, 2.0**-24)
    b[:50] = a[:50] * (1 + torch.randn(50) * 2.0**-20)
    c = -(a * b) * (1 + torch.randint(-2, 3, a.shape) * 2.0**-22)
    count = {"fma": 3, "rcp": 1}.get(name, 2)
    given = (a, b, c)[:count]
    operands = ", ".join(("%a", "%b", "%c")[:count])
    found = evaluate(f"{name}.{mode}.f32 %d, {operands}", torch.float32, *given)
    compared = 0
    for x, y, z, one in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        if not all(map(math.isfinite, (x, y, z)[:count])):
            continue
        exact = ROUNDED[name](Fraction(x), Fraction(y), Fraction(z if math.isfinite(z) else 0))
        if exact is not None:
            compared += 1
            assert one == rounded(exact, mode), (name, x, y, z)
    assert compared > 150


def test_nan_is_one_nan():
    a, b = torch.tensor([[math.nan, math.inf], [1.0, -math.inf]])
    found = evaluate("add.rn.f32 %d, %a, %b", torch.float32, a, b)
    assert found.view(torch.int32).tolist() == [0x7FFFFFFF] * 2


def test_roots():
    x = floats().abs()
    found = evaluate("sqrt.rn.f32 %d, %a", torch.float32, x)
    assert numpy.array_equal(found, numpy.sqrt(x.numpy()), equal_nan=True)


def test_extremes_of_floats():
    a, b = torch.meshgrid(*[torch.tensor([0.0, -0.0, 1.0, math.nan])] * 2, indexing="ij")
    a, b = a.reshape(-1), b.reshape(-1)
    found = evaluate("min.f32 %d, %a, %b", a.dtype, a, b)
    torch.testing.assert_close(found, torch.fmin(a, b), rtol=0, atol=0, equal_nan=True)
    assert found[1].signbit() and found[4].signbit()  # of 0 and -0
    found = evaluate("max.NaN.f32 %d, %a, %b", a.dtype, a, b)
    assert torch.equal(found.isnan(), a.isnan() | b.isnan())


def test_conversions():
    x = floats(0.49999997, 1.5, 2.5, 2147483520.0, 2147483648.0, -2147483648.0, -2.1e9)
    inside = x.double().nan_to_num(0.0).clamp(-(2.0**31), 2.0**31 - 1)
    found = evaluate("cvt.rzi.s32.f32 %d, %a", torch.int32, x)
    assert torch.equal(found, inside.trunc().int())
    assert torch.equal(evaluate("cvt.rni.s32.f32 %d, %a", torch.int32, x), inside.round().int())
    whole = evaluate("cvt.rni.f32.f32 %d, %a", torch.float32, x)
    assert torch.equal(whole.nan_to_num(), x.round().nan_to_num())
    narrow = evaluate("cvt.rn.bf16.f32 %d, %a", torch.int16, x).view(torch.bfloat16)
    assert torch.equal(narrow.nan_to_num(), x.bfloat16().nan_to_num())
    pairs = evaluate("cvt.rn.bf16x2.f32 %d, %a, %b", torch.int32, x, -x).view(torch.bfloat16)
    expected = torch.stack([-x, x], 1).bfloat16()
    assert torch.equal(pairs.reshape(-1, 2).nan_to_num(), expected.nan_to_num())
    numbers = torch.randint(-(2**31), 2**31, (100,), dtype=torch.int32)
    assert torch.equal(evaluate("cvt.rn.f32.s32 %d, %a", torch.float32, numbers), numbers.float())
    assert torch.equal(
        evaluate("cvt.s32.s8 %d, %a", torch.int32, numbers), numbers.to(torch.int8).int()
    )


def permuted(a: int, b: int, order: int) -> int:
    data, found = (a | b << 32).to_bytes(8, "little"), []
    for at in range(4):
        one = order >> 4 * at & 15
        found.append(data[one & 7] if one < 8 else 255 * (data[one & 7] > 127))
    return int.from_bytes(bytes(found), "little")


def signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def dotted(a: int, b: int, c: int) -> int:
    of = [numpy.frombuffer(x.to_bytes(4, "little"), numpy.int8).astype(int) for x in (a, b)]
    return int(of[0] @ of[1]) + c


WORDS: dict[str, Callable] = {
    "add.s32 %d, %a, %b": lambda a, b, c: a + b,
    "mul.lo.s32 %d, %a, %b": lambda a, b, c: a * b,
    "mul.hi.s32 %d, %a, %b": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.hi.u32 %d, %a, %b": lambda a, b, c: a * b >> 32,
    "mad.lo.s32 %d, %a, %b, %c": lambda a, b, c: a * b + c,
    "div.s32 %d, %a, 7": lambda a, b, c: int(Fraction(signed(a), 7)),
    "div.u32 %d, %a, 7": lambda a, b, c: a // 7,
    "rem.s32 %d, %a, -7": lambda a, b, c: int(math.fmod(signed(a), 7)),
    "min.s32 %d, %a, %b": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %d, %a, %b": lambda a, b, c: max(a, b),
    "xor.b32 %d, %a, %b": lambda a, b, c: a ^ b,
    "not.b32 %d, %a": lambda a, b, c: ~a,
    "neg.s32 %d, %a": lambda a, b, c: -a,
    "shl.b32 %d, %a, 5": lambda a, b, c: a << 5,
    "shl.b32 %d, %a, 32": lambda a, b, c: 0,
    "shr.u32 %d, %a, 31": lambda a, b, c: a >> 31,
    "shr.s32 %d, %a, 40": lambda a, b, c: signed(a) >> 31,
    "prmt.b32 %d, %a, %b, %c": permuted,
    "bfi.b32 %d, %a, %b, 5, 7": lambda a, b, c: b & ~(127 << 5) | (a & 127) << 5,
    "bfe.u32 %d, %a, 5, 7": lambda a, b, c: a >> 5 & 127,
    "bfe.s32 %d, %a, 8, 8": lambda a, b, c: ((a >> 8 & 255) + 128) % 256 - 128,
    "bfe.s32 %d, %a, 28, 8": lambda a, b, c: signed(a) >> 28,
    "dp2a.lo.u32.u32 %d, %a, %b, %c": lambda a, b, c: (
        (a & 65535) * (b & 255) + (a >> 16) * (b >> 8 & 255) + c
    ),
    "dp4a.s32.s32 %d, %a, %b, %c": dotted,
    "lop3.b32 %d, %a, %b, %c, 0xe2": lambda a, b, c: a & b | ~b & c,
}
"""Instruction -> its result modulo 2^32, of words without sign."""


@pytest.mark.parametrize("instruction", WORDS)
def test_words(instruction):
    given = torch.randint(-(2**31), 2**31, (3, 64), dtype=torch.int32)
    given[:, :3] = torch.tensor([0, -1, -(2**31)])
    found = evaluate(instruction, torch.int32, *given)
    words = given.numpy().view(numpy.uint32).T.tolist()
    assert found.tolist() == [signed(WORDS[instruction](*of) % 2**32) for of in words]


LANES = numpy.arange(32)
SHUFFLES = {
    "up.b32 %d, %a, 3, 0": numpy.where(LANES >= 3, LANES - 3, LANES),
    "down.b32 %d, %a, 5, 31": numpy.where(LANES + 5 <= 31, LANES + 5, LANES),
    "bfly.b32 %d, %a, 6, 31": LANES ^ 6,
    "idx.b32 %d, %a, 9, 31": LANES * 0 + 9,
    "idx.b32 %d, %a, 2, 0x181f": LANES // 8 * 8 + 2,  # within eight lanes
    "down.b32 %d, %a, 3, 0x181f": numpy.where(LANES % 8 + 3 < 8, LANES + 3, LANES),
}
"""Shuffle -> lanes that are read."""


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_shuffles(shuffle):
    given = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32)
    found = evaluate(f"shfl.sync.{shuffle}, -1", torch.int32, given)
    assert torch.equal(found, given[torch.from_numpy(SHUFFLES[shuffle])])


VOTES = {
    "any": lambda x: x.any(),
    "all": lambda x: x.all(),
    "uni": lambda x: x.all() or not x.any(),
}


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("given", [torch.zeros(32), torch.ones(32), torch.arange(32.0)])
def test_votes(vote, given):
    text = "setp.ne.f32 p, %a, 0f00000000"
    text = f"{{ .reg .pred p; {text}; vote.sync.{vote}.pred p, p, -1; selp.b32 %d, 1, 0, p; }}"
    found = evaluate(text, torch.int32, given)
    assert torch.equal(found, torch.full_like(found, int(VOTES[vote](given != 0))))


def test_a_ballot():
    text = "{ .reg .pred p; setp.gt.s32 p, %a, 20; vote.sync.ballot.b32 %d, !p, -1; }"
    found = evaluate(text, torch.int32, torch.arange(32, dtype=torch.int32))
    assert found.tolist() == [2**21 - 1] * 32


ATOMICS = {
    "add.u32": lambda before, x: before + x,
    "min.s32": min,
    "max.s32": max,
    "and.b32": lambda before, x: before & x,
    "or.b32": lambda before, x: before | x,
    "xor.b32": lambda before, x: before ^ x,
    "exch.b32": lambda before, x: x,
}


@pytest.mark.parametrize("atomic", ATOMICS)
def test_atomic_operations(atomic):
    """Of threads one after another, on the result of the first."""
    given = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32)
    text = f"{{ .reg .b64 at; ld.param.u64 at, [given1]; atom.global.{atomic} %d, [at], %a; }}"
    x, held = given.clone(), given[0].item()
    found = evaluate(text, torch.int32, given)
    assert found[0] == held
    expected = []
    for one in x.tolist():
        expected.append(held)
        held = signed(ATOMICS[atomic](held, one) % 2**32)
    assert found.tolist() == expected and given[0] == held


def test_memory_of_a_thread():
    """An array with an index that is known at run time."""
    text = """{ .local .align 4 .b8 array[16]; .reg .b64 at, one; .reg .b32 two;
        mov.u64 at, array; cvta.local.u64 one, at;
        st.local.u32 [at], %a; st.u32 [one+4], 7; and.b32 two, %at, 1;
        mul.wide.u32 one, two, 4; add.s64 at, at, one; ld.local.u32 %d, [at]; }"""
    given = torch.arange(100, 132, dtype=torch.int32)
    found = evaluate(text, torch.int32, given)
    assert torch.equal(found, given.where(given % 2 == 0, 7))


BRANCHES = "setp.lt.u32 p, %at, 16; @p bra $A; {}; bra $B; $A: {}; $B: mov.b32 %d, %a"
WAITS = {
    "lanes of a warp wait at different barriers": BRANCHES.format("bar.sync 0", "bar.sync 0"),
    "16 of the block's threads wait at line": BRANCHES.format("bar.sync 0", "bar.sync 1"),
    "another number of threads than others": BRANCHES.format("bar.sync 0", "bar.sync 0, 64"),
    "waits for ever; 16 of the block's threads have ended": BRANCHES.format("bar.sync 0", "ret"),
    "the block ends when 32 of 64 threads have come to barrier 3": (
        "bar.arrive 3, 64; mov.b32 %d, %a"
    ),
    "16 of the block's threads wait at line .*bar.arrive 1": BRANCHES.format(
        "bar.arrive 1, 32", "bar.arrive 1, 32"
    ),
    "barrier 16; a block has 0 to 15": "mov.b32 %d, %a; bar.sync 16, 32",
    "a barrier of 48 threads, not of whole warps": "mov.b32 %d, %a; bar.arrive 1, 48",
    "the thread does not end": "$A: bra $A",
}


@pytest.mark.parametrize("message", WAITS)
def test_threads_that_do_not_come_together(message):
    with fails(f"one, block 0 0 0, thread .*{message}"):
        evaluate(f"{{ .reg .pred p; {WAITS[message]}; }}", torch.float32, torch.zeros(32))


@pytest.mark.parametrize(
    "instruction, message",
    [
        ("frobnicate.b32 %d, %a", "unknown instruction frobnicate"),
        ("add.rn.ftz.f32 %d, %a, %a", "unknown modifier .ftz"),
        ("add.f32 %d, %a, %a", "expected .rn, .rz, .rm or .rp"),
        ("add.rn.f32 %d, %a, %e", "expected a register|unknown symbol %e"),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%d}, {%a}, {%a}, {%d}",
            "no layout mma.m16n8k8.bf16 A",
        ),
    ],
)
def test_what_is_not_known_is_named(instruction, message):
    with fails(rf"one, line \d+ .*({message})"):
        evaluate(instruction, torch.float32, floats())
