// y = dropout(act(gate) * up),  or y = dropout(act(gate + bias)): element-wise over rows, and the gradients.
//
// A task takes a range of the elements in row order; matrices without gaps and without a bias count as one long row.
// Memory sees each input read once and each output written once: backward computes the activation again.
// The gradient of the bias is summed on the way: rows are cut into parts, a function of the sizes alone
// (row_partition), each part has a slot of the workspace that stays in its thread's cache, and the slots are added in
// order: no bit of a result depends on the number of threads or on which took what.
#include <type_traits>

#include "dropout.h"
#include "levels.h"
#include "math.h"
#include "rows.h"
#include "simd.h"

namespace onetrip {
namespace ONETRIP_LEVEL {
namespace {

// Elements of a task: some 8 tasks a thread, so that the last ones end together.
inline int64_t task_elements(int64_t n) {
  return round_up(clamp(n / (8 * thread_count()), kTaskElements, 16 * kTaskElements), 64);
}

// Calls body(row, begin, end) for the columns of each row that elements [first, last) fall on.
template <class Body>
ONETRIP_INLINE void for_rows(int64_t n_cols, int64_t first, int64_t last, Body body) {
  for (int64_t row = first / n_cols, begin = first % n_cols; first < last; ++row, begin = 0) {
    const int64_t end = smaller(n_cols, begin + last - first);
    body(row, begin, end);
    first += end - begin;
  }
}

// One function for all kernels: inlined into each it is most of their code.
__attribute__((noinline)) const uint16_t* draw_row(DropoutMask& mask, int64_t row, int64_t begin, int64_t end,
                                                   int64_t n_cols) {
  mask.fill(row, 1, begin, end, n_cols);
  return mask.row(0);
}

// Calls body(begin, end, bits) for pieces of the columns [begin, end) of a row, with 16 random bits for each column.
template <bool kDrops, class Body>
ONETRIP_INLINE void for_draws(DropoutMask& mask, int64_t row, int64_t begin, int64_t end, int64_t n_cols, Body body) {
  if constexpr (!kDrops) return body(begin, end, static_cast<const uint16_t*>(nullptr));
  for (int64_t next; begin < end; begin = next) {
    next = smaller(end, begin + DropoutMask::kColumns);
    body(begin, next, draw_row(mask, row, begin, next, n_cols));
  }
}

enum class With { kNothing, kUp, kBias };

// Calls body with what gate comes with, and whether there is dropout, as constants. Dropout alone counts as kBias with
// a null bias: its draws hide the test for it, and kernels are slow to compile.
template <class Body>
auto with_second(const void* up, bool has_bias, const Dropout& dropout, Body body) {
  const auto with_dropout = [&](auto with) {
    return dropout.threshold ? body(with, std::true_type{}) : body(with, std::false_type{});
  };
  if (up) return with_dropout(std::integral_constant<With, With::kUp>{});
  if (has_bias || dropout.threshold) return with_dropout(std::integral_constant<With, With::kBias>{});
  return body(std::integral_constant<With, With::kNothing>{}, std::false_type{});
}

// The inner loops are compiled for what they read and write: a vector of them has no condition. With dropout nothing is
// streamed: drawing takes longer than that would save (768 x 3072 float32, relu, 2 threads: 1.4 ms either way).
template <class Act, class T, With kWith, bool kDrops>
void forward_elements(const GluForward& args, const float* bias, float* buffer, bool streams, int64_t first,
                      int64_t last) {
  DropoutMask mask(args.dropout, buffer);
  for_rows(args.n_cols, first, last, [&](int64_t row, int64_t begin, int64_t end) {
    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_row_stride;
    const T* up = kWith == With::kUp ? static_cast<const T*>(args.up) + row * args.up_row_stride : nullptr;
    T* y = static_cast<T*>(args.y) + row * args.n_cols;
    for_draws<kDrops>(mask, row, begin, end, args.n_cols, [&](int64_t begin, int64_t end, const uint16_t* bits) {
      for_stored_columns<float, 1>(begin, end, y, !kDrops && streams, [&](int64_t c, auto lanes, auto streams) {
        F x = load(gate + c, lanes);
        if constexpr (kWith == With::kBias)
          if (!kDrops || bias) x += load(bias + c, lanes);
        F v = Act::value(x);
        if constexpr (kWith == With::kUp) v *= load(up + c, lanes);
        if constexpr (kDrops) v = mask.apply(v, mask.kept(bits + (c - begin)));
        store_rounded(present(y + c), v, lanes, streams);
      });
    });
  });
}

// Whether all gradients are wanted, and those of gate and up are aligned alike: where one may be streamed, so may both.
bool wants_all(const GluBackward& args) {
  const auto distance = reinterpret_cast<uintptr_t>(args.dup) - reinterpret_cast<uintptr_t>(args.dgate);
  if (args.up) return args.dgate && args.dup && args.dgate_row_stride == args.dup_row_stride && distance % 64 == 0;
  return args.dgate && (!args.bias || args.dbias);
}

// bias: null: nothing is added to gate. sums: [n_cols], to which the gradient of the bias is added; null: not wanted.
// kAll: wants_all; else results that are not wanted are null, and nothing is streamed.
template <class Act, class T, With kWith, bool kDrops, bool kAll>
void backward_elements(const GluBackward& args, const float* bias, float* sums, float* buffer, bool streams,
                       int64_t first, int64_t last) {
  DropoutMask mask(args.dropout, buffer);
  for_rows(args.n_cols, first, last, [&](int64_t row, int64_t begin, int64_t end) {
    const T* dy = static_cast<const T*>(args.dy) + row * args.dy_row_stride;
    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_row_stride;
    const T* up = kWith == With::kUp ? static_cast<const T*>(args.up) + row * args.up_row_stride : nullptr;
    T* dgate = args.dgate ? static_cast<T*>(args.dgate) + row * args.dgate_row_stride : nullptr;
    T* dup = kWith == With::kUp && args.dup ? static_cast<T*>(args.dup) + row * args.dup_row_stride : nullptr;
    for_draws<kDrops>(mask, row, begin, end, args.n_cols, [&](int64_t begin, int64_t end, const uint16_t* bits) {
      for_stored_columns<float, 1>(begin, end, dgate, kAll && streams, [&](int64_t c, auto lanes, auto streams) {
        F x = load(gate + c, lanes);
        if constexpr (kWith == With::kBias)
          if (bias) x += load(bias + c, lanes);
        F g = load(dy + c, lanes);
        if constexpr (kDrops) g = mask.apply(g, mask.kept(bits + (c - begin)));
        const Activated act = Act::with_slope(x);
        if constexpr (kWith == With::kUp) {
          if (kAll || dup) store_rounded(present(dup + c), g * act.value, lanes, streams);
          g *= load(up + c, lanes);
        }
        if constexpr (std::is_same_v<Act, Relu>) {
          g = (F)((U)(kDrops ? g : g * args.dropout.scale) & (U)(act.slope != 0.0f));
        } else {
          g *= act.slope;
        }
        if (kAll || dgate) store_rounded(present(dgate + c), g, lanes, streams);
        if constexpr (kWith == With::kBias)
          if (kAll || sums) store(sums + c, load(sums + c, lanes) + g, lanes);
      });
    });
  });
}

}  // namespace

int glu_forward(const GluForward& given) {
  GluForward args = given;
  const int64_t n = args.n_rows * args.n_cols;
  if (n <= 0) return 0;
  if (!args.bias && args.gate_row_stride == args.n_cols && (!args.up || args.up_row_stride == args.n_cols))
    args.n_rows = 1, args.n_cols = n;
  const Parameter bias(args.bias, args.bias_dtype, 0.0f, args.n_cols);
  if (bias.failed()) return ENOMEM;
  const auto run = with_type(args.dtype, [&](auto type) {
    return with_activation(args.activation, [&](auto act) {
      return with_second(args.up, args.bias, args.dropout, [](auto with, auto drops) {
        return &forward_elements<decltype(act), decltype(type), with(), drops()>;
      });
    });
  });
  const bool streams = n * size_of(args.dtype) >= kStreamBytes;
  const int64_t per_task = task_elements(n);
  const int64_t buffer_floats = args.dropout.threshold ? DropoutMask::kFloats : 16;
  return run_tasks((n + per_task - 1) / per_task, n, buffer_floats, [&](int64_t task, float* buffer) {
    run(args, bias.values(), buffer, streams, task * per_task, smaller((task + 1) * per_task, n));
  });
}

int glu_backward(const GluBackward& given) {
  GluBackward args = given;
  const int64_t n = args.n_rows * args.n_cols;
  if (n <= 0 || !(args.dgate || args.dup || args.dbias)) return 0;
  const auto is_whole = [&](const void* matrix, int64_t row_stride) { return !matrix || row_stride == args.n_cols; };
  const RowPartition partition = row_partition(args.n_rows, args.n_cols);
  if (!args.bias && !args.dbias && is_whole(args.dy, args.dy_row_stride) && is_whole(args.gate, args.gate_row_stride) &&
      is_whole(args.up, args.up_row_stride) && is_whole(args.dgate, args.dgate_row_stride) &&
      is_whole(args.dup, args.dup_row_stride))
    args.n_rows = 1, args.n_cols = n;
  const Parameter bias(args.bias, args.bias_dtype, 0.0f, args.n_cols);
  if (bias.failed()) return ENOMEM;
  const bool all = wants_all(args);
  const auto run = with_type(args.dtype, [&](auto type) {
    return with_activation(args.activation, [&](auto act) {
      using Act = decltype(act);
      return with_second(args.up, args.bias || args.dbias, args.dropout, [all](auto with, auto drops) {
        if constexpr (!drops())
          if (all || with() == With::kNothing) return &backward_elements<Act, decltype(type), with(), false, true>;
        return &backward_elements<Act, decltype(type), with(), drops(), false>;
      });
    });
  });
  const bool streams = n * size_of(args.dtype) >= kStreamBytes;
  const int64_t buffer_floats = args.dropout.threshold ? DropoutMask::kFloats : 16;
  if (!args.dbias) {
    const int64_t per_task = task_elements(n);
    return run_tasks((n + per_task - 1) / per_task, n, buffer_floats, [&](int64_t task, float* buffer) {
      run(args, bias.values(), nullptr, buffer, streams, task * per_task, smaller((task + 1) * per_task, n));
    });
  }
  const int64_t per_part = partition.rows_per_part * args.n_cols;
  const auto run_part = [&](int64_t part, float* buffer) {
    float* sums = args.workspace + part * partition.slot_floats;
    memset(sums, 0, partition.slot_floats * sizeof(float));
    run(args, bias.values(), sums, buffer, streams, part * per_part, smaller((part + 1) * per_part, n));
  };
  if (const int error = run_tasks(partition.n_parts, n, buffer_floats, run_part)) return error;
  constexpr int64_t kColumnsPerTask = 256;
  const int64_t n_tasks = (args.n_cols + kColumnsPerTask - 1) / kColumnsPerTask;
  return run_tasks(n_tasks, partition.n_parts * partition.slot_floats, 16, [&](int64_t task, float*) {
    const int64_t begin = task * kColumnsPerTask, end = smaller(begin + kColumnsPerTask, args.n_cols);
    with_type(args.bias_dtype, [&](auto type) {
      add_parts<decltype(type)>(args.workspace, partition.slot_floats, partition.n_parts, args.dbias, begin, end);
    });
  });
}

}  // namespace ONETRIP_LEVEL
}  // namespace onetrip
