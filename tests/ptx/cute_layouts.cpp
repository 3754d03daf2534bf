// Prints the layouts that CuTe gives to the instructions of lsq's kernels: layouts.json.
//
// CuTe is a part of CUTLASS (PyPI: nvidia-cutlass 4.2.0.0, in cutlass_library/source/include) and
// needs CUDA's headers; only host code is compiled:
//
//     g++ -std=c++17 -I CUTLASS/include -I CUDA/include -I CUDA/include/cccl \
//         tests/ptx/cute_layouts.cpp -o cute_layouts
//     ./cute_layouts | grep -v ERROR > tests/ptx/layouts.json
//
// Layouts are "shape:stride" of (lane, value) -> row + rows * column, for A [m, k], B [n, k] and C
// [m, n]; of a matrix load in bits, where a row of 8 two-byte values has 128.
#include <cute/tensor.hpp>  // before the others
//
#include <cstdio>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm120_sparse.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>

using namespace cute;

static const char* comma = "";

template <class Layout>
static void layout_of(const char* instruction, const char* operand, Layout of) {
    std::printf("%s\n  \"%s %s\": \"", comma, instruction, operand);
    print(of);
    std::printf("\"");
    comma = ",";
}

template <class Operation>
static void product_of(const char* instruction) {
    using Traits = MMA_Traits<Operation>;
    layout_of(instruction, "A", typename Traits::ALayout{});
    layout_of(instruction, "B", typename Traits::BLayout{});
    layout_of(instruction, "C", typename Traits::CLayout{});
}

template <class Operation>
static void sums_of(const char* instruction) {
    layout_of(instruction, "C", typename MMA_Traits<Operation>::CLayout{});
}

template <class Operation>
static void load_of(const char* instruction) {
    layout_of(instruction, "source", typename Copy_Traits<Operation>::SrcLayout{});
    layout_of(instruction, "destination", typename Copy_Traits<Operation>::DstLayout{});
}

// Places of the 16-byte chunks of eight rows, row after row.
template <class Atom>
static void chunks_of(int layout_type, Atom atom) {
    const auto rows = tile_to_shape(atom, make_shape(_8{}, size<1>(atom)));
    std::printf("%s\n  \"wgmma chunks of layout_type %d\": [", comma, layout_type);
    for (int row = 0; row < 8; ++row)
        for (int byte = 0; byte < size<1>(atom); byte += 16)
            std::printf("%s%d", row + byte ? ", " : "", static_cast<int>(rows(row, byte)) / 16);
    std::printf("]");
}

// First bit and number of bits.
#define FIELD(name)                                                                                \
    {                                                                                              \
        GmmaDescriptor all(0);                                                                     \
        all.bitfield.name##_ = ~0;                                                                 \
        std::printf("%s\n  \"descriptor " #name "\": [%d, %d]", comma, __builtin_ctzll(all.desc_), \
                    __builtin_popcountll(all.desc_));                                              \
    }

int main() {
    alignas(1024) static int8_t memory[64 * 128];
    const auto tile = tile_to_shape(GMMA::Layout_K_SW128_Atom<int8_t>{}, Shape<_64, _128>{});
    const auto whole = make_tensor(make_smem_ptr(memory), tile);
    const auto tensor = local_tile(whole, Shape<_64, _32>{}, make_coord(0, 0));
    // The host has no shared addresses, as a line with ERROR says.
    const uint64_t found = SM90::GMMA::make_gmma_desc<SM90::GMMA::Major::K>(tensor).desc_;
    std::printf("{");
    product_of<SM80_16x8x32_S32S8S8S32_TN>("mma.m16n8k32.s8");
    product_of<SM80_16x8x16_F32BF16BF16F32_TN>("mma.m16n8k16.bf16");
    product_of<SM80_16x8x256_S32U1U1S32_TN_ANDPOPC>("mma.m16n8k256.b1");
    // Operands of 8 bits lie as those of mma.sp of int8.
    using Sparse = SM120::SPARSE::SM120_SPARSE_16x8x64_TN<float_e4m3_t, float_e4m3_t, float>;
    product_of<Sparse>("mma.sp.m16n8k64.s8");
    layout_of("mma.sp.m16n8k64.s8", "metadata", MMA_Traits<Sparse>::ELayout{});
    sums_of<SM90_64x64x32_S32S8S8_SS_TN>("wgmma.m64n64k32.s8");
    sums_of<SM90_64x128x32_S32S8S8_SS_TN>("wgmma.m64n128k32.s8");
    sums_of<SM90_64x256x32_S32S8S8_SS_TN>("wgmma.m64n256k32.s8");
    load_of<SM75_U32x1_LDSM_N>("ldmatrix.x1");
    load_of<SM75_U32x2_LDSM_N>("ldmatrix.x2");
    load_of<SM75_U32x4_LDSM_N>("ldmatrix.x4");
    load_of<SM75_U16x2_LDSM_T>("ldmatrix.x1.trans");
    load_of<SM75_U16x4_LDSM_T>("ldmatrix.x2.trans");
    load_of<SM75_U16x8_LDSM_T>("ldmatrix.x4.trans");
    chunks_of(static_cast<int>(SM90::GMMA::LayoutType::B64), GMMA::Layout_K_SW64_Atom<int8_t>{});
    chunks_of(static_cast<int>(SM90::GMMA::LayoutType::B128), GMMA::Layout_K_SW128_Atom<int8_t>{});
    FIELD(start_address)
    FIELD(leading_byte_offset)
    FIELD(stride_byte_offset)
    FIELD(base_offset)
    FIELD(layout_type)
    std::printf(",\n  \"descriptor of a [64, 128] int8 without its address\": %llu\n}\n",
                static_cast<unsigned long long>(found & ~0x3fffull));
}
