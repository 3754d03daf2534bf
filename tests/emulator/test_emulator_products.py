"""Products of the emulated libcublasLt run on the driver's streams: ordered, captured, in a context
of their own."""

import pytest
import torch

from lsq.native.products import DTYPES, ProductError, ProductLibrary
from tests.emulator.emulated import fails
from tests.emulator.emulated_cublaslt import emulated, split_of
from tests.emulator.emulated_streams import Stream, Work, device, handle_of, watched

ROWS = 64
SPEC = {"m": ROWS, "n": ROWS, "k": ROWS, "leading_a": ROWS, "leading_b": ROWS, "leading_out": ROWS}
SPEC |= {"dtype": DTYPES[torch.int8], "out_dtype": DTYPES[torch.int32]}
WORKSPACE = 2**20


class Products(Work):
    """A product a @ b.t() of codes and a kernel that overwrites its operands, on streams."""

    def __init__(self):
        super().__init__()
        self.library = ProductLibrary(emulated().path)
        self.a, self.b = (torch.randint(-9, 9, (ROWS, ROWS), dtype=torch.int8) for _ in range(2))
        self.out, self.other = (torch.zeros(ROWS, ROWS, dtype=torch.int32) for _ in range(2))
        workspace = torch.empty(WORKSPACE + 256, dtype=torch.uint8)
        self.workspace = workspace[-workspace.data_ptr() % 256 :][:WORKSPACE]

    def product(self, out, stream=None, split=1):
        made = self.library.product(**SPEC)
        proposed = (each.data for each in made.candidates(WORKSPACE, 16))
        made.choose(next(data for data in proposed if split_of(data) == split))
        operands = [tensor.data_ptr() for tensor in (self.a, self.b, out)]
        place = {"workspace": self.workspace.data_ptr(), "workspace_bytes": WORKSPACE}
        handle = handle_of(stream)
        made.run(operands, **place, stream=handle.value if handle else 0)

    def fill(self, tensor, stream=None):
        self.module.launch("fill", 1, 16, tensor.data_ptr(), 0x01010101, stream=handle_of(stream))

    @property
    def expected(self):
        return self.a.int() @ self.b.int().t()


@pytest.fixture
def work():
    return Products()


@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_its_operands_and_results_are_ordered(work, operand):
    first, second = Stream(work.driver), Stream(work.driver)
    with watched(work.driver):
        work.product(work.out, first)
        with fails("kernel fill, .* writes 4 bytes .*, which a product (read|wrote) on"):
            work.fill(getattr(work, operand), second)
        second.wait_stream(first)
        work.fill(getattr(work, operand), second)
        message = r"EXECUTION_FAILED, a product (reads|writes) \d+ bytes .*kernel fill wrote"
        with pytest.raises(ProductError, match=message):
            work.product(work.other if operand != "out" else work.out, first)


def test_it_belongs_to_a_context(work):
    stream = Stream(work.driver)
    work.product(work.out, stream)
    with device(work.driver, 1):
        message = r"EXECUTION_FAILED, stream \d+ does not belong to the current context"
        with pytest.raises(ProductError, match=message):
            work.product(work.out, stream)
        message = "EXECUTION_FAILED, a product belongs to another context"
        with pytest.raises(ProductError, match=message):
            work.product(work.out)
