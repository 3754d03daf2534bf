// Product of codes with a weight and its epilogue in one kernel: M rows, N columns, K values, N and
// K multiples of 16. -DINT4=1: the weight has the format Int4; -DFIELD_BITS: the format Fields.
#include "product_rows.cuh"
#include "project_epilogue.cuh"

#if INT4
#include "product_int4.cuh"
using Columns = Int4Columns;
#elif FIELD_BITS
#include "product_fields.cuh"
using Columns = FieldColumns;
#else
using Columns = TileCopy<kCopyThreads, TILE_N>;
#endif

LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_project_product(const Project op, int64_t inner, Out<uint32_t> ticket) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const ProjectEnd end{op};
    Magnitude largest = 0;
    const auto rows_of = [&](Tile tile) {
        return TileCopy<kCopyThreads, TILE_M>(op.x.coded.codes, tile.row(), op.rows, inner);
    };
    const auto columns_of = [&](Tile tile) {
        return Columns(op.weight.codes, tile.column(), op.columns, inner);
    };
    const auto end_tile = [&](Tile tile, Sums& sums, unsigned char* shared) {
#if FIELD_BITS
        Columns::finish(sums);
#endif
        const int64_t column = sums_column(tile);
        float added[kVector] = {}, factor[kVector] = {};
        if (column < op.columns) {
            end.bias8(column, added);
            factor8(op, column, factor);
        }
        for_sums(tile, sums, shared, [&](int64_t row, const int32_t (&sum)[kVector]) {
            if (row >= op.rows || column >= op.columns) return;
            float y[kVector];
            scale_sums8(sum, factor, row_scale(op.x.coded, row) * row_factor(op, row), y);
            largest = Largest::join(largest, end.write8(row * op.columns + column, added, y));
        });
    };
    for_tiles(op.rows, op.columns, inner, stages, rows_of, columns_of, end_tile);
    end.codes.finish<kProductThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_project_product)
