"""The machine code of kernels that base and big models need: no local memory, no double precision,
tensor cores and vector accesses where they are meant, shared memory aligned. NVRTC and the
disassembler need no GPU."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lsq.native import compiler
from lsq.native.launch import Kernel
from tests.native import disassembly
from tests.native.disassembly import Instruction
from tests.sampling import first

pytestmark = pytest.mark.thorough

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
PRODUCTS = (
    "lsq_input_gradient_product",
    "lsq_next_words_product",
    "lsq_project_product",
    "lsq_vocabulary_loss_gradient_product",
    "lsq_vocabulary_loss_product",
    "lsq_weight_gradient_product",
)
ATTENTION = ("lsq_attention", "lsq_attention_key_gradient", "lsq_attention_query_gradient")
OF_DOUBLES = {"lsq_finish_sums", "lsq_gradient_norm", "lsq_least_error_clip", "lsq_sum_losses"}
"""Kernels that add parts of sums in double precision."""
ONE_BY_ONE = {
    "lsq_least_error_clip": "samples of values that lie apart",
    "lsq_pack_gradients": "gradients and messages that begin anywhere",
    "lsq_sum_messages": "messages that begin anywhere",
    "lsq_unpack_gradients": "gradients and messages that begin anywhere",
}
"""Kernels that access single values of one or two bytes -> which."""
NO_ROWS = {
    "lsq_adam_poison_table",
    "lsq_finish_sums",
    "lsq_rank_occurrences",
    "lsq_sort_occurrences",
    "lsq_start_scales",
    "lsq_sum_losses",
    *ONE_BY_ONE,
}
"""Kernels that need no accesses of 16 bytes: they have few values, or take them one by one."""
OTHERS = (
    "lsq_adam_codes",
    "lsq_adam_codes_table",
    "lsq_adam_poison_table",
    "lsq_adam_table",
    "lsq_append",
    "lsq_attention_gradient_rows",
    "lsq_begin_weight_gradient",
    "lsq_cached_attention",
    "lsq_embed",
    "lsq_end",
    "lsq_finish_sums",
    "lsq_gradient_norm",
    "lsq_join_occurrences",
    "lsq_kept_input_gradient",
    "lsq_least_error_clip",
    "lsq_next_words",
    "lsq_pack_gradients",
    "lsq_project_input_gradient",
    "lsq_project_weight_gradient",
    "lsq_rank_occurrences",
    "lsq_residual_norm",
    "lsq_residual_norm_gradient",
    "lsq_round",
    "lsq_round_transposed",
    "lsq_round_weight",
    "lsq_sort_occurrences",
    "lsq_sparse_project",
    "lsq_start_scales",
    "lsq_sum_losses",
    "lsq_sum_messages",
    "lsq_sum_occurrences",
    "lsq_transpose_codes",
    "lsq_unpack_gradients",
    "lsq_vocabulary_losses",
    "lsq_zero",
)
USUAL = ("lsq_attention", "lsq_project_product", "lsq_residual_norm")
"""What the usual tests compile: one that multiplies, one of attention, one of rows."""
PACKED = {"FIELD_BITS", "INT4"}
"""Defines of products with a weight that is not stored as int8; its copies are not counted."""
WITHOUT_OVERLAP = {"sm_80", "sm_89"}
"""Targets whose launches begin when the one before has ended."""
LONG_STEPS = {"FIELD_BITS", "WGMMA"}
"""Defines of products with 128 values along K in a stage, and bytes of a row of a; others have 64.
"""
FIRST_REGISTERS, COPYING_REGISTERS = 168, 40
"""Of a thread of a product by wgmma: kFirstRegisters of product_wgmma.cuh, and what is left to one
that copies."""


@functools.cache
def kernels() -> dict[str, list[Kernel]]:
    """By name: kernels of training and decoding of base and big, with activations in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        benchmark = import_module("compile_kernels")
        sizes = import_module("operations").sizes(benchmark.TOKENS)
    found = {}
    for kernel in benchmark.needed([torch.bfloat16], sizes, benchmark.measured_configuration):
        found.setdefault(kernel.name, []).append(kernel)
    return found


def cases() -> Iterator[pytest.param]:
    """(name, target): few kernels on Hopper; in the thorough tests all, and on GeForce what
    multiplies; more in the slow tests."""
    thorough = {("sm_90a", False), ("sm_90a", True), ("sm_89", True)}
    for target in ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"):
        for name in (*PRODUCTS, *ATTENTION, *OTHERS):
            more = (target, name not in OTHERS) in thorough
            marks = pytest.mark.thorough if more else pytest.mark.slow
            usual = target == "sm_90a" and name in USUAL
            yield pytest.param(name, target, marks=() if usual else marks)


def one_of(name: str, target: str) -> Kernel:
    """The kernel of that name with the largest tile, by wgmma where the target has it."""

    def area(kernel: Kernel) -> tuple:
        defines = dict(kernel.defines)
        return defines.get("TILE_M", 0) * defines.get("TILE_N", 0), str(kernel)

    there = [kernel for kernel in kernels()[name] if "WGMMA" not in dict(kernel.defines)]
    return max(kernels()[name] if target == "sm_90a" else there, key=area)


def assert_lean(kernel: Kernel, target: str) -> None:
    """Nothing is wrong with a kernel's machine code."""
    compiled = compiler.compile_kernels(kernel.source, kernel.defines, target)
    assert not list(faults(kernel, compiled.image, target)), (kernel, target)
    if "WGMMA" in dict(kernel.defines):
        assert compiled.resources[kernel.name].registers == FIRST_REGISTERS, kernel


def faults(kernel: Kernel, image: bytes, target: str) -> Iterator[str]:
    """What is wrong with a kernel of a cubin, in words."""
    instructions, name = disassembly.disassembled(image)[kernel.name], kernel.name
    if target not in WITHOUT_OVERLAP:
        yield from disassembly.early_accesses(instructions)
    yield from disassembly.local_memory(instructions)
    yield from disassembly.float_atomics(instructions)
    if name not in OF_DOUBLES:
        yield from disassembly.doubles(instructions)
    if name not in ONE_BY_ONE:
        yield from disassembly.narrow_accesses(instructions)
    if name not in NO_ROWS and not any(
        one.parts[0] in ("LD", "LDG", "ST", "STG") and "128" in one.parts for one in instructions
    ):
        yield "no access of 16 bytes"
    shared = disassembly.shared_memory(image).get(name)
    if name in PRODUCTS:
        yield from faults_of_product(dict(kernel.defines), instructions)
        pattern = 8 * step_of(dict(kernel.defines))
        if shared is None or shared.alignment < pattern or shared.bytes % pattern:
            yield f"stages begin at no multiple of {pattern}: {shared}"
    if name in ATTENTION:
        if not any(one.parts[0] == "HMMA" for one in instructions):
            yield "no tensor cores"
        if shared is None or shared.alignment < 16:
            yield f"tiles begin at no multiple of 16: {shared}"


def step_of(defines: dict[str, int]) -> int:
    return 128 if LONG_STEPS & set(defines) else 64


def faults_of_product(defines: dict[str, int], instructions: list[Instruction]) -> Iterator[str]:
    """What differs from a main loop of one stage, and from copies to all of them."""
    rows, columns, stages = (defines[name] for name in ("TILE_M", "TILE_N", "STAGES"))
    step, threads, as_int8 = step_of(defines), 128, not PACKED & set(defines)
    if "WGMMA" in defines:
        groups, wanted = disassembly.groups_of_wgmma(instructions), rows // 64 * (step // 32)
        if groups != [wanted]:
            yield f"groups of {groups} multiplications, not one of {wanted}"
        expected = {f"IGMMA.64x{columns}x32.S8.S8": wanted}
        stages = 1  # copies to all are one loop
        yield from disassembly.registers_beyond(instructions, COPYING_REGISTERS)
    else:
        expected = {"IMMA.16832.S8.S8": rows // 32 * (columns // 16) * (step // 32)}
    if as_int8:
        expected["LDGSTS.E.BYPASS.128"] = stages * (rows + columns) * step // 16 // threads
    kinds = {"IMMA", "IGMMA", "LDGSTS"} if as_int8 else {"IMMA", "IGMMA"}
    found = Counter(one.code for one in instructions if one.parts[0] in kinds)
    if found != expected:
        yield f"has {dict(found)}, not {expected}"


def test_every_kernel_is_listed():
    assert set(kernels()) == {*PRODUCTS, *ATTENTION, *OTHERS}


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_one_kernel_of_each_name(name, target):
    assert_lean(one_of(name, target), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_tile(name, target):
    for kernel in kernels()[name]:
        if target == "sm_90a" or "WGMMA" not in dict(kernel.defines):
            assert_lean(kernel, target)


PLANTED = {
    "local memory": (
        disassembly.local_memory,
        "float held[64]; for (int i = 0; i < 64; ++i) held[i] = x[i] * x[i + 1];"
        " for (int i = 0; i < n; ++i) x[i] = held[i * n & 63];",
    ),
    "double precision": (disassembly.doubles, "x[n] = static_cast<float>(x[0] * 0.1);"),
    "an atomic sum": (disassembly.float_atomics, "atomicAdd(x + n, 1.5f);"),
    "single codes": (disassembly.narrow_accesses, "x[threadIdx.x] = codes[threadIdx.x];"),
    "single bfloat16": (
        disassembly.narrow_accesses,
        "x[threadIdx.x] = reinterpret_cast<const unsigned short*>(codes)[threadIdx.x];",
    ),
    "bytes": (
        disassembly.narrow_accesses,
        "reinterpret_cast<unsigned char*>(x)[threadIdx.x] = n;",
    ),
}
"""Fault -> (the check that must find it, the body of a kernel that has it)."""


def planted(folder: Path, text: str, target: str) -> bytes:
    """The cubin of a source."""
    source = folder / "planted.cu"
    source.write_text(text)
    return compiler.compile_kernels(str(source), (), target).image


@pytest.mark.parametrize("fault", first(PLANTED, 3))
@pytest.mark.parametrize("target", first(["sm_90a", "sm_80"], 1))
def test_faults_are_found(fault, target, tmp_path):
    check, body = PLANTED[fault]
    parameters = "float* x, const signed char* codes, int n"
    text = f'extern "C" __global__ void planted({parameters}) {{ {body} }}'
    image = planted(tmp_path, text, target)
    instructions = disassembly.disassembled(image)["planted"]
    assert list(check(instructions))
    for other in {check for check, _ in PLANTED.values()} - {check}:
        assert not list(other(instructions))
    kernel = Kernel(source="planted.cu", name="planted")
    found = set(faults(kernel, image, "sm_80"))  # it does not wait for launches before
    assert found == {*check(instructions), "no access of 16 bytes"}


@pytest.mark.parametrize(("first", "codes"), [("", ["STG", "STG"]), ("wait_for_launches();", [])])
def test_accesses_before_the_launches_before_have_ended_are_found(first, codes, tmp_path):
    text = '#include "device.cuh"\nLSQ_KERNEL planted(Out<float> x) {'
    image = planted(tmp_path, f"{text} {first} x[threadIdx.x] = 1; x[512] = 2; }}", "sm_90a")
    found = disassembly.early_accesses(disassembly.disassembled(image)["planted"])
    assert [fault.partition(".")[0] for fault in found] == codes


def test_attention_without_tensor_cores_is_found(tmp_path):
    text = 'extern "C" __global__ void lsq_attention(float* x) { x[threadIdx.x] = 1; }'
    image = planted(tmp_path, text, "sm_80")
    found = set(faults(Kernel(source="planted.cu", name="lsq_attention"), image, "sm_80"))
    assert found >= {"no tensor cores", "tiles begin at no multiple of 16: None"}


def test_stages_that_are_not_aligned_are_found(tmp_path):
    """They lie where static memory of another length ends."""
    kernel = one_of("lsq_vocabulary_loss_product", "sm_90a")
    text = (compiler.KERNELS / kernel.source).read_text()
    assert text.count("__align__(kPattern)") == 1
    source = tmp_path / kernel.source
    source.write_text(text.replace("__align__(kPattern)", "__align__(16)"))
    image = compiler.compile_kernels(str(source), kernel.defines, "sm_90a").image
    assert ["stages begin at" in fault for fault in faults(kernel, image, "sm_90a")] == [True]


@pytest.mark.parametrize(
    "target, changed",
    [("sm_80", {"TILE_N": 64}), ("sm_80", {"STAGES": 4}), ("sm_90a", {"TILE_N": 64})],
)
def test_another_tile_is_found(target, changed):
    kernel = one_of("lsq_project_product", target)
    image = compiler.compile_kernels(kernel.source, kernel.defines, target).image
    other = replace(kernel, defines=tuple({**dict(kernel.defines), **changed}.items()))
    assert any(fault.startswith("has ") for fault in faults(other, image, target))


def wgmma(*codes: str) -> list[Instruction]:
    """Instructions; the last multiplication before each wait ends a group."""
    found = []
    for code, following in zip(codes, (*codes[1:], ""), strict=True):
        ends = code == "IGMMA" and following.startswith("WARPGROUP")
        operands = "R24,gsb0" if ends else "gsb0,0x0" if code == WAIT else "R24"
        found.append(Instruction(code=code, operands=operands))
    return found


ARRIVE, WAIT = "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE"


def test_groups_of_multiplications():
    loop = [ARRIVE, "IGMMA", "UIADD3", "IGMMA", WAIT]
    assert disassembly.groups_of_wgmma(wgmma(*loop)) == [2]
    assert disassembly.groups_of_wgmma(wgmma(*loop, *loop, WAIT)) == [2, 2]
    assert disassembly.groups_of_wgmma(wgmma("IMAD")) == []


@pytest.mark.parametrize(
    ("codes", "fault"),
    [
        (["IGMMA", WAIT], "without WARPGROUP.ARRIVE"),
        ([ARRIVE, "IGMMA", WAIT, "IGMMA", WAIT], "without WARPGROUP.ARRIVE"),
        ([ARRIVE, "IGMMA", "IMAD", WAIT], "within a group"),
        ([ARRIVE, "IGMMA"], "while it multiplies"),
        ([ARRIVE, "IGMMA", ARRIVE], "while it multiplies"),
    ],
)
def test_groups_that_are_not_fenced_or_not_waited_for_are_found(codes, fault):
    with pytest.raises(ValueError, match=fault):
        disassembly.groups_of_wgmma(wgmma(*codes))


def test_multiplications_whose_last_group_is_not_waited_for_are_found():
    *loop, wait = wgmma(ARRIVE, "IGMMA", WAIT)
    with pytest.raises(ValueError, match="while it multiplies"):
        disassembly.groups_of_wgmma([*loop, replace(wait, operands="gsb0,0x1")])


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([" MOV R39,UR40", " EXIT", " MOV R40,R2"], 0),
        ([" MOV R40,R2", " EXIT"], 1),
        (["@P0 EXIT", " MOV R2,R40", " EXIT"], 1),
        ([" STG.E.128 desc[UR4][R36.64],R2", " EXIT"], 0),
        ([" LDG.E.128 R37,desc[UR4][R2.64]", " EXIT"], 1),
        ([" BRA 0x30", " MOV R40,R2", " EXIT"], 0),
        ([" BRA.DIV UR4,0x30", " MOV R40,R2", " EXIT"], 1),
        (["@!P0 BRA 0x30", " EXIT", " MOV R40,R2", " EXIT"], 1),
        ([" CALL.REL.NOINC 0x40", " MOV R40,R2", " EXIT", " RET.REL.NODEC R4 0x0"], 1),
        ([" USETMAXREG.DEALLOC.CTAPOOL 0x28"], 1),
    ],
)
def test_registers_that_were_given_up_are_found_wherever_the_threads_go_on(lines, found):
    words = (line.split(" ", 2) for line in ["@P1 USETMAXREG.DEALLOC.CTAPOOL 0x28", *lines])
    instructions = [
        Instruction(condition=condition, code=code, operands="".join(operands))
        for condition, code, *operands in words
    ]
    assert len(list(disassembly.registers_beyond(instructions, 40))) == found


@pytest.mark.parametrize(("between", "groups"), [("", [2]), ("sums[0][0] += i;", [1, 1])])
def test_multiplications_one_after_another_are_found(between, groups, tmp_path):
    """The compiler makes groups of one where sums are touched between multiplications."""
    image = planted(
        tmp_path,
        f"""#include "warpgroup.cuh"
LSQ_KERNEL planted(int32_t* out, uint64_t a, uint64_t b, int64_t steps) {{
    int32_t sums[8][4] = {{}};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {{
        fence_sums(sums);
        begin_multiplication(sums, a, b);
        {between}
        begin_multiplication(sums, moved(a, 32), moved(b, 32));
        commit_multiplications();
        wait_multiplications<0>(sums);
    }}
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 4; ++i) out[(4 * j + i) * 128 + threadIdx.x] = sums[j][i];
}}
""",
        "sm_90a",
    )
    instructions = disassembly.disassembled(image)["planted"]
    assert disassembly.groups_of_wgmma(instructions) == groups
