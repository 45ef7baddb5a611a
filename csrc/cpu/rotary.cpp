// Rotary position embedding of q and k: y = x * cos + rotate(x) * sin in the first n_rotated columns of a row.
//
// A task is a block of positions of one sequence. It writes the block's cos and sin as float32 into a buffer of the
// thread that stays in L2: sin with the sign, and at the column, that the product is added to. Then it takes the heads
// of q and of k through the block, in the order of memory: heads of one position, or positions of one head. Memory sees
// q and k read once and both results written once. With n_rotated < head_dim the other columns are copied.
#include <type_traits>

#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// Floats of a block's cos and sin: 64 KiB, a quarter of the smallest L2. Every head is another run of memory, whose
// start the hardware does not foresee: 4 x 16 x 1024 x 64 float32, one thread: 5.6 ms with 16 KiB, 4.5 with 64, 4.4
// with 256.
constexpr int64_t kTableFloats = 16384;

// v with neighbours swapped: columns 1, 0, 3, 2, ...
ONETRIP_INLINE F swap_neighbours(F v) { return (F)(((L)v >> 32) | ((L)v << 32)); }

// A position's n_rotated columns: y = x * cos + partner of x * sin.
struct Table {
  const float *cos, *sin;
};

// Fills one position's table. The partner of a column is in the other half, or its neighbour where interleaved; where
// the table is for the inverse, the partner's sin belongs to it.
template <class C>
void fill_table(const C* cos, const C* sin, int64_t n, bool interleaved, bool inverse, float* cos_to, float* sin_to) {
  for_columns<1>(0, n, [&](int64_t c, auto lanes, int) {
    store(cos_to + c, load(cos + c, lanes), lanes);
    store(sin_to + c, load(sin + c, lanes), lanes);
  });
  const int64_t n_pairs = n / 2, step = interleaved ? 2 : 1, partner = interleaved ? 1 : n_pairs;
  for (int64_t i = 0; i < n_pairs; ++i) {
    float &first = sin_to[i * step], &second = sin_to[i * step + partner];
    const float kept = first;
    first = inverse ? second : -first;
    second = inverse ? -kept : second;
  }
}

// x * cos + partner * sin; where kRounds the products are rounded to T, as operators of dtype T do.
template <class T, bool kRounds>
ONETRIP_INLINE F combine(F x, F cos, F partner, F sin) {
  if constexpr (kRounds) return round_to<T>(x * cos) + round_to<T>(partner * sin);
  return x * cos + partner * sin;
}

template <class T, class Y, bool kRounds, bool kInterleaved>
ONETRIP_INLINE void rotate_row(const T* x, Y* y, Table table, int64_t n_rotated, int64_t head_dim, bool streams) {
  if constexpr (kInterleaved) {
    for_columns<2>(0, n_rotated, [&](int64_t c, auto lanes, int) {
      const F v = load(x + c, lanes);
      const F cos = load(table.cos + c, lanes), sin = load(table.sin + c, lanes);
      store_rounded(present(y + c), combine<T, kRounds>(v, cos, swap_neighbours(v), sin), lanes, streams);
    });
  } else {
    const int64_t half = n_rotated / 2;
    for_columns<2>(0, half, [&](int64_t c, auto lanes, int) {
      const int64_t d = c + half;
      const F v = load(x + c, lanes), w = load(x + d, lanes);
      const F v_cos = load(table.cos + c, lanes), v_sin = load(table.sin + c, lanes);
      const F w_cos = load(table.cos + d, lanes), w_sin = load(table.sin + d, lanes);
      store_rounded(present(y + c), combine<T, kRounds>(v, v_cos, w, v_sin), lanes, streams);
      store_rounded(present(y + d), combine<T, kRounds>(w, w_cos, v, w_sin), lanes, streams);
    });
  }
  if constexpr (std::is_same_v<T, Y>) {
    if (n_rotated < head_dim) memcpy(y + n_rotated, x + n_rotated, (head_dim - n_rotated) * sizeof(T));
  } else {
    for_columns<1>(n_rotated, head_dim,
                   [&](int64_t c, auto lanes, int) { store_rounded(y + c, load(x + c, lanes), lanes, false); });
  }
}

// Whether every row of y, and each of its halves, starts a cache line: whole vectors may then be streamed.
template <class Y>
bool may_stream(const RotaryTensor& tensor, const Rotary& args) {
  const int64_t strides = tensor.y_strides.batch | tensor.y_strides.head | tensor.y_strides.position;
  return is_line_aligned(tensor.y, nullptr) && (((args.n_rotated / 2) | strides) * sizeof(Y)) % 64 == 0;
}

template <class T, class Y, bool kRounds, bool kInterleaved>
int rotate(const Rotary& args) {
  const int64_t n_heads = args.tensors[0].n_heads + args.tensors[1].n_heads;
  const int64_t n_elements = args.n_batch * n_heads * args.n_positions * args.head_dim;
  if (n_elements == 0) return 0;
  const int64_t row_floats = round_up(args.n_rotated, 16);
  // Some 4 tasks a thread, so that the last ones end together.
  const int64_t longest = clamp(args.n_batch * args.n_positions / (4 * thread_count()), 1, args.n_positions);
  const int64_t block = clamp(kTableFloats / (2 * row_floats), 1, longest);
  const int64_t n_blocks = (args.n_positions + block - 1) / block;
  const bool streams = n_elements * static_cast<int64_t>(sizeof(Y)) >= kStreamBytes;
  return run_tasks(args.n_batch * n_blocks, n_elements, 2 * block * row_floats, [&](int64_t task, float* buffer) {
    const int64_t batch = task / n_blocks, first = task % n_blocks * block;
    const int64_t n = smaller(block, args.n_positions - first);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at_cos = batch * args.cos_strides.batch + (first + i) * args.cos_strides.position;
      const int64_t at_sin = batch * args.sin_strides.batch + (first + i) * args.sin_strides.position;
      float* to = buffer + 2 * i * row_floats;
      with_type(args.table_dtype, [&](auto type) {
        using C = decltype(type);
        fill_table(static_cast<const C*>(args.cos) + at_cos, static_cast<const C*>(args.sin) + at_sin, args.n_rotated,
                   kInterleaved, args.inverse, to, to + row_floats);
      });
    }
    for (const RotaryTensor& tensor : args.tensors) {
      if (tensor.n_heads == 0) continue;
      const RotaryStrides &from = tensor.x_strides, &to = tensor.y_strides;
      const T* x = static_cast<const T*>(tensor.x) + batch * from.batch + first * from.position;
      Y* y = static_cast<Y*>(tensor.y) + batch * to.batch + first * to.position;
      const bool past_caches = streams && may_stream<Y>(tensor, args);
      const auto row = [&](int64_t i, int64_t head) {
        const float* table = buffer + 2 * i * row_floats;
        rotate_row<T, Y, kRounds, kInterleaved>(x + i * from.position + head * from.head,
                                                y + i * to.position + head * to.head, {table, table + row_floats},
                                                args.n_rotated, args.head_dim, past_caches);
      };
      if (to.head < to.position) {
        for (int64_t i = 0; i < n; ++i)
          for (int64_t head = 0; head < tensor.n_heads; ++head) row(i, head);
      } else {
        for (int64_t head = 0; head < tensor.n_heads; ++head)
          for (int64_t i = 0; i < n; ++i) row(i, head);
      }
    }
  });
}

}  // namespace

int rotary(const Rotary& args) {
  return with_type(args.dtype, [&](auto type) {
    return with_type(args.y_dtype, [&](auto y_type) {
      using T = decltype(type);
      using Y = decltype(y_type);
      if constexpr (!kIsFloat32<T> && std::is_same_v<T, Y>) {
        if (args.dtype == args.table_dtype)
          return args.interleaved ? rotate<T, Y, true, true>(args) : rotate<T, Y, true, false>(args);
      }
      return args.interleaved ? rotate<T, Y, false, true>(args) : rotate<T, Y, false, false>(args);
    });
  });
}

}  // namespace onetrip::ONETRIP_LEVEL
