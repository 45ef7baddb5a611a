// Which build of the CPU kernels runs: the best that the machine has, found once at load. Compiled for the baseline.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "../common/adam.h"
#include "levels.h"

namespace onetrip {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
#define ONETRIP_MEMBER(level, name, Args) int (*name)(const Args&);
  ONETRIP_KERNELS(ONETRIP_MEMBER, )
};
#define ONETRIP_ADDRESS(level, name, Args) level::name,

#if defined(ONETRIP_HAVE_X86_LEVELS)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512vbmi() { return has_avx512() && __builtin_cpu_supports("avx512vbmi"); }
// F16C is not asked for: every CPU with AVX2 and FMA has it, and older compilers do not know its name.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

const Level kLevels[] = {
#if defined(ONETRIP_HAVE_X86_LEVELS)
    {"avx512vbmi", has_avx512vbmi, ONETRIP_ADAM(ONETRIP_ADDRESS, avx512vbmi) ONETRIP_OTHERS(ONETRIP_ADDRESS, avx512)},
    {"avx512", has_avx512, ONETRIP_KERNELS(ONETRIP_ADDRESS, avx512)},
    {"avx2", has_avx2, ONETRIP_KERNELS(ONETRIP_ADDRESS, avx2)},
#endif
    {"baseline", [] { return true; }, ONETRIP_KERNELS(ONETRIP_ADDRESS, baseline)},
};

const Level* best_level() {
#if defined(ONETRIP_HAVE_X86_LEVELS)
  __builtin_cpu_init();
#endif
  const Level* level = kLevels;
  while (!level->supported()) ++level;
  return level;
}

std::atomic<const Level*> current_level{best_level()};

// A large output is mostly memory that the allocator has just been given: at its first touch each page costs a fault,
// which for 4 KiB pages takes longer than the row's arithmetic (1.6 microseconds measured on a virtual machine: 6.6 ms
// for 16 MiB). Pages of 2 MiB cost one fault for 512. Only whole ones inside the output are asked for.
void ask_for_huge_pages(void* output, int64_t n_elements, DType dtype) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const int64_t bytes = n_elements * (dtype == DType::kFloat32 ? 4 : 2);
  if (output == nullptr || bytes < static_cast<int64_t>(2 * kHugePage)) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(output) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(output) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: failing is no error
#else
  (void)output, (void)n_elements, (void)dtype;
#endif
}

}  // namespace

const char* cpu_level() { return current_level.load()->name; }

bool set_cpu_level(const char* name) {
  for (const Level& level : kLevels) {
    if (std::strcmp(level.name, name) == 0 && level.supported()) {
      current_level = &level;
      return true;
    }
  }
  return false;
}

int row_norm_forward_cpu(const RowNormForward& args) {
  const int64_t n = args.n_rows * args.n_cols;
  ask_for_huge_pages(args.y, n, args.y_dtype);
  ask_for_huge_pages(args.z, n, args.z_dtype);
  return current_level.load()->row_norm_forward(args);
}

int row_norm_backward_cpu(const RowNormBackward& args) {
  const int64_t n = args.n_rows * args.n_cols;
  ask_for_huge_pages(args.dx, n, args.x_dtype);
  ask_for_huge_pages(args.dresidual, n, args.residual_dtype);
  return current_level.load()->row_norm_backward(args);
}

int softmax_forward_cpu(const SoftmaxForward& args) {
  const int64_t n = args.n_rows * args.n_cols;
  ask_for_huge_pages(args.y, n, args.dtype);
  ask_for_huge_pages(args.p, n, args.dtype);
  return current_level.load()->softmax_forward(args);
}

int softmax_backward_cpu(const SoftmaxBackward& args) {
  ask_for_huge_pages(args.dscores, args.n_rows * args.n_cols, args.dtype);
  if (args.dmask) {
    const int64_t n_mask_rows = mask_partition(args.n_rows, args.n_cols, args.mask_rows).n_mask_rows;
    ask_for_huge_pages(args.dmask, n_mask_rows * args.n_cols, DType::kFloat32);
  }
  return current_level.load()->softmax_backward(args);
}

int rotary_cpu(const Rotary& args) {
  for (const RotaryTensor& tensor : args.tensors)
    ask_for_huge_pages(tensor.y, args.n_batch * tensor.n_heads * args.n_positions * args.head_dim, args.dtype);
  return current_level.load()->rotary(args);
}

int glu_forward_cpu(const GluForward& args) {
  ask_for_huge_pages(args.y, args.n_rows * args.n_cols, args.dtype);
  return current_level.load()->glu_forward(args);
}

int glu_backward_cpu(const GluBackward& args) {
  const int64_t last = args.n_rows - 1;
  ask_for_huge_pages(args.dgate, last * args.dgate_row_stride + args.n_cols, args.dtype);
  ask_for_huge_pages(args.dup, last * args.dup_row_stride + args.n_cols, args.dtype);
  return current_level.load()->glu_backward(args);
}

int cross_entropy_cpu(const CrossEntropy& args) {
  if (args.dlogits != args.logits) ask_for_huge_pages(args.dlogits, args.n_rows * args.n_cols, args.dtype);
  const int code = current_level.load()->cross_entropy(args);
  if (args.total) {
    double total = 0.0;
    for (int64_t i = 0; i < args.n_rows; ++i) total += args.loss[i];
    *args.total = static_cast<float>(total / static_cast<double>(args.divisor));
  }
  return code;
}

int add_to_sums_cpu(const AddToSums& args) {
  if (args.is_first) ask_for_huge_pages(args.rest, args.n, DType::kBFloat16);
  return current_level.load()->add_to_sums(args);
}

int64_t kept_labels(const int64_t* labels, int64_t n_rows, int64_t n_classes, int64_t ignore_index) {
  int64_t n_kept = 0;
  bool is_wrong = false;
  for (int64_t i = 0; i < n_rows; ++i) {
    const bool is_kept = labels[i] != ignore_index;
    n_kept += is_kept;
    is_wrong |= is_kept && (labels[i] < 0 || labels[i] >= n_classes);
  }
  return is_wrong ? -1 : n_kept;
}

// The numbers of a step are computed here, by the baseline: its functions of <cmath> and common/adam.h are inline ones.
// Parameters of a group that have taken the same number of steps share them.
int adam_step_cpu(const AdamStep& args) {
  if (args.found_inf && *args.found_inf != 0.0f) return 0;
  const AdamCounter* previous = nullptr;
  for (int64_t i = 0; i < args.n_counters; ++i) {
    const AdamCounter& counter = args.counters[i];
    float& step = *reinterpret_cast<float*>(counter.step);
    if (previous && previous->group == counter.group &&
        *reinterpret_cast<const float*>(previous->step) == step + 1.0f) {
      step += 1.0f;
      args.scalars[i] = args.scalars[i - 1];
    } else {
      args.scalars[i] = prepare_adam(counter, args.groups[counter.group], args.grad_scale, nullptr);
    }
    previous = &counter;
  }
  return current_level.load()->adam_step(args);
}

int adam_squares_cpu(const AdamSquares& args) { return current_level.load()->adam_squares(args); }

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t slot_floats(int64_t n_cols) { return ceil_div(n_cols, 16) * 16; }
int64_t square_root(int64_t n) { return static_cast<int64_t>(std::sqrt(static_cast<double>(n))); }

// The rows of a part of n_rows: so many, or more, where at most 256 parts and 16 MiB for each gradient, of
// floats_per_part a part, bound the workspace.
int64_t rows_of_part(int64_t rows, int64_t n_rows, int64_t floats_per_part) {
  constexpr int64_t kMaxParts = 256, kMaxFloats = int64_t{1} << 22;
  return std::max(rows, ceil_div(n_rows, std::clamp(kMaxFloats / floats_per_part, int64_t{1}, kMaxParts)));
}

}  // namespace

// About sqrt(n_rows) parts of sqrt(n_rows) rows: both the sums within a part and the sum over parts stay short chains,
// whose rounding errors add up to 1e-5 over a million rows; 64 parts keep 64 threads busy from 4096 rows on.
RowPartition row_partition(int64_t n_rows, int64_t n_cols) {
  RowPartition partition{0, 0, slot_floats(n_cols)};
  if (n_rows <= 0 || n_cols <= 0) return partition;
  partition.rows_per_part = rows_of_part(square_root(n_rows), n_rows, partition.slot_floats);
  partition.n_parts = ceil_div(n_rows, partition.rows_per_part);
  return partition;
}

int64_t row_norm_workspace_cpu(int64_t n_rows, int64_t n_cols, int n_wanted) {
  const RowPartition partition = row_partition(n_rows, n_cols);
  return partition.n_parts * partition.slot_floats * n_wanted;
}

int64_t glu_workspace_cpu(int64_t n_rows, int64_t n_cols) { return row_norm_workspace_cpu(n_rows, n_cols, 1); }

// Few rows of the mask: about sqrt(n_sharing) parts, as above. From 64 rows of the mask on they keep the threads busy
// by themselves, and parts only keep the chains of additions within 1024.
MaskPartition mask_partition(int64_t n_rows, int64_t n_cols, const MaskRows& mask_rows) {
  constexpr int64_t kManyMaskRows = 64, kLongestChain = 1024;
  MaskPartition partition{1, 0, 0, 0, slot_floats(n_cols)};
  if (n_rows <= 0 || n_cols <= 0) return partition;
  for (int i = 0; i < 4; ++i)
    if (mask_rows.strides[i] != 0) partition.n_mask_rows *= mask_rows.sizes[i];
  partition.n_sharing = n_rows / partition.n_mask_rows;
  const int64_t rows = partition.n_mask_rows >= kManyMaskRows ? kLongestChain : square_root(partition.n_sharing);
  partition.rows_per_part = rows_of_part(rows, partition.n_sharing, partition.n_mask_rows * partition.slot_floats);
  partition.n_parts = ceil_div(partition.n_sharing, partition.rows_per_part);
  return partition;
}

int64_t softmax_workspace_cpu(int64_t n_rows, int64_t n_cols, const MaskRows& mask_rows) {
  const MaskPartition partition = mask_partition(n_rows, n_cols, mask_rows);
  return partition.n_parts > 1 ? partition.n_mask_rows * partition.n_parts * partition.slot_floats : 0;
}

}  // namespace onetrip
