// What the families of row kernels share: sizes and addresses, memory of a thread, and threads that take tasks.
#pragma once
#if defined(_OPENMP)
#include <omp.h>
#endif

#include <cerrno>
#include <cstdlib>
#include <type_traits>

#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

constexpr int64_t kSerialElements = 32768;  // below it, waking the other threads takes longer than the work
constexpr int64_t kTaskElements = 16384;
// Outputs of this size are written past the caches, which would not keep them for their reader: 4096 x 1024 float32,
// one thread, fresh outputs: layer norm 5.7 -> 1.4 ms, bias + residual + layer norm with z stored 16.5 -> 9.2.
#ifndef ONETRIP_STREAM_BYTES  // the tests' drivers under sanitizers set less
#define ONETRIP_STREAM_BYTES (int64_t{8} << 20)
#endif
constexpr int64_t kStreamBytes = ONETRIP_STREAM_BYTES;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}
inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
// Element `index` of an array of dtype; null stays null.
inline const void* at(const void* base, int64_t index, DType dtype) {
  return base ? static_cast<const char*>(base) + index * size_of(dtype) : nullptr;
}
inline void* at(void* base, int64_t index, DType dtype) {
  return const_cast<void*>(at(const_cast<const void*>(base), index, dtype));
}

inline bool is_line_aligned(const void* a, const void* b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & 63) == 0;
}

// Sums over a row run in kChains chains that are folded every kSumColumns columns: in one long chain every addition
// rounds off the low bits that half-precision values have in common in the same direction, and the error grows with the
// width.
constexpr int kChains = 4;
constexpr int64_t kSumColumns = 2048;
constexpr float kInfinity = __builtin_inff();
ONETRIP_INLINE F sum_chains(const F* chains) { return (chains[0] + chains[1]) + (chains[2] + chains[3]); }
ONETRIP_INLINE float largest_of_chains(const F* chains) {
  return largest_lane(larger_number(larger_number(chains[0], chains[1]), larger_number(chains[2], chains[3])));
}

// How many rows further on a row lies that is fetched while this one is computed: 8 KiB of float32, or the next.
inline int64_t rows_to_fetch_ahead(int64_t n_cols) { return n_cols < 2048 ? 2048 / n_cols : 1; }

// Memory of one thread, kept from call to call: rows of a megabyte would otherwise be mapped and faulted in by every
// call.
class Buffer {
 public:
  ~Buffer() { free(data_); }
  float* reserve(int64_t floats) {
    if (floats > size_) {
      free(data_);
      size_ = round_up(floats, 16);
      data_ = static_cast<float*>(aligned_alloc(64, size_ * sizeof(float)));
      if (!data_) size_ = 0;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};
thread_local Buffer thread_buffer;

// The sum of a vector of each part's slot, in order. Slots are whole vectors.
ONETRIP_INLINE F sum_slots(const float* slots, int64_t part_floats, int64_t n_parts) {
  F sum = {};
  for (int64_t part = 0; part < n_parts; ++part) sum += load(slots + part * part_floats, All{});
  return sum;
}

// to = sum of the parts' slots, in order.
template <class T>
void add_parts(const float* slots, int64_t part_floats, int64_t n_parts, void* to, int64_t begin, int64_t end) {
  for_columns<1>(begin, end, [&](int64_t c, auto lanes, int) {
    store_rounded(static_cast<T*>(to) + c, sum_slots(slots + c, part_floats, n_parts), lanes);
  });
}

constexpr int kStoreUnroll = 4;

// Calls body(column, lanes, streams) for every vector of [begin, end), where those that start a cache line of `row` or
// follow in it may be streamed. Paired: for_columns_of's type, for bodies that take pairs.
template <class Paired = float, int kUnroll = kStoreUnroll, class T, class Body>
ONETRIP_INLINE void for_stored_columns(int64_t begin, int64_t end, const T* row, bool streams, Body body) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(row) + begin * sizeof(T);  // row is null where nothing is stored
  const int64_t to_line = static_cast<int64_t>(-first & 63) / sizeof(T);
  const int64_t line = streams ? smaller(begin + to_line, end) : end;
  for_columns_of<kUnroll, Paired>(begin, line, [&](int64_t c, auto lanes, int) { body(c, lanes, std::false_type{}); });
  if (line < end)
    for_columns_of<kUnroll, Paired>(line, end, [&](int64_t c, auto lanes, int) { body(c, lanes, std::true_type{}); });
}

// A parameter as float32 plus offset: the caller's own array where that is what it holds.
class Parameter {
 public:
  Parameter(const void* source, DType dtype, float offset, int64_t n) : values_(static_cast<const float*>(source)) {
    if (!source || (dtype == DType::kFloat32 && offset == 0.0f)) return;
    copy_ = static_cast<float*>(malloc(n * sizeof(float)));
    values_ = copy_;
    failed_ = !copy_;
    if (failed_) return;
    with_type(dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(source);
      for_columns<1>(0, n,
                     [&](int64_t c, auto lanes, int) { store(copy_ + c, load(from + c, lanes) + offset, lanes); });
    });
  }
  Parameter(const Parameter&) = delete;
  ~Parameter() { free(copy_); }
  const float* values() const { return values_; }
  bool failed() const { return failed_; }

 private:
  const float* values_;
  float* copy_ = nullptr;
  bool failed_ = false;
};

#if defined(_OPENMP)
inline int64_t thread_count() { return omp_get_max_threads(); }
inline int64_t thread_number() { return omp_get_thread_num(); }
#else
inline int64_t thread_count() { return 1; }
inline int64_t thread_number() { return 0; }
#endif

// The next task of a part of all tasks, and the end of the part; in a cache line of its own.
struct alignas(64) Tasks {
  int64_t next, end;
};

// Runs task(i, buffer) for i in [0, n_tasks), on all threads where that is worth it. Returns 0 or ENOMEM. Each thread
// first takes tasks of its own part, the same in each call with as many threads, whose rows its cache may hold; then
// those left in other parts.
template <class Task>
int run_tasks(int64_t n_tasks, int64_t n_elements, int64_t buffer_floats, Task task) {
  int error = 0;
  const auto run = [&](int64_t i) -> int {
    float* buffer = thread_buffer.reserve(buffer_floats);
    if (!buffer) return ENOMEM;
    task(i, buffer);
    stream_fence();
    return 0;
  };
  if (n_tasks == 1 || n_elements < kSerialElements) {
    for (int64_t i = 0; i < n_tasks; ++i) error |= run(i);
  } else {
    constexpr int64_t kMostParts = 64;
    Tasks parts[kMostParts];
    const int64_t n_parts = smaller(thread_count(), kMostParts);
    for (int64_t p = 0; p < n_parts; ++p) parts[p] = {p * n_tasks / n_parts, (p + 1) * n_tasks / n_parts};
#pragma omp parallel reduction(| : error)
    for (int64_t p = 0, own = thread_number(); p < n_parts; ++p) {
      Tasks& part = parts[(own + p) % n_parts];
      if (__atomic_load_n(&part.next, __ATOMIC_RELAXED) >= part.end) continue;  // not written to: its line stays shared
      for (int64_t i; (i = __atomic_fetch_add(&part.next, 1, __ATOMIC_RELAXED)) < part.end;) error |= run(i);
    }
  }
  return error;
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
