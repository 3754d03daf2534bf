// Attention's forward pass on codes, for processors that multiply bytes.
//
// Scores are exact sums of products of codes. A probability is an integer of 24 bits, whose three
// bytes are multiplied with the values' codes, exactly again: probabilities are off by up to 2^-24
// of the row's largest.
#pragma once

#include "attention_context.h"
#include "byte_products.h"

#ifdef LSQ_BYTES

namespace lsq {

// 2^23 exp(difference * factor) for differences up to 0, with a relative error of 2e-7 + 6e-8
// |difference * factor|; 2^23 e^-87 where they are below -87 / factor, NaN for a factor that is
// NaN. 2^(k / 32) * 2^r with |r| <= 1/64.
class IntegerExponential {
public:
    static constexpr float kOne = 8388608.0f;

    explicit IntegerExponential(float factor)
        : octaves_(_mm512_set1_ps(factor * 1.4426950408889634f)),
          least_(_mm512_set1_ps(-87.0f / factor)), low_(powers(0)), high_(powers(16)) {}

    __m512 operator()(__m512 difference) const {
        const __m512 magic = _mm512_set1_ps(393216.0f);  // 1.5 * 2^18: rounds to whole 32nds
        const __m512 bounded = _mm512_max_ps(least_, difference),
                     shifted = _mm512_fmadd_ps(bounded, octaves_, magic);
        const __m512 k = _mm512_sub_ps(shifted, magic), r = _mm512_fmsub_ps(bounded, octaves_, k);
        const __m512i index = _mm512_castps_si512(shifted);
        const __m512i fraction = _mm512_permutex2var_epi32(low_, index, high_);
        const __m512 whole =
            _mm512_castsi512_ps(_mm512_add_epi32(fraction, _mm512_slli_epi32(index, 18)));
        const __m512 slope =
            _mm512_fmadd_ps(r, _mm512_set1_ps(0.24022651f), _mm512_set1_ps(0.69315734f));
        return _mm512_fmadd_ps(whole, _mm512_mul_ps(r, slope), whole);
    }

private:
    // Bits of 2^(23 + i / 32) for i from `first` on, less the shifted index.
    static __m512i powers(int first) {
        alignas(64) uint32_t bits[16];
        for (int i = 0; i < 16; ++i) {
            const uint32_t number = first + i;
            bits[i] = bits_of(static_cast<float>(std::exp2(23.0 + number / 32.0))) - (number << 18);
        }
        return _mm512_load_si512(bits);
    }

    __m512 octaves_, least_;
    __m512i low_, high_;
};

// Runs pairs on one thread. Bytes: AmxBytes or VnniBytes.
template <class Bytes>
class CodedForward : PairWorker {
public:
    CodedForward(const Attention& op, const Case& given, float* rows)
        : PairWorker(given), exponential_(given.factor),
          contexts_(op, given, rows, IntegerExponential::kOne), depths_(inner_tiles(heads_.width)),
          groups_(inner_tiles(given.keys)), wide_(given.keys + kTileInner + kSkew),
          scores_(kQueryBlock * wide_), sums_(kByteParts * kUnit * kUnit), key_sums_(given.keys),
          queries_(kByteBlock * depths_), keys_(given.keys * depths_ * kTileInner),
          values_(given.stride * groups_ * kTileInner),
          probabilities_(kByteBlock * kByteParts * groups_), largest_(given.queries),
          shrink_(kQueryBlock) {}

    Magnitude run(const Pair& pair) {
        std::fill_n(largest_.begin(), pair.queries, std::numeric_limits<int32_t>::min());
        contexts_.start(pair);
        const auto begin = [&](const Block& block) {
            pack_transposed<Bytes::kBiased>(codes(given_.k, block), keys_.data(), key_sums_.data());
            pack_along(codes(given_.v, block), values_.data(), groups_ * kTileBytes);
        };
        for_blocks(pair, begin, [&](const Block& block) { add(block); }, [](const Block&) {});
        Magnitude most = 0;
        for (int64_t query = 0; query < pair.queries; ++query) {
            most = std::max(most, contexts_.write(pair, query, largest_[query] * given_.factor));
        }
        return most;
    }

private:
    Window<int8_t> codes(const Operand& keys, const Block& block) const {
        const int64_t first = block.pair.first_key + block.key;
        return keys.codes(first, block.pair.keys_from(block.key), key_column(block.pair),
                          heads_.width);
    }

    // Adds the block's keys to the context.
    void add(const Block& block) {
        const Window<int8_t> queries =
            given_.q.codes(block.row(), block.queries, column(block.pair), heads_.width);
        pack_rows<Bytes::kBiased>(queries, queries_.data());
        const int64_t distance = depths_ * kTileBytes;
        for (int64_t key = 0; key < block.keys; key += kUnit) {
            const ByteColumns keys{keys_.data() + key / kTileSide * distance, distance,
                                   Bytes::kBiased ? key_sums_.data() + key : nullptr};
            Bytes::template multiply<false>(queries_.data(), kByteBlock, keys, depths_,
                                            block.queries, scores_.data() + key, wide_);
        }
        for (int64_t i = 0; i < block.queries; ++i) softmax(block, i);
        for (int64_t column = 0; column < heads_.width; column += kUnit)
            multiply_values(block, column);
    }

    // Products of query `i` -> bytes of exp(score - largest) after dropout, 0 for hidden keys. A
    // new largest score shrinks the context so far.
    void softmax(const Block& block, int64_t i) {
        const int64_t n = block.seen(i), query = block.query + i;
        const int32_t* x = scores_.data() + i * wide_;
        draw(block, i, 0, n);
        __m512i most = _mm512_set1_epi32(largest_[query]);
        const int64_t hidden = block.hidden(i);
        for (int64_t j = 0; j < n; j += 16) {
            most = _mm512_mask_max_epi32(most, seen(hidden - j, n - j), most,
                                         _mm512_load_si512(x + j));
        }
        const int32_t before = largest_[query], largest = _mm512_reduce_max_epi32(most);
        const float change =
            (static_cast<float>(before) - static_cast<float>(largest)) * given_.factor;
        shrink_[i] = block.opens()       ? 0.0f
                     : before == largest ? 1.0f
                                         : bounded_exponential(all_lanes(change))[0];
        largest_[query] = largest;
        most = _mm512_set1_epi32(largest);
        Lanes sum[4] = {contexts_.sum(query) * shrink_[i]};
        uint8_t* to = probabilities_.data() + i * kTileInner;
        for (int64_t j = 0; j < block.keys; j += kTileInner, to += kByteParts * kByteBlock) {
            __m512i p[4] = {};
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                if (part == 2 && n - j <= kUnit) break;
                const int64_t at = j + part * 16;
                const __mmask16 mine = seen(hidden - at, n - at);
                const __m512i difference = _mm512_sub_epi32(_mm512_load_si512(x + at), most);
                const __m512 exact = exponential_(_mm512_cvtepi32_ps(difference));
                sum[part] = _mm512_mask_add_ps(sum[part], mine, sum[part], exact);
                p[part] = _mm512_maskz_cvtps_epi32(kept(at, mine), exact);
            }
            pack_integers(p[0], p[1], p[2], p[3], to, kByteBlock);
        }
        contexts_.sum(query) = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }

    // Mask of keys [hidden, n) of 16.
    static __mmask16 seen(int64_t hidden, int64_t n) { return first_bits(n) & ~first_bits(hidden); }

    // Mask of the keys `seen` from `at` on that dropout keeps.
    __mmask16 kept(int64_t at, __mmask16 seen) const {
        if (!heads_.dropout.threshold) return seen;
        const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(heads_.dropout.threshold));
        return _mm512_mask_cmpge_epu32_mask(seen, _mm512_loadu_si512(drawn_ + at), limit);
    }

    // Shrinks 32 columns of the context, from `column` on, and adds the block's keys.
    void multiply_values(const Block& block, int64_t column) {
        const int64_t distance = groups_ * kTileBytes;
        const ByteColumns values{values_.data() + column / kTileSide * distance, distance, nullptr};
        for (int part = 0; part < kByteParts; ++part) {
            Bytes::template multiply<true>(
                probabilities_.data() + part * kByteBlock, kByteParts * kByteBlock, values,
                inner_tiles(block.keys), block.queries, sums_.data() + part * kUnit * kUnit, kUnit);
        }
        const auto sum = [&](int part, int64_t at) {
            return _mm512_cvtepi32_ps(_mm512_load_si512(sums_.data() + part * kUnit * kUnit + at));
        };
        const __m512 byte = _mm512_set1_ps(256.0f);
        for (int64_t i = 0; i < block.queries; ++i) {
            float* row = contexts_.row(block.query + i) + column;
            const __m512 shrink = _mm512_set1_ps(shrink_[i]);
            for (int64_t at = 0; at < kUnit; at += 16) {
                const int64_t from = i * kUnit + at;
                const __m512 upper = _mm512_fmadd_ps(sum(2, from), byte, sum(1, from));
                const __m512 all = _mm512_fmadd_ps(upper, byte, sum(0, from)),
                             old = _mm512_load_ps(row + at);
                _mm512_store_ps(row + at, block.opens() ? all : _mm512_fmadd_ps(old, shrink, all));
            }
        }
    }

    typename Bytes::Session session_;
    IntegerExponential exponential_;
    Contexts contexts_;
    int64_t depths_, groups_;  // tiles of a head's columns; of a block's keys
    int64_t wide_;             // of rows of scores
    Aligned<int32_t> scores_, sums_, key_sums_;
    Aligned<uint8_t> queries_;
    Aligned<int8_t> keys_, values_;
    Aligned<uint8_t> probabilities_;  // [64 keys][part][32][64]
    std::vector<int32_t> largest_;    // scores so far
    std::vector<float> shrink_;       // for each query of a block
};

}  // namespace lsq

#endif
