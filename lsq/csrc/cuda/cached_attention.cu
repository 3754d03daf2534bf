// Attention of one query per row to keys and values that a list finds in a cache of codes;
// lsq/ops/cached_attention.py is the reference.
//
// Bound by reading the cache. A block has one head of one row, or a part of its list if few rows
// would leave multiprocessors idle. A group of lanes has a key and its value, each lane 16 columns
// of both (8 if heads are no multiple of 16), and loads several keys before it uses the first.
// Scores are exact sums of codes. Groups keep a running maximum, sum and context (Milakov and
// Gimelshein 2018), which the block joins; the last block of a head joins the parts of its list
// (Flash-Decoding, Dao et al. 2023), in a fixed order.
//
// -DWIDTH: columns of a head, a multiple of 8 up to 128; -DLEAST: keys of a list that are worth
// another block.
#include "rounding.cuh"

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kBytes = WIDTH % 16 == 0 ? 16 : 8;  // of a key that a lane has
constexpr int kParts = WIDTH / kBytes;            // lanes that have some
// Lanes of a key.
constexpr int kGroup = kParts > 8 ? 16 : kParts > 4 ? 8 : kParts > 2 ? 4 : kParts;
constexpr int kGroups = kThreads / kGroup;
constexpr int kTurn = 4;               // keys that a group asks for at a time
constexpr int32_t kNone = -(1 << 30);  // the largest score of no keys

// A lane's codes of a key or a value.
struct Piece {
    uint32_t word[kBytes / 4] = {};

    LSQ_INLINE void load(const int8_t* from) {
        if constexpr (kBytes == 16) {
            const uint4 words = load_words<uint4>(from);
            word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
        } else {
            const uint2 words = load_words<uint2>(from);
            word[0] = words.x, word[1] = words.y;
        }
    }
    LSQ_INLINE void store(int8_t* to) const {
        if constexpr (kBytes == 16) {
            store_words(to, make_uint4(word[0], word[1], word[2], word[3]));
        } else {
            store_words(to, make_uint2(word[0], word[1]));
        }
    }
    LSQ_INLINE int32_t dot(const Piece& other) const {
        int32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) {
            sum = __dp4a(static_cast<int32_t>(word[i]), static_cast<int32_t>(other.word[i]), sum);
        }
        return sum;
    }
    // A code as a float: in the last bits of 2^23 with its sign bit flipped, it is 128 too large.
    LSQ_INLINE float value(int i) const {
        return float_of(__byte_perm(word[i / 4] ^ 0x80808080u, 0x4B000000u, 0x7650u + i % 4)) -
               (8388608.0f + 128.0f);
    }
};

// State of some keys of a list: the sums of p = exp((score - largest) * factor) and of p times the
// values.
struct alignas(16) State {
    float context[WIDTH];
    float total;
    int32_t largest;
};

// Factor of p when the largest score becomes `to`.
LSQ_INLINE float shrink(int32_t largest, int32_t to, float factor) {
    return bounded_exponential(static_cast<float>(largest - to) * factor);
}

// A lane's part of its group's state.
struct Running {
    float context[kBytes] = {}, total = 0.0f;
    int32_t largest = kNone;

    LSQ_INLINE void rise(int32_t to, float factor) {
        const float by = shrink(largest, to, factor);
        total *= by, largest = to;
#pragma unroll
        for (int i = 0; i < kBytes; ++i) context[i] *= by;
    }
    LSQ_INLINE void add(float p, const Piece& value) {
        total += p;
#pragma unroll
        for (int i = 0; i < kBytes; ++i) context[i] = fmaf(p, value.value(i), context[i]);
    }
    // Joins all groups of the warp. All lanes must call this.
    LSQ_INLINE void join_warp(float factor) {
        int32_t highest = largest;
#pragma unroll
        for (int apart = kGroup; apart < kWarp; apart *= 2) {
            highest = max(highest, __shfl_xor_sync(kAllLanes, highest, apart));
        }
        rise(highest, factor);
#pragma unroll
        for (int apart = kGroup; apart < kWarp; apart *= 2) {
            total += __shfl_xor_sync(kAllLanes, total, apart);
#pragma unroll
            for (int i = 0; i < kBytes; ++i)
                context[i] += __shfl_xor_sync(kAllLanes, context[i], apart);
        }
    }
};

// Joins eight columns of several states.
struct Joined {
    float context[kVector] = {}, total = 0.0f;
    int32_t largest = kNone;

    LSQ_INLINE Joined(const State* states, int count, int column, float factor) {
        for (int i = 0; i < count; ++i) largest = max(largest, states[i].largest);
        for (int i = 0; i < count; ++i) {
            const float by = shrink(states[i].largest, largest, factor);
            float more[kVector];
            load8(states[i].context + column, more);
            total += by * states[i].total;
#pragma unroll
            for (int j = 0; j < kVector; ++j) context[j] += by * more[j];
        }
    }
};

struct Reader {
    const CachedAttention& op;
    const int head;
    const int64_t row, list;
    const int length, parts;  // of the list: keys, and blocks that share them
    const int64_t* slots;
    const int part = threadIdx.x % kGroup, group = threadIdx.x / kGroup;
    // Columns; a lane without any repeats the first one's reads.
    const bool has = part < kParts;
    const int column = has ? part * kBytes : 0;
    // The lane's part of the query, and of the row's own key and value.
    const int8_t* own;
    int8_t* cache;  // the lane's part of the first key
    const float factor;

    LSQ_INLINE explicit Reader(const CachedAttention& op)
        : op(op), head(blockIdx.x % op.heads), row(blockIdx.x / op.heads), list(op.owned[row]),
          length(static_cast<int>(op.lengths[list])),
          parts(max(1, min((length + LEAST - 1) / LEAST, static_cast<int>(gridDim.y)))),
          slots(op.lists + list * op.capacity),
          own(op.queries.codes + (row * op.query_columns + head * WIDTH + column)),
          cache(op.cache + (head * WIDTH + column)),
          factor(op.queries.scale[0] * op.cache_scale[0] *
                 static_cast<float>(1.0 / sqrt(static_cast<double>(WIDTH)))) {}

    // The lane's part of key j; that of its value lies a row's width behind.
    LSQ_INLINE const int8_t* key(int j) const {
        return op.appends && j == length - 1 ? own + op.columns
                                             : cache + slots[j] * (2 * op.columns);
    }

    // Reads the block's part of the list; a state per warp.
    LSQ_INLINE void read(State* states) const {
        const int each = (length + parts - 1) / parts, begin = blockIdx.y * each,
                  end = min(length, begin + each);
        Running running;
        Piece query;
        if (has) query.load(own);
        const int8_t* keys[kTurn];
        const auto find = [&](int first) {  // one turn ahead: what is read next waits for it
#pragma unroll
            for (int i = 0; i < kTurn; ++i) {
                const int j = first + i * kGroups + group;
                keys[i] = j < end ? key(j) : nullptr;
            }
        };
        find(begin);
        for (int first = begin; first < end; first += kTurn * kGroups) {
            Piece of_keys[kTurn], values[kTurn];
            bool there[kTurn];
#pragma unroll
            for (int i = 0; i < kTurn; ++i) {
                there[i] = keys[i] != nullptr;
                if (there[i]) of_keys[i].load(keys[i]), values[i].load(keys[i] + op.columns);
            }
            find(first + kTurn * kGroups);
            int32_t scores[kTurn], highest = running.largest;
#pragma unroll
            for (int i = 0; i < kTurn; ++i) {
                if (first + i * kGroups >= end) continue;  // of all groups
                scores[i] = warp_reduce<Sum, kGroup>(query.dot(of_keys[i]));
                if (there[i]) highest = max(highest, scores[i]);
            }
            running.rise(highest, factor);
#pragma unroll
            for (int i = 0; i < kTurn; ++i) {
                if (first + i * kGroups >= end) continue;
                running.add(there[i] ? shrink(scores[i], highest, factor) : 0.0f, values[i]);
            }
        }
        running.join_warp(factor);
        State& state = states[threadIdx.x / kWarp];
        if (threadIdx.x % kWarp < kGroup && has) {
#pragma unroll
            for (int i = 0; i < kBytes; i += 4) {
                const float* four = running.context + i;
                store_words(state.context + (column + i),
                            make_float4(four[0], four[1], four[2], four[3]));
            }
        }
        if (threadIdx.x % kWarp == 0) state.total = running.total, state.largest = running.largest;
    }

    // Appends the row's own key and value to its list.
    LSQ_INLINE void append() const {
        if (!op.appends || length == 0 || blockIdx.y != 0 || group != 0 || !has) return;
        int8_t* to = cache + slots[length - 1] * (2 * op.columns);
#pragma unroll
        for (int of_value = 0; of_value < 2; ++of_value) {
            Piece piece;
            piece.load(own + (1 + of_value) * op.columns);
            piece.store(to + of_value * op.columns);
        }
    }
};

}  // namespace

// all [rows * heads, gridDim.y]: states of parts of lists. grid: rows * heads, parts of a list.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_cached_attention(const CachedAttention op, Out<uint32_t> ticket, Out<State> all) {
    wait_for_launches();
    __shared__ State states[kWarps];
    const CodeSink codes{op.context};
    Magnitude largest = 0;
    if (op.rows > 0) {
        const Reader reader(op);
        const int column = threadIdx.x * kVector;
        const bool joins = column < WIDTH;
        if (static_cast<int>(blockIdx.y) < reader.parts) {
            reader.append();
            reader.read(states);
            __syncthreads();
            const State* from = states;
            int count = kWarps;
            if (reader.parts > 1) {
                State* parts = all + static_cast<int64_t>(blockIdx.x) * gridDim.y;
                if (joins) {
                    const Joined joined(states, kWarps, column, reader.factor);
                    State& mine = parts[blockIdx.y];
                    store8(mine.context + column, joined.context);
                    if (column == 0) mine.total = joined.total, mine.largest = joined.largest;
                }
                from = last_of(ticket + (2 + blockIdx.x), reader.parts) ? parts : nullptr;
                count = reader.parts;
            }
            if (joins && from) {
                Joined joined(from, count, column, reader.factor);
                const float share = op.cache_scale[0] / joined.total;
#pragma unroll
                for (int i = 0; i < kVector; ++i)
                    joined.context[i] = reader.length ? joined.context[i] * share : 0.0f;
                largest = codes.write8(reader.row * op.columns + (reader.head * WIDTH + column),
                                       joined.context);
            }
        }
    }
    codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_cached_attention)
