"""The algorithms of cuBLASLt for a product: those that the library proposes, or all that it can run.

An algorithm is an id with a tile, stages, parts of K that are added up, and more (lsq.csrc.products.CONFIGURATION).
The library says what each can do, and whether it runs the product at hand (AlgoCheck, which takes microseconds).
"""

import itertools
import random
from collections.abc import Iterator

import torch

from lsq.csrc.products import MatrixProduct, ProductError, ProductLibrary
from lsq.gemm.configuration import DECODED, CublasConfiguration
from lsq.gemm.cublaslt import Algorithm, Products
from lsq.gemm.product_spec import ProductSpec

SPLITS = (2, 3, 4, 6, 8, 12, 16, 32)
"""Numbers of parts of K that are tried."""
SCHEMES = {torch.int32: (1, 2, 4)}
"""Ways to add up the parts, by the dtype of the result: in place, in the type of the sums, in that of the result.
Parts of floats, or of what is rounded afterwards, are added up in the type of the sums alone, in a fixed order."""
CLUSTERS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12)
"""cublasLtClusterShape_t beside 0, automatic: from 1 x 1 to 8 blocks."""
OPERAND_ALIGNMENT = 16
MOST_CHECKED = 50_000


def configuration_of(algorithm: Algorithm) -> CublasConfiguration:
    """The same, as files hold it."""
    decoded = {name: getattr(algorithm, name) for name in DECODED}
    return CublasConfiguration(algorithm=algorithm.data, workspace_bytes=algorithm.workspace_bytes, **decoded)


def proposed(products: Products, spec: ProductSpec) -> list[CublasConfiguration]:
    """What the library proposes, best first.

    Raises:
        RuntimeError: it has nothing for this product.
    """
    found = [configuration_of(algorithm) for algorithm in products.candidates(spec)]
    if not found:
        raise RuntimeError(f"cuBLASLt has no algorithm for {spec} within {products.workspace_bytes} bytes of workspace")
    return found


def all_algorithms(products: Products, spec: ProductSpec) -> list[CublasConfiguration]:
    """What the library proposes, then everything else that runs within the workspace, in random order.

    Of split K, swizzling, custom options and clusters one at a time differs from what an algorithm starts with: all
    together would be millions. The order is always the same, and random so that a search may be cut short anywhere.

    Raises:
        RuntimeError: as `proposed`.
    """
    first = proposed(products, spec)
    seen = {each.algorithm for each in first}
    more = []
    native = products.describe(spec)
    try:
        data = [each for each in _all_data(products.library, native, spec) if each not in seen]
        random.Random(0).shuffle(data)
        for each in data[:MOST_CHECKED]:
            try:
                checked = native.check(each)
            except ProductError:
                continue
            if each not in seen and checked.workspace_bytes <= products.workspace_bytes:
                seen.add(each)
                more.append(configuration_of(products.algorithm(checked)))
    finally:
        native.close()
    return first + more


def _all_data(library: ProductLibrary, native: MatrixProduct, spec: ProductSpec) -> Iterator[bytes]:
    for algorithm_id in native.algorithm_ids():
        try:
            fresh = native.start(algorithm_id)
            can = library.capabilities(fresh)
        except ProductError:  # an id that exists, but not for this product
            continue
        if max(can["alignment_a"], can["alignment_b"], can["alignment_d"]) > OPERAND_ALIGNMENT:
            continue
        for tile, stages in itertools.product(can["tiles"] or [0], can["stages"] or [0]):
            for changes in _variants(can, spec):
                try:
                    yield library.configure(fresh, tile=tile, stages=stages, **changes)
                except ProductError:  # a value that this algorithm does not take
                    continue


def _variants(can: dict, spec: ProductSpec) -> Iterator[dict[str, int]]:
    yield {}
    if can["split_k"]:
        allowed = [scheme for scheme in SCHEMES.get(spec.out_dtype, (2,)) if can["reduction_schemes"] & scheme]
        for parts, scheme in itertools.product(SPLITS, allowed):
            yield {"split_k": parts, "reduction_scheme": scheme}
    if can["swizzle"]:
        yield {"swizzle": 1}
    for option in range(1, can["custom_option_max"] + 1):
        yield {"custom_option": option}
    for cluster in CLUSTERS:
        yield {"cluster_shape": cluster}
