"""The C interface of matrix products: bytes of algorithms, failures, finding the library."""

import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from lsq.native.products import (
    DTYPES,
    ProductError,
    ProductLibrary,
    find_cublaslt,
)
from tests.emulator.emulated_cublaslt import emulated, split_of
from tests.gemm.operands import codes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SHAPE = {"m": 41, "n": 48, "k": 64, "leading_a": 64, "leading_b": 64, "leading_out": 48}
INTEGERS = {
    **SHAPE,
    "dtype": DTYPES[torch.int8],
    "out_dtype": DTYPES[torch.int32],
}
FLOATS = {
    **SHAPE,
    "dtype": DTYPES[torch.bfloat16],
    "out_dtype": DTYPES[torch.bfloat16],
}


@pytest.fixture
def library():
    made = ProductLibrary(emulated().path)
    yield made
    made.close()


def addresses(a, b, out):
    return [a.data_ptr(), b.data_ptr(), out.data_ptr()]


def by_split(product, parts):
    """The bytes of the first algorithm that is proposed with so many parts of K."""
    proposed = (each.data for each in product.candidates(2**25, 16))
    return next(data for data in proposed if split_of(data) == parts)


@pytest.mark.parametrize("spec", [INTEGERS, FLOATS], ids=["int8", "bfloat16"])
def test_every_candidate_runs_with_the_workspace_that_it_says(library, spec):
    product = library.product(**spec)
    dtype, out_dtype = (
        (torch.int8, torch.int32) if spec is INTEGERS else (torch.bfloat16, torch.bfloat16)
    )
    a, b = codes(41, 64).to(dtype), codes(48, 64).to(dtype)
    wanted = (a.double() @ b.double().t()).to(out_dtype)
    workspace = torch.empty(2**23, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]
    candidates = product.candidates(2**22, 16)
    assert len(candidates) > 2 and any(each.workspace_bytes for each in candidates)
    for each in candidates:
        assert product.check(each.data) == each
        product.choose(each.data)
        out = torch.full((41, 48), 3, dtype=out_dtype)
        run = {"workspace": workspace.data_ptr(), "workspace_bytes": each.workspace_bytes}
        product.run(addresses(a, b, out), **run)
        assert torch.equal(out, wanted)
        if each.workspace_bytes:
            with pytest.raises(ProductError, match=f"at least {each.workspace_bytes} bytes"):
                product.run(
                    addresses(a, b, out), **run | {"workspace_bytes": each.workspace_bytes - 1}
                )


@pytest.mark.parametrize("size", [0, 63, 65])
def test_an_algorithm_is_64_bytes(library, size):
    product = library.product(**INTEGERS)
    for use in (product.check, product.choose):
        with pytest.raises(ValueError, match=f"64 bytes, these are {size}"):
            use(bytes(size))


def test_bytes_of_an_algorithm_are_refused_once_a_bit_flips(library):
    product = library.product(**INTEGERS)
    data = bytearray(product.candidates(2**25, 4)[0].data)
    product.check(bytes(data))
    data[9] ^= 1
    for use in (product.check, product.choose):
        with pytest.raises(ProductError, match="INVALID_VALUE"):
            use(bytes(data))


def test_algorithms_are_for_some_dtypes_and_shapes(library):
    integers, floats = library.product(**INTEGERS), library.product(**FLOATS)
    with pytest.raises(ProductError, match="bfloat16.*AlgoCheck.*INVALID_VALUE"):
        floats.choose(integers.candidates(2**25, 1)[0].data)
    split = by_split(integers, 4)
    integers.check(split)
    shorter = library.product(**INTEGERS | {"k": 32})
    with pytest.raises(ProductError, match=r"\[41,32\].*NOT_SUPPORTED"):
        shorter.check(split)


def test_sums_rounded_to_the_output_are_refused(library):
    """No such algorithm is proposed; a file may hold one."""
    product = library.product(**FLOATS)
    data = bytearray(by_split(product, 2))
    data[16] = 4  # the scheme in the emulated library's Algorithm, whose first 40 bytes are hashed
    value = 2166136261
    for byte in data[:40]:
        value = (value ^ byte) * 16777619 % 2**32
    data[40:44] = value.to_bytes(4, "little")
    with pytest.raises(ProductError, match="reduction scheme 4 rounds parts of the sum"):
        product.choose(bytes(data))


def test_nothing_runs_before_an_algorithm_is_chosen(library):
    product = library.product(**INTEGERS)
    before = emulated().calls("Matmul")
    with pytest.raises(ProductError, match="NOT_INITIALIZED.*no algorithm was chosen"):
        product.run(addresses(codes(41, 64), codes(48, 64), torch.empty(41, 48, dtype=torch.int32)))
    assert emulated().calls("Matmul") == before


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("wrong", ["null", "misaligned"])
def test_bad_addresses_are_refused(library, which, wrong):
    product = library.product(**INTEGERS)
    product.choose(product.candidates(0, 1)[0].data)
    places = addresses(codes(41, 64), codes(48, 64), torch.empty(41, 48, dtype=torch.int32))
    places[which] = 0 if wrong == "null" else places[which] + 8
    before = emulated().calls("Matmul")
    with pytest.raises(ProductError, match="multiples of 16 bytes"):
        product.run(places)
    assert emulated().calls("Matmul") == before


@pytest.mark.parametrize(
    "changes",
    [
        {"transpose_b": 1, "leading_b": 48},
        {"k": 62, "leading_a": 64},
        {"n": 46},
        {"leading_out": 50},
        {"out_dtype": DTYPES[torch.float32]},
        {"dtype": 99},
    ],
)
def test_the_library_has_the_last_word(library, changes):
    """What the Python side refuses first, the emulated library refuses as well."""
    with pytest.raises(ProductError, match="AlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED"):
        library.product(**INTEGERS | changes).candidates(2**25, 8)


def test_without_a_context_the_message_says_what_to_do():
    library = ProductLibrary(emulated().path)
    product = library.product(**INTEGERS)  # describing needs no context
    emulated().fail("Create", 1)
    with pytest.raises(
        ProductError, match="cublasLtCreate: .*NOT_INITIALIZED.*CUDA context must be current"
    ):
        product.candidates(2**25, 8)
    assert product.candidates(2**25, 8)
    library.close()


def test_one_handle_for_many_threads():
    library = ProductLibrary(emulated().path)
    before = emulated().calls("Create")
    found, workers = [], []
    for _ in range(8):
        workers.append(
            threading.Thread(
                target=lambda: found.append(library.product(**INTEGERS).candidates(0, 4))
            )
        )
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 8 and all(each == found[0] for each in found)
    assert emulated().calls("Create") == before + 1
    library.close()


def test_everything_created_is_destroyed():
    kinds = ["MatmulDesc", "MatrixLayout", "MatmulPreference", ""]
    alive = [
        emulated().calls(f"{kind}Create") - emulated().calls(f"{kind}Destroy") for kind in kinds
    ]
    library = ProductLibrary(emulated().path)
    product = library.product(**INTEGERS)
    library.close()
    product.choose(product.candidates(0, 1)[0].data)
    a, b, out = codes(41, 64), codes(48, 64), torch.empty(41, 48, dtype=torch.int32)
    product.run(addresses(a, b, out))
    assert torch.equal(out, (a.double() @ b.double().t()).int())
    product.close()
    assert alive == [
        emulated().calls(f"{kind}Create") - emulated().calls(f"{kind}Destroy") for kind in kinds
    ]


def test_libraries_that_are_not_cublaslt(tmp_path):
    with pytest.raises(ProductError, match="cannot be loaded.*absent.so"):
        ProductLibrary(str(tmp_path / "absent.so"))
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int cublasLtCreate(void**) { return 0; }')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", tmp_path / "other.so"], check=True)
    with pytest.raises(ProductError, match="has no function cublasLtDestroy; it is too old"):
        ProductLibrary(str(tmp_path / "other.so"))


def test_the_library_is_found_by_pathfinder(monkeypatch):
    load = lambda name: SimpleNamespace(abs_path=f"/toolkit/{name}")  # noqa: E731
    finder = SimpleNamespace(load_nvidia_dynamic_lib=load)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=finder))
    assert find_cublaslt() == "/toolkit/cublasLt"


def no_library(name):
    raise RuntimeError(f"{name} is\nnowhere")


FINDS_NOTHING = SimpleNamespace(load_nvidia_dynamic_lib=no_library)


@pytest.mark.parametrize("cuda", [None, SimpleNamespace(pathfinder=FINDS_NOTHING)])
def test_without_any_library_the_message_names_the_extra(monkeypatch, cuda):
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    with pytest.raises(
        RuntimeError, match=r"no libcublasLt was found \(.*\): install .*pip install .*\[cuda13\]'"
    ):
        find_cublaslt()


def test_the_real_library_takes_our_descriptions():
    """Without a GPU as well: every function exists, and descriptors, layouts and their attributes
    are accepted."""
    try:
        path = find_cublaslt()
    except RuntimeError as error:
        pytest.skip(f"libcublasLt is not installed: {error}")
    library = ProductLibrary(path)
    assert int(library.version().partition(".")[0]) >= 12
    for spec in (INTEGERS, FLOATS, FLOATS | {"out_dtype": DTYPES[torch.float32]}):
        product = library.product(**spec)
        if not torch.cuda.is_available():
            with pytest.raises(ProductError, match="cublasLtCreate.*CUDA context must be current"):
                product.candidates(2**25, 8)
        product.close()
    library.close()


def test_version(library):
    assert library.version() == "13.10.0"
