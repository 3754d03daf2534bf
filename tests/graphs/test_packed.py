"""Packed features and batches: bits are read back by Python's whole numbers."""

import numpy
import pytest
import torch
from scipy import sparse

from lsq.graphs import Adjacency
from lsq.graphs.packed import SHORT, Coding, Features, PackedBatch
from lsq.quant import calibrate

BITS = range(2, 9)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def signed(row: torch.Tensor, bits: int, columns: int) -> list[int]:
    """The whole numbers of so many bits in a row of bytes, the lowest first."""
    number = int.from_bytes(bytes(row.tolist()), "little")
    digits = [number >> bits * i & 2**bits - 1 for i in range(columns)]
    return [digit - 2**bits if digit >> bits - 1 else digit for digit in digits]


@pytest.mark.parametrize("bits", BITS)
def test_codes_come_back(bits):
    largest = 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(bits)
    for columns in (1, 3, 8, 13, 64):
        codes = torch.randint(-largest, largest + 1, (5, columns), generator=generator)
        codes[0, 0], codes[1, 0] = -largest, largest
        coding = Coding(columns=columns, bits=(bits,), multipliers=(1,), scale=0.5)
        packed = coding.pack(0, codes.to(torch.int8))
        assert packed.dtype == torch.uint8
        least = -(-columns * bits // 8)
        assert packed.shape[1] == least if columns % 8 == 0 else packed.shape[1] < least + bits
        assert [signed(row, bits, columns) for row in packed] == codes.tolist()
        assert torch.equal(coding.unpack(0, packed), codes * 0.5)


@pytest.mark.parametrize("bits", BITS)
def test_features_are_rounded_to_the_nearest(bits):
    x, largest = drawn(40, 13), 2 ** (bits - 1) - 1
    features = Features.of(x, torch.zeros(40, dtype=torch.int32), {0: bits})
    scale = features.coding.scale
    assert scale == pytest.approx(calibrate(x, "mse", bits).item() / largest)
    expected = numpy.clip(numpy.rint(x.double().numpy() / scale), -largest, largest) * scale
    found = features.coding.unpack(0, features.tables[0])
    numpy.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_widths_by_degree_share_a_scale():
    x, degrees = drawn(300, 10), torch.arange(300, dtype=torch.int32).flip(0)
    widths = {0: 8, 50: 5, 16: 4, 200: 2}
    features = Features.of(x, degrees, widths)
    assert features.coding.bits == (8, 4, 5, 2)
    assert features.coding.multipliers == (1, 127 // 7, 127 // 15, 127)
    assert [len(table) for table in features.tables] == [16, 34, 150, 100]
    assert [table.shape[1] for table in features.tables] == [10, 5, 10, 3]
    codes = numpy.rint(x.double().numpy() / features.coding.scale)
    for node, degree in enumerate(degrees.tolist()):
        bits = widths[max(least for least in widths if least <= degree)]
        step, largest = 127 // (2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1
        exact = x[node].double().numpy() / features.coding.scale / step
        codes[node] = numpy.clip(numpy.rint(exact), -largest, largest) * step
    batch = pack(edges_of(300, 50), torch.arange(299, -1, -3), features=features).unpack()
    found = batch.x.double().numpy() / features.coding.scale
    numpy.testing.assert_allclose(found, codes[::-3], atol=1e-4)


def edges_of(nodes: int, edges: int) -> Adjacency:
    generator = torch.Generator().manual_seed(nodes)
    return Adjacency.from_edges(torch.randint(nodes, (2, edges), generator=generator), nodes)


def pack(adjacency, nodes, features=None, **tensors) -> PackedBatch:
    return PackedBatch.of(adjacency, nodes, features, tensors, {"classes": 3})


def test_a_group_may_be_empty():
    x = drawn(40, 3)
    features = Features.of(x, torch.zeros(40, dtype=torch.int32), {0: 8, 1: 3, 9: 5})
    batch = pack(edges_of(40, 9), torch.arange(40), features).unpack()
    plain = Features.of(x, torch.zeros(40, dtype=torch.int32), {0: 8})
    assert torch.equal(batch.x, plain.coding.unpack(0, plain.tables[0]))


@pytest.mark.parametrize("nodes", [50, SHORT, SHORT + 1])
def test_a_batch_is_one_block_of_few_bytes(nodes):
    adjacency, x = edges_of(nodes + 5, 4 * nodes), drawn(nodes + 5, 16)
    features = Features.of(x, adjacency.degrees, {0: 4})
    y, mask = torch.arange(nodes + 5), x[:, 0] > 0
    chosen = torch.arange(nodes).flip(0)
    packed = pack(adjacency, chosen, features, y=y, train_mask=mask)
    assert packed.buffer.is_contiguous() and packed.buffer.dtype == torch.uint8
    edges, index = adjacency.subgraph(chosen).edges, 2 if nodes <= SHORT else 4
    least = 4 * (nodes + 1) + index * edges + 4 * nodes + 8 * nodes + (8 + 1) * nodes
    assert least <= packed.nbytes < least + 6 * 16
    batch = packed.unpack()
    assert torch.equal(batch.n_id, chosen)
    assert torch.equal(batch.y, y[chosen]) and torch.equal(batch.train_mask, mask[chosen])
    assert batch.classes == 3 and batch.num_nodes == nodes
    parts = (batch.adj_t.values(), batch.adj_t.col_indices(), batch.adj_t.crow_indices())
    assert {part.dtype for part in parts[1:]} == {torch.int32}
    ones = numpy.ones(adjacency.edges, dtype=numpy.float32)
    whole = sparse.csr_matrix((ones, adjacency.indices.numpy(), adjacency.indptr.numpy()))
    found = sparse.csr_matrix(tuple(part.numpy() for part in parts), (nodes, nodes))
    assert (found != whole[chosen.numpy()][:, chosen.numpy()]).nnz == 0


def test_floats_keep_their_type_and_shape():
    tensors = {
        "x": drawn(30, 7).bfloat16(),
        "z": drawn(30, 2, 3).double(),
        "k": torch.arange(30, dtype=torch.uint8),
        "t": drawn(7, 30).t(),
    }
    nodes = torch.tensor([4, 29, 0])
    batch = pack(edges_of(30, 60), nodes, **tensors).unpack()
    for name, tensor in tensors.items():
        assert batch[name].dtype == tensor.dtype and torch.equal(batch[name], tensor[nodes])


def test_a_batch_without_nodes_or_edges():
    batch = pack(edges_of(30, 60), torch.arange(0), x=drawn(30, 2)).unpack()
    assert batch.x.shape == (0, 2) and batch.adj_t.shape == (0, 0)


def test_a_block_goes_to_a_device_whole():
    features = Features.of(drawn(30, 9), torch.zeros(30, dtype=torch.int32), {0: 3})
    packed = pack(edges_of(30, 60), torch.arange(30), features)
    assert packed.to("meta").buffer.device.type == "meta"
    assert packed.to("cpu").buffer is packed.buffer


@pytest.mark.gpu
def test_a_block_is_unpacked_on_a_gpu():
    widths = {0: 8, 2: 3}
    adjacency, x = edges_of(300, 600), drawn(300, 9)
    features = Features.of(x, adjacency.degrees, widths)
    packed = PackedBatch.of(adjacency, torch.arange(300), features, {"y": x[:, 0]}, {}, True)
    assert packed.buffer.is_pinned()
    found, expected = packed.to("cuda").unpack(), packed.unpack()
    assert found.x.is_cuda and torch.equal(found.x.cpu(), expected.x)
    assert torch.equal(found.y.cpu(), expected.y)
    assert torch.equal(found.adj_t.to_dense().cpu(), expected.adj_t.to_dense())
