// Multiplies packed fields by VNNI, AMX or, on any processor, 16-bit products.
#include <utility>

#include "amx.h"
#include "fields.h"
#include "lanes.h"

namespace lsq {

namespace {

typedef uint8_t LaneBytes __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t Four __attribute__((may_alias, aligned(1)));  // codes

constexpr int64_t kParts = kTilePair / kLanes;  // vectors of 32 outputs
constexpr int64_t kHalf = kTileSide / kLanes;   // of a tile
constexpr int64_t kBytes = sizeof(LaneWords);
constexpr int64_t kVector = kCpuLayout.vector;
constexpr int64_t kAhead = 4096;  // bytes that fields are fetched ahead
// Sums that have registers beside the operands.
constexpr int kSums = kLanes == 16 ? 20 : 9;

constexpr int units_of(int bits) { return bits % 2 ? 8 : 4; }  // of a span
constexpr int64_t span_bytes(int bits) { return units_of(bits) * bits * kVector / 8; }
constexpr uint32_t everywhere(int byte) { return static_cast<uint32_t>(byte) * 0x01010101u; }

LaneBits bits_at(const uint8_t* from) {
    LaneBits bits;
    std::memcpy(&bits, from, kBytes);
    return bits;
}

LaneWords words_at(const void* from) {
    LaneWords words;
    std::memcpy(&words, from, kBytes);
    return words;
}

LaneWords four_of(const int8_t* codes) {
    return *reinterpret_cast<const Four*>(codes) + LaneWords{};
}

// Where the vector of outputs `part` begins, from the first tile's on.
int64_t place_of(const FieldColumns& b, int64_t part) {
    return part / kHalf * b.distance + part % kHalf * kBytes;
}

// Calls use(rows, row) for rows [row, count): MOST at a time, then all that are left.
template <int MOST, class Use>
void for_rows_by(int64_t row, int64_t count, const Use& use) {
    for (; row + MOST <= count; row += MOST) use(std::integral_constant<int, MOST>{}, row);
    if constexpr (MOST > 1) {
        if (row < count) for_rows_by<MOST - 1>(row, count, use);
    }
}

// Takes the sum of a group: products of what is stored, for the outputs of a part.
struct GroupEnd {
    const FieldRows& a;
    const FieldColumns& b;
    const FieldCode& code;

    LaneWords whole(LaneWords sum, int64_t row, int64_t g) const {
        return stepped(sum) - start(row, g);
    }

    // What products with the zero add to a sum.
    int32_t start(int64_t row, int64_t g) const { return code.zero * a.sums[row * b.groups + g]; }

    // Most steps are 1, and a product of words takes as long as several sums.
    LaneWords stepped(LaneWords sum) const {
        if (__builtin_expect(code.step != 1, 0)) sum *= code.step;
        return sum;
    }

    // total + scales * sum
    Lanes scaled(LaneWords sum, int64_t row, int64_t g, int64_t part, Lanes total) const {
        const float* scale = b.scale + part / kHalf * b.scales * kTileSide +
                             part % kHalf * kLanes + g * b.step;
        const float factor = a.scale[row * a.steps.row + g * a.steps.group];
        return multiply_add(__builtin_convertvector(whole(sum, row, g), Lanes),
                            factor * lanes_at(scale), total);
    }

    // Adds `rows` rows of sums of a group [rows, 32] without a zero to `out`.
    void add_scaled(const int32_t* sums, int64_t row, int64_t rows, int64_t g, void* out,
                    int64_t stride) const {
        Lanes scales[kParts];
        for (int64_t part = 0; part < kParts; ++part)
            scales[part] = lanes_at(b.scale + part / kHalf * b.scales * kTileSide +
                                    part % kHalf * kLanes + g * b.step);
        const float* factor = a.scale + row * a.steps.row + g * a.steps.group;
        float* to = static_cast<float*>(out) + row * stride;
        for (; rows; --rows, sums += kTilePair, to += stride, factor += a.steps.row) {
            const Lanes all = all_lanes(*factor);
#pragma GCC unroll 4
            for (int64_t part = 0; part < kParts; ++part) {
                Lanes total = {};
                if (g) std::memcpy(&total, to + part * kLanes, kBytes);
                total = multiply_add(
                    __builtin_convertvector(words_at(sums + part * kLanes), Lanes),
                    all * scales[part], total);
                std::memcpy(to + part * kLanes, &total, kBytes);
            }
        }
    }

    // Adds the sum to `out`; the first one replaces what is there.
    void add(LaneWords sum, int64_t row, int64_t g, int64_t part, bool is_first, void* out,
             int64_t stride) const {
        void* to = static_cast<char*>(out) + 4 * (row * stride + part * kLanes);
        if (b.scale) {
            Lanes total = {};
            if (!is_first) std::memcpy(&total, to, kBytes);
            total = scaled(sum, row, g, part, total);
            std::memcpy(to, &total, kBytes);
        } else {
            LaneWords words = is_first ? whole(sum, row, 0) : words_at(to) + stepped(sum);
            std::memcpy(to, &words, kBytes);
        }
    }
};

// Products of one row and a unit.
#if defined(__AVX2__)
struct VnniSum {
    static constexpr int64_t kUnit = 4;  // bytes of x
    LaneWords sum = {};
    void add(LaneBits bytes, const int8_t* four) { add_products(sum, bytes, four_of(four)); }
};
#endif

// x as half-words: codes 0 and 2 of a unit, then codes 1 and 3.
struct PlainSum {
    static constexpr int64_t kUnit = 8;
    LaneWords sum = {};
    void add(LaneBits bytes, const int8_t* unit) {
        sum += multiply_halves((LaneShorts)(bytes & 0x00FF00FFu), (LaneShorts)four_of(unit));
        sum += multiply_halves((LaneShorts)(bytes >> 8 & 0x00FF00FFu),
                               (LaneShorts)four_of(unit + 4));
    }
};

// Unpacking

// Codes with the fields of WIDTH bits of a unit, which are their bits from LOW on.
template <int WIDTH, int LOW>
LaneBits with_field(LaneBits codes, const uint8_t* vectors, int unit) {
    constexpr int kPlaces = 8 / WIDTH;
    const LaneBits bits = bits_at(vectors + unit / kPlaces * kVector);
    const int shift = unit % kPlaces * WIDTH - LOW;
    const LaneBits moved = shift > 0 ? bits >> shift : bits << -shift;
    const LaneBits mask = everywhere(((1 << WIDTH) - 1) << LOW) + LaneBits{};
#if defined(__AVX512F__)
    return (LaneBits)_mm512_ternarylogic_epi32((__m512i)moved, (__m512i)mask, (__m512i)codes, 0xEA);
#else
    return codes | (moved & mask);
#endif
}

// The codes of a unit of a span.
template <int BITS>
LaneBits codes_of(const uint8_t* span, int unit) {
    if constexpr (BITS == 8) return bits_at(span + unit * kVector);
    constexpr int kUnits = units_of(BITS);
    LaneBits codes = {};
    const auto behind = [&](int bits) { return span + bits * kUnits * kVector / 8; };
    if constexpr (BITS & 4) codes = with_field<4, 0>(codes, span, unit);
    if constexpr (BITS & 2) codes = with_field<2, (BITS & 4)>(codes, behind(BITS & 4), unit);
    if constexpr (BITS & 1) codes = with_field<1, (BITS & 6)>(codes, behind(BITS & 6), unit);
    return codes;
}

// What stands for codes of at most 4 bits: TABLES bytes of each.
template <int TABLES>
class Table {
public:
    explicit Table(const uint8_t* table) {
        for (int i = 0; i < TABLES; ++i) {
            for (int64_t lane = 0; lane < kBytes; lane += 16)
                std::memcpy(reinterpret_cast<uint8_t*>(&tables_[i]) + lane, table + 16 * i, 16);
        }
    }

    LaneBits operator()(int i, LaneBits codes) const {
#if defined(__AVX512F__)
        return (LaneBits)_mm512_shuffle_epi8((__m512i)tables_[i], (__m512i)codes);
#elif defined(__AVX2__)
        return (LaneBits)_mm256_shuffle_epi8((__m256i)tables_[i], (__m256i)codes);
#else
        const LaneBytes from = (LaneBytes)tables_[i], index = (LaneBytes)codes;
        LaneBytes found;
        for (int64_t lane = 0; lane < kBytes; ++lane) found[lane] = from[index[lane]];
        return (LaneBits)found;
#endif
    }

private:
    LaneBits tables_[TABLES];
};

// Codes themselves.
template <>
class Table<0> {
public:
    explicit Table(const uint8_t*) {}
    LaneBits operator()(int, LaneBits codes) const { return codes; }
};

constexpr int factors_of(int tables) { return tables == 2 ? 2 : 1; }  // bytes that are multiplied

// ROWS rows by unpacked codes, in registers.
template <class Sum, int BITS, int TABLES, int ROWS>
void multiply_unpacked(const FieldRows& a, const FieldColumns& b, const FieldCode& code,
                       int64_t row, void* out, int64_t stride) {
    constexpr int kUnits = units_of(BITS), kFactors = factors_of(TABLES);
    const Table<TABLES> table(code.table);
    const GroupEnd end{a, b, code};
    for (int64_t part = 0; part < kParts; ++part) {
        const uint8_t* span = b.data + place_of(b, part);
        const int8_t* x = a.data + row * a.stride;
        Lanes total[ROWS] = {};
        for (int64_t g = 0, k = 0; g < b.groups; ++g) {
            const int64_t past = std::min(k + b.group, b.depth);
            Sum sums[ROWS][kFactors];
            for (; k < past; k += 4 * kUnits, span += span_bytes(BITS)) {
#pragma GCC unroll 8
                for (int unit = 0; unit < kUnits; ++unit) {
                    const LaneBits codes = codes_of<BITS>(span, unit);
#pragma GCC unroll 2
                    for (int i = 0; i < kFactors; ++i) {
                        const LaneBits bytes = table(i, codes);
#pragma GCC unroll 4
                        for (int r = 0; r < ROWS; ++r)
                            sums[r][i].add(bytes, x + r * a.stride + Sum::kUnit * unit);
                    }
                }
                x += Sum::kUnit * kUnits;
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                LaneWords sum = sums[r][0].sum;
                if constexpr (kFactors == 2) sum += sums[r][1].sum << 8;
                if (b.scale) {
                    total[r] = end.scaled(sum, row + r, g, part, total[r]);
                } else {
                    total[r] = (Lanes)end.whole(sum, row + r, g);
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            std::memcpy(static_cast<char*>(out) + 4 * ((row + r) * stride + part * kLanes),
                        &total[r], kBytes);
        }
    }
}

// All rows, at most MOST at a time.
template <class Sum, int BITS, int TABLES, int MOST>
void all_unpacked(const FieldRows& a, const FieldColumns& b, const FieldCode& code, FieldMemory&,
                  void* out, int64_t stride) {
    for_rows_by<MOST>(0, a.count, [&](auto rows, int64_t row) {
        multiply_unpacked<Sum, BITS, TABLES, rows>(a, b, code, row, out, stride);
    });
}

#if defined(__AVX2__)

// Fields where they stand

// Adds the products of fields of WIDTH bits, times 2^LOW, over `spans` spans.
template <int WIDTH, int LOW, int BITS, int ROWS, int PARTS>
inline __attribute__((always_inline)) void add_fields(const uint8_t* const (&parts)[PARTS],
                                                      const int8_t* x, int64_t stride,
                                                      int64_t spans,
                                                      LaneWords (&sums)[ROWS][PARTS]) {
    constexpr int kUnits = units_of(BITS), kPlaces = 8 / WIDTH, kVectors = kUnits / kPlaces;
    LaneWords found[kPlaces][ROWS][PARTS] = {};
    int64_t at = LOW * kUnits * kVector / 8;  // wider fields come first
    for (; spans; --spans, at += span_bytes(BITS), x += 4 * kUnits) {
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector) {
            LaneBits bits[PARTS];
#pragma GCC unroll 2
            for (int p = 0; p < PARTS; ++p) {
                const uint8_t* from = parts[p] + at + vector * kVector;
                bits[p] = bits_at(from);
                __builtin_prefetch(from + kAhead, 0, 2);
            }
#pragma GCC unroll 8
            for (int place = 0; place < kPlaces; ++place) {
                constexpr int kMask = (1 << WIDTH) - 1;
                const int8_t* four = x + 4 * (vector * kPlaces + place);
#pragma GCC unroll 2
                for (int p = 0; p < PARTS; ++p) {
                    const LaneBits field =
                        WIDTH == 8 ? bits[p] : bits[p] & everywhere(kMask << WIDTH * place);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r)
                        add_products(found[place][r][p], field, four_of(four + r * stride));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int place = 0; place < kPlaces; ++place) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
            for (int p = 0; p < PARTS; ++p)
                sums[r][p] += found[place][r][p] >> WIDTH * place << LOW;
        }
    }
}

constexpr int places_of(int bits) {
    return bits % 2 ? 8 : bits & 2 ? 4 : bits & 4 ? 2 : 1;
}
constexpr int rows_of(int bits) { return std::min(4, kSums / places_of(bits)); }
constexpr int parts_of(int bits, int rows) { return places_of(bits) * rows * 2 <= kSums ? 2 : 1; }

template <int BITS, int ROWS>
void multiply_fields(const FieldRows& a, const FieldColumns& b, const FieldCode& code,
                     int64_t row, void* out, int64_t stride) {
    constexpr int kTogether = parts_of(BITS, ROWS);
    const GroupEnd end{a, b, code};
    for (int64_t part = 0; part < kParts; part += kTogether) {
        const uint8_t* parts[kTogether];
        for (int p = 0; p < kTogether; ++p) parts[p] = b.data + place_of(b, part + p);
        const int8_t* x = a.data + row * a.stride;
        Lanes total[ROWS][kTogether] = {};
        for (int64_t g = 0; g < b.groups; ++g) {
            const int64_t inputs = std::min(b.group, b.depth - g * b.group),
                          spans = inputs / (4 * units_of(BITS));
            LaneWords sums[ROWS][kTogether] = {};
            if constexpr (BITS & 8) add_fields<8, 0, BITS>(parts, x, a.stride, spans, sums);
            if constexpr (BITS & 4) add_fields<4, 0, BITS>(parts, x, a.stride, spans, sums);
            if constexpr (BITS & 2)
                add_fields<2, (BITS & 4), BITS>(parts, x, a.stride, spans, sums);
            if constexpr (BITS & 1)
                add_fields<1, (BITS & 6), BITS>(parts, x, a.stride, spans, sums);
#pragma GCC unroll 2
            for (int p = 0; p < kTogether; ++p) {
                parts[p] += spans * span_bytes(BITS);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    if (b.scale) {
                        total[r][p] = end.scaled(sums[r][p], row + r, g, part + p, total[r][p]);
                    } else {
                        total[r][p] = (Lanes)end.whole(sums[r][p], row + r, g);
                    }
                }
            }
            x += inputs;
        }
        for (int r = 0; r < ROWS; ++r) {
            std::memcpy(static_cast<char*>(out) + 4 * ((row + r) * stride + part * kLanes),
                        total[r], sizeof total[r]);
        }
    }
}

// All rows, as many at a time as registers take.
template <int BITS>
void all_fields(const FieldRows& a, const FieldColumns& b, const FieldCode& code, FieldMemory&,
                void* out, int64_t stride) {
    for_rows_by<rows_of(BITS)>(0, a.count, [&](auto rows, int64_t row) {
        multiply_fields<BITS, rows>(a, b, code, row, out, stride);
    });
}

// Many rows by unpacked tiles

constexpr int64_t kDeep = 512;  // inputs whose tiles stay in the first cache

// Unpacks `count` inputs of two tiles from `first` on: units [64] of the first tile, `distance`
// bytes on those of the second, then those of the second factor. `zero` is taken off each byte.
template <int BITS, int TABLES>
void unpack(const FieldColumns& b, const Table<TABLES>& table, int64_t first, int64_t count,
            uint8_t* to, int64_t distance, uint8_t zero = 0) {
    const LaneBytes zeros = zero - LaneBytes{};
    constexpr int kUnits = units_of(BITS), kFactors = factors_of(TABLES);
    for (int64_t part = 0; part < kParts; ++part) {
        const uint8_t* span =
            b.data + place_of(b, part) + first / (4 * kUnits) * span_bytes(BITS);
        uint8_t* unpacked = to + part / kHalf * distance + part % kHalf * kBytes;
        for (int64_t k = 0; k < count; k += 4 * kUnits, span += span_bytes(BITS)) {
            __builtin_prefetch(span + kAhead, 0, 2);
#pragma GCC unroll 8
            for (int unit = 0; unit < kUnits; ++unit, unpacked += kVector) {
                const LaneBits codes = codes_of<BITS>(span, unit);
#pragma GCC unroll 2
                for (int i = 0; i < kFactors; ++i) {
                    const LaneBytes bytes = (LaneBytes)table(i, codes) - zeros;
                    std::memcpy(unpacked + 2 * i * distance, &bytes, kBytes);
                }
            }
        }
    }
}

// Where a part of unpacked tiles begins, and how far the next part and the next factor are.
struct TilePart {
    const uint8_t* data;
    int64_t right, factor;
};

// The sum of ROWS rows by `count` inputs of two parts.
template <int FACTORS, int ROWS>
inline __attribute__((always_inline)) void sum_tiles(const TilePart& part, const int8_t* x,
                                                     int64_t stride, int64_t count,
                                                     LaneWords (&sums)[ROWS][2]) {
    LaneWords found[ROWS][2][FACTORS] = {};
    const uint8_t* from = part.data;
    for (int64_t k = 0; k < count; k += 4, from += kVector) {
#pragma GCC unroll 2
        for (int i = 0; i < FACTORS; ++i) {
            const LaneBits left = bits_at(from + i * part.factor),
                           right = bits_at(from + i * part.factor + part.right);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const LaneWords factor = four_of(x + r * stride + k);
                add_products(found[r][0][i], left, factor);
                add_products(found[r][1][i], right, factor);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
            sums[r][p] = found[r][p][0];
            if constexpr (FACTORS == 2) sums[r][p] += found[r][p][1] << 8;
        }
    }
}

// ROWS rows by unpacked tiles of inputs [first, first + count), whole groups if SCALED.
template <bool SCALED, int FACTORS, int ROWS>
void multiply_tiles(const FieldRows& a, const FieldColumns& b, const FieldCode& code,
                    const uint8_t* tiles, int64_t distance, int64_t first, int64_t count,
                    int64_t row, void* out, int64_t stride) {
    const GroupEnd end{a, b, code};
    for (int64_t part = 0; part < kParts; part += 2) {
        TilePart from{tiles + part / kHalf * distance + part % kHalf * kBytes,
                      kHalf == 1 ? distance : kBytes, 2 * distance};
        const int8_t* x = a.data + row * a.stride + first;
        LaneWords sums[ROWS][2];
        if constexpr (!SCALED) {
            sum_tiles<FACTORS>(from, x, a.stride, count, sums);
            for (int r = 0; r < ROWS; ++r) {
                for (int p = 0; p < 2; ++p)
                    end.add(sums[r][p], row + r, 0, part + p, first == 0, out, stride);
            }
            continue;
        }
        char* to = static_cast<char*>(out) + 4 * (row * stride + part * kLanes);
        Lanes total[ROWS][2] = {};
        for (int r = 0; r < ROWS && first; ++r)
            std::memcpy(total[r], to + 4 * r * stride, sizeof total[r]);
        for (int64_t k = 0, g = first / b.group; k < count; k += b.group, ++g) {
            const int64_t inputs = std::min(b.group, count - k);
            sum_tiles<FACTORS>(from, x + k, a.stride, inputs, sums);
            from.data += inputs / 4 * kVector;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
                for (int p = 0; p < 2; ++p)
                    total[r][p] = end.scaled(sums[r][p], row + r, g, part + p, total[r][p]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            std::memcpy(to + 4 * r * stride, total[r], sizeof total[r]);
    }
}

// Rows whose sums have registers.
template <bool SCALED, int FACTORS>
constexpr int kTileRows = (kLanes == 16 ? SCALED ? 6 : 8 : SCALED ? 3 : 4) / FACTORS;

template <bool SCALED, int BITS, int TABLES>
void many_vnni(const FieldRows& a, const FieldColumns& b, const FieldCode& code,
               FieldMemory& memory, void* out, int64_t stride) {
    constexpr int kFactors = factors_of(TABLES), kRows = kTileRows<SCALED, kFactors>;
    const Table<TABLES> table(code.table);
    const int64_t step = SCALED ? std::max<int64_t>(1, kDeep / kFactors / b.group) * b.group
                                 : kDeep / kFactors;
    const int64_t distance = std::min(step, b.depth) * kTileSide;
    uint8_t* tiles = memory.tiles.at_least(2 * kFactors * distance);
    for (int64_t first = 0; first < b.depth; first += step) {
        const int64_t count = std::min(step, b.depth - first);
        unpack<BITS>(b, table, first, count, tiles, distance);
        for_rows_by<kRows>(0, a.count, [&](auto rows, int64_t row) {
            multiply_tiles<SCALED, kFactors, rows>(a, b, code, tiles, distance, first, count, row,
                                                   out, stride);
        });
    }
}

#endif
#if defined(LSQ_AMX)

// Whether whole numbers less the zero are bytes of tdpbssd, so that no sum of x is taken off.
bool fits_signed_bytes(const FieldCode& code) {
    int most = (1 << code.bits) - 1, least = 0;
    if (code.words || code.step != 1) return false;
    if (code.table) {
        most = *std::max_element(code.table, code.table + most + 1);
        least = *std::min_element(code.table, code.table + (1 << code.bits));
    }
    return least - code.zero >= -128 && most - code.zero <= 127;
}

// Inputs of a tile: as many as divide a group.
int64_t inputs_of_tile(const FieldColumns& b) {
    for (int64_t inputs = kTileInner; b.scale && inputs > kTileSide; inputs -= kTileSide) {
        if (b.group % inputs == 0) return inputs;
    }
    return b.scale ? kTileSide : kTileInner;
}

// x has whole tiles of inputs and rows, and may be read 64 bytes beyond a row. A tile holds as many
// inputs as divide a group, and zeros. For the first rows the tiles of the next inputs are unpacked
// while these are multiplied.
template <int BITS, int TABLES>
void many_amx(const FieldRows& a, const FieldColumns& b, const FieldCode& code,
              FieldMemory& memory, void* out, int64_t stride) {
    constexpr int kFactors = factors_of(TABLES);
    constexpr int64_t kBlock = 2 * kFactors * kTileBytes;
    alignas(64) int32_t found[kFactors][kTilePair][kTilePair];
    const Table<TABLES> table(code.table);
    const bool is_signed = fits_signed_bytes(code);
    const uint8_t zero = is_signed ? code.zero : 0;
    FieldCode rest = code;
    if (is_signed) rest.zero = 0;
    const GroupEnd end{a, b, rest};
    const int64_t inputs = inputs_of_tile(b);
    const int64_t depth = (b.depth + inputs - 1) / inputs,
                  of_group = b.scale ? b.group / inputs : depth;
    // Tiles that are read again, and the one that is unpacked meanwhile.
    const int64_t kept = a.count > kTilePair ? depth : kFactors == 2 ? of_group : 1;
    const int64_t ring = std::min(depth, kept + 1);
    uint8_t* blocks = memory.tiles.at_least(ring * kBlock);
    const auto block = [&](int64_t k) { return blocks + k % ring * kBlock; };
    const auto unpack_block = [&](int64_t k) {
        if (k >= depth) return;
        const int64_t first = k * inputs, count = std::min(inputs, b.depth - first);
        unpack<BITS>(b, table, first, count, block(k), kTileBytes, zero);
        for (int64_t tile = 0; tile < 2 * kFactors && count < kTileInner; ++tile)
            std::memset(block(k) + tile * kTileBytes + count * kTileSide, 0,
                        (kTileInner - count) * kTileSide);
    };
    unpack_block(0);
    for (int64_t row = 0; row < a.count; row += kTilePair) {
        const int64_t rows = std::min(kTilePair, a.count - row);
        const bool both = rows > kTileSide;
        for (int64_t k = 0, g = 0; k < depth; ++g) {
            const int64_t past = std::min(k + of_group, depth);
            const auto multiply = [&](auto factor, int64_t at) {
                const int8_t* upper = a.data + row * a.stride + at * inputs;
                const uint8_t* left = block(at) + 2 * factor * kTileBytes;
                load_tile<4>(upper, a.stride);
                load_tile<6>(left, kTileInner);
                load_tile<7>(left + kTileBytes, kTileInner);
                if (both) load_tile<5>(upper + kTileSide * a.stride, a.stride);
                if (is_signed) {
                    multiply_int8<0, 4, 6>(), multiply_int8<1, 4, 7>();
                    if (both) multiply_int8<2, 5, 6>(), multiply_int8<3, 5, 7>();
                } else {
                    multiply_by_unsigned_int8<0, 4, 6>(), multiply_by_unsigned_int8<1, 4, 7>();
                    if (both)
                        multiply_by_unsigned_int8<2, 5, 6>(), multiply_by_unsigned_int8<3, 5, 7>();
                }
            };
            zero_sums();
            for (int64_t at = k; at < past; ++at) {
                if (row == 0) unpack_block(at + 1);
                multiply(std::integral_constant<int, 0>{}, at);
            }
            store_sums(found[0], sizeof found[0][0], both);
            if constexpr (kFactors == 2) {
                zero_sums();
                for (int64_t at = k; at < past; ++at)
                    multiply(std::integral_constant<int, 1>{}, at);
                store_sums(found[1], sizeof found[1][0], both);
            }
            if (b.scale && is_signed) {
                end.add_scaled(found[0][0], row, rows, g, out, stride);
                k = past;
                continue;
            }
            for (int64_t r = 0; r < rows; ++r) {
                for (int64_t part = 0; part < kParts; ++part) {
                    LaneWords sum = words_at(found[0][r] + part * kLanes);
                    if constexpr (kFactors == 2)
                        sum += words_at(found[1][r] + part * kLanes) << 8;
                    end.add(sum, row + r, g, part, g == 0, out, stride);
                }
            }
            k = past;
        }
    }
}

#endif

// The kernel of KIND<bits, tables>.
template <template <int, int> class KIND>
FieldKernel of_code(const FieldCode& code) {
    static constexpr FieldKernel kernels[3][8] = {
        {KIND<1, 0>::run, KIND<2, 0>::run, KIND<3, 0>::run, KIND<4, 0>::run, KIND<5, 0>::run,
         KIND<6, 0>::run, KIND<7, 0>::run, KIND<8, 0>::run},
        {KIND<1, 1>::run, KIND<2, 1>::run, KIND<3, 1>::run, KIND<4, 1>::run},
        {KIND<1, 2>::run, KIND<2, 2>::run, KIND<3, 2>::run, KIND<4, 2>::run}};
    return kernels[!code.table ? 0 : code.words ? 2 : 1][code.bits - 1];
}

template <int BITS, int TABLES>
struct Plain {
    static constexpr FieldKernel run = all_unpacked<PlainSum, BITS, TABLES, 4>;
};
#if defined(__AVX2__)
template <int BITS, int TABLES>
struct Few {
    static constexpr FieldKernel run = all_unpacked<VnniSum, BITS, TABLES, 4>;
};
template <int BITS>
struct Few<BITS, 0> {
    static constexpr FieldKernel run = all_fields<BITS>;
};
template <int BITS, int TABLES>
struct Many {
    static void run(const FieldRows& a, const FieldColumns& b, const FieldCode& code,
                    FieldMemory& memory, void* out, int64_t stride) {
        (b.scale ? many_vnni<true, BITS, TABLES> : many_vnni<false, BITS, TABLES>)(
            a, b, code, memory, out, stride);
    }
};
#endif
#if defined(LSQ_AMX)
template <int BITS, int TABLES>
struct ManyAmx {
    static constexpr FieldKernel run = many_amx<BITS, TABLES>;
};
#endif

// Rows up to which registers are faster; `group`: inputs that share a scale, 0 for all. AMX takes a
// tile for each group, however small.
int64_t few_rows(const FieldCode& code, int64_t group, bool amx) {
    if (code.registers >= 0) return code.registers;
    const bool several = !code.table && code.bits & (code.bits - 1);  // fields of a code
    if (kLanes < 16) return several ? 1 : 4;
    if (several) return amx ? 2 : 3;
    if (amx) return group ? group < kTileInner ? 12 : 5 : code.table ? 2 : 4;
    return code.words ? 12 : code.table && !group ? 4 : 8;
}

}  // namespace

FieldChoice field_kernel(const FieldCode& code, [[maybe_unused]] Instructions instructions,
                         [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t group) {
#if defined(LSQ_AMX)
    const bool suits = group % kTilePair == 0;  // smaller groups leave most of a tile empty
    if (instructions == Instructions::amx && suits && rows > few_rows(code, group, true))
        return {of_code<ManyAmx>(code), true, false};
#endif
#if defined(__AVX2__)
    constexpr Instructions kVnni =
        kHalf == 1 ? Instructions::avx512_vnni : Instructions::avx_vnni;
    if (instructions != Instructions::plain && usable(kVnni))
        return {rows <= few_rows(code, group, false) ? of_code<Few>(code) : of_code<Many>(code),
                false, false};
#endif
    return {of_code<Plain>(code), false, true};
}

}  // namespace lsq
