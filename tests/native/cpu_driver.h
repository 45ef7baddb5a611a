// What the drivers of the CPU kernels share: arrays of the exact size, and the comparison of levels.
#pragma once
#include <sanitizer/asan_interface.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "launch.h"

namespace onetrip {

// Twice as many float32 elements, or four times as many of two bytes, are streamed: an output of ONETRIP_STREAM_BYTES.
constexpr int64_t kStreamed = ONETRIP_STREAM_BYTES / 8;

// An array, aligned to a cache line or one element past one, as a storage offset leaves it; and a guard behind it,
// which only streamed stores can reach: AddressSanitizer does not see those.
class Array {
 public:
  Array(int64_t n, DType dtype, bool is_aligned)
      : size_(dtype == DType::kFloat32 ? 4 : 2), n_(n), shift_(is_aligned ? 0 : size_) {
    if (posix_memalign(&memory_, 64, shift_ + n * size_ + kGuard) != 0) exit(1);
    memset(memory_, kFill, shift_ + n * size_ + kGuard);
    ASAN_POISON_MEMORY_REGION(end(), kGuard);
  }
  Array(const Array&) = delete;
  ~Array() {
    ASAN_UNPOISON_MEMORY_REGION(end(), kGuard);
    for (int i = 0; i < kGuard; ++i) {
      if (end()[i] == kFill) continue;
      std::printf("written %d bytes past the end of %lld elements\n", i, static_cast<long long>(n_));
      exit(1);
    }
    free(memory_);
  }
  void* data() { return static_cast<char*>(memory_) + shift_; }
  // Values in [-2, 2) that are exact in every dtype.
  Array& fill(uint32_t seed) {
    for (int64_t i = 0; i < n_; ++i) {
      seed = seed * 1664525u + 1013904223u;
      const float value = static_cast<int>(seed >> 26) / 16.0f - 2.0f;
      uint32_t bits;
      memcpy(&bits, &value, 4);
      if (size_ == 4) {
        memcpy(static_cast<char*>(data()) + 4 * i, &bits, 4);
      } else {
        const uint16_t half = bits >> 16;
        memcpy(static_cast<char*>(data()) + 2 * i, &half, 2);
      }
    }
    return *this;
  }
  std::vector<double> values() {
    std::vector<double> result(n_);
    for (int64_t i = 0; i < n_; ++i) {
      uint32_t bits = 0;
      memcpy(reinterpret_cast<char*>(&bits) + (4 - size_), static_cast<char*>(data()) + size_ * i, size_);
      float value;
      memcpy(&value, &bits, 4);
      result[i] = value;
    }
    return result;
  }

 private:
  static constexpr int kGuard = 256;
  static constexpr char kFill = 0x5A;
  char* end() { return static_cast<char*>(data()) + n_ * size_; }
  int64_t size_, n_, shift_;
  void* memory_ = nullptr;
};

// The results of every case on another machine, in the file that ONETRIP_RESULTS names; written where there is none
// yet.
class Elsewhere {
 public:
  Elsewhere() {
    const char* path = std::getenv("ONETRIP_RESULTS");
    if (path == nullptr) return;
    file_ = std::fopen(path, "rb");
    is_written_ = file_ == nullptr;
    if (is_written_) file_ = std::fopen(path, "wb");
    if (file_ == nullptr) exit(1);
  }
  Elsewhere(const Elsewhere&) = delete;
  ~Elsewhere() {
    if (file_ != nullptr) std::fclose(file_);
  }
  // Results of the next case: those that the file has, or `here`, which a new file gets.
  std::vector<double> next(const std::vector<double>& here) {
    if (file_ == nullptr) return here;
    std::vector<double> results = here;
    if ((is_written_ ? std::fwrite(results.data(), sizeof(double), results.size(), file_)
                     : std::fread(results.data(), sizeof(double), results.size(), file_)) == results.size())
      return results;
    std::printf("ONETRIP_RESULTS: cannot be written, or is of other cases\n");
    exit(1);
  }

 private:
  std::FILE* file_ = nullptr;
  bool is_written_ = false;
};

// Runs run(c) for every case at every level and compares with the first level's results, to within tolerance(c); or
// with those of another machine. Prints the levels that ran; returns whether all agree.
template <class Case, class Run, class Tolerance>
bool levels_agree(const std::vector<Case>& cases, Run run, Tolerance tolerance) {
  std::string ran;
  bool agree = true;
  Elsewhere elsewhere;
  for (const Case& c : cases) {
    std::vector<double> first;
    for (const char* level : {"baseline", "avx2", "avx512", "avx512vbmi"}) {
      if (!set_cpu_level(level)) continue;
      if (ran.find(level) == std::string::npos) ran += std::string(level) + " ";
      const std::vector<double> results = run(c);
      if (first.empty()) first = elsewhere.next(results);
      for (size_t i = 0; i < results.size(); ++i) {
        const double allowed = tolerance(c) * (1 + std::fabs(first[i]));
        if (!(std::fabs(results[i] - first[i]) <= allowed)) {
          std::printf("%s: %lld x %lld: result %zu is %g, was %g\n", level, static_cast<long long>(c.n_rows),
                      static_cast<long long>(c.n_cols), i, results[i], first[i]);
          agree = false;
          break;
        }
      }
    }
  }
  std::printf("%s\n", ran.c_str());
  return agree;
}

}  // namespace onetrip
