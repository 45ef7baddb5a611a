// Runs the CPU kernels of row_norm over odd shapes in buffers of the exact size, each of its own, so that
// AddressSanitizer sees every access outside them; and compares the levels with each other. Prints the levels that ran;
// exits 1 on a difference.
#include <cstring>
#include <vector>

#include "cpu/dropout.h"  // its namespace here is onetrip::ONETRIP_LEVEL of the test's own
#include "cpu_driver.h"

namespace {

using namespace onetrip;

struct Case {
  int64_t n_rows, n_cols;
  DType half;  // of x, y and the weights; the residual and z are float32
  Norm norm;
  uint32_t threshold;
  bool is_aligned;
};

std::vector<double> run(const Case& c) {
  const DType f = DType::kFloat32, h = c.half;
  const int64_t n = c.n_rows * c.n_cols;
  const auto array = [&](int64_t size, DType dtype) { return Array(size, dtype, c.is_aligned); };
  Array x = array(n, h), residual = array(c.n_cols, f), bias = array(c.n_cols, h), weight = array(c.n_cols, h);
  Array norm_bias = array(c.n_cols, f), y = array(n, h), z = array(n, f), mean = array(c.n_rows, f);
  Array rstd = array(c.n_rows, f), dy = array(n, h), dz = array(n, f), dx = array(n, h), dresidual = array(n, f);
  Array dbias = array(c.n_cols, h), dweight = array(c.n_cols, h), dnorm_bias = array(c.n_cols, f);
  x.fill(1), residual.fill(2), bias.fill(3), weight.fill(4), norm_bias.fill(5), dy.fill(6), dz.fill(7);
  const bool has_norm = c.norm != Norm::kNone, is_layer = c.norm == Norm::kLayer;
  const auto stats = [](Array& a, bool wanted) { return wanted ? static_cast<float*>(a.data()) : nullptr; };

  RowNormForward forward = {};
  forward.n_rows = c.n_rows, forward.n_cols = c.n_cols;
  forward.x = x.data(), forward.residual = residual.data(), forward.bias = bias.data();
  forward.weight = weight.data(), forward.norm_bias = norm_bias.data();
  forward.y = has_norm ? y.data() : nullptr, forward.z = z.data();
  forward.mean = stats(mean, is_layer), forward.rstd = stats(rstd, has_norm);
  forward.x_row_stride = c.n_cols, forward.residual_row_stride = 0;
  forward.x_dtype = forward.bias_dtype = forward.weight_dtype = forward.y_dtype = h;
  forward.residual_dtype = forward.norm_bias_dtype = forward.z_dtype = forward.n_dtype = f;
  forward.norm = c.norm, forward.eps = 1e-3f;
  forward.dropout = {c.threshold, 1.25f, 11, (uint64_t{1} << 32) + 3, nullptr};
  if (row_norm_forward_cpu(forward) != 0) exit(1);

  Array workspace = array(row_norm_workspace_cpu(c.n_rows, c.n_cols, has_norm ? 3 : 1), f);
  RowNormBackward backward = {};
  backward.n_rows = c.n_rows, backward.n_cols = c.n_cols;
  backward.dy = has_norm ? dy.data() : nullptr, backward.dz = dz.data(), backward.z = has_norm ? z.data() : nullptr;
  backward.mean = forward.mean, backward.rstd = forward.rstd, backward.weight = weight.data();
  backward.dx = dx.data(), backward.dresidual = dresidual.data(), backward.dbias = dbias.data();
  backward.dweight = has_norm ? dweight.data() : nullptr, backward.dnorm_bias = has_norm ? dnorm_bias.data() : nullptr;
  backward.workspace = static_cast<float*>(workspace.data());
  backward.dy_row_stride = backward.dz_row_stride = backward.z_row_stride = c.n_cols;
  backward.x_dtype = backward.bias_dtype = backward.weight_dtype = backward.y_dtype = h;
  backward.residual_dtype = backward.norm_bias_dtype = backward.z_dtype = f;
  backward.norm = c.norm, backward.dropout = forward.dropout;
  if (row_norm_backward_cpu(backward) != 0) exit(1);

  std::vector<double> results;
  for (Array* output : {&y, &z, &dx, &dresidual, &dbias, &dweight, &dnorm_bias}) {
    const bool is_norms = output == &y || output == &dweight || output == &dnorm_bias;
    if (is_norms && !has_norm) continue;
    for (double value : output->values()) results.push_back(value);
  }
  if (has_norm && c.threshold == 0) {  // a norm alone
    Array sums = array(row_norm_workspace_cpu(c.n_rows, c.n_cols, 2), f);
    Array dx_alone = array(n, h), dweight_alone = array(c.n_cols, h), dnorm_bias_alone = array(c.n_cols, f);
    backward.dz = nullptr, backward.dresidual = nullptr, backward.dbias = nullptr;
    backward.dx = dx_alone.data(), backward.dweight = dweight_alone.data();
    backward.dnorm_bias = dnorm_bias_alone.data(), backward.workspace = static_cast<float*>(sums.data());
    if (row_norm_backward_cpu(backward) != 0) exit(1);
    for (Array* output : {&dx_alone, &dweight_alone, &dnorm_bias_alone})
      for (double value : output->values()) results.push_back(value);
  }
  return results;
}

// Whether the mask's bits for these columns of these rows are Philox's.
bool mask_is_philox(int64_t first_row, int n_rows, int64_t begin, int64_t end, int64_t n_cols) {
  using onetrip::ONETRIP_LEVEL::DropoutMask;
  std::vector<float> buffer(DropoutMask::kFloats);
  const uint64_t seed = 0x123456789abcdef0u, offset = 0xfedcba9876543210u;
  DropoutMask mask({1, 1.0f, seed, offset, nullptr}, buffer.data());
  mask.fill(first_row, n_rows, begin, end, n_cols);
  for (int k = 0; k < n_rows; ++k)
    for (int64_t c = begin; c < end; ++c) {
      const uint64_t e = static_cast<uint64_t>(first_row + k) * n_cols + c;
      if (mask.row(k)[c - begin] != random_bits(philox(seed, offset, e / 8), e % 8) >> 16) return false;
    }
  return true;
}

}  // namespace

int main() {
  // Elements around 2^35, where the group index passes 2^32, lie within the runs of the last two.
  if (!mask_is_philox(3, 16, 0, 63, 63) || !mask_is_philox(5, 4, 1024, 2047, 4099) ||
      !mask_is_philox(34359737, 4, 0, 1000, 1000) || !mask_is_philox(6871947, 1, 3000, 4000, 5000)) {
    std::printf("Philox differs\n");
    return 1;
  }
  std::vector<Case> cases;
  for (int64_t n_cols : {1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 65, 127, 1023, 1031, 4099})
    for (int64_t n_rows : {1, 2, 5, 33})
      for (DType half : {DType::kFloat32, DType::kBFloat16})
        for (Norm norm : {Norm::kNone, Norm::kLayer, Norm::kRms})
          for (uint32_t threshold : {0u, 1u << 14, 1u << 16})
            cases.push_back({n_rows, n_cols, half, norm, threshold, false});
  // Outputs that pass the caches.
  cases.push_back({2 * kStreamed / 1120 + 1, 1120, DType::kFloat32, Norm::kLayer, 1u << 14, true});
  cases.push_back({2048, 1024, DType::kFloat32, Norm::kNone, 0, true});  // of huge pages too
  cases.push_back({4 * kStreamed / 1024, 1024, DType::kBFloat16, Norm::kRms, 0, true});
  // A bfloat16 may round to either side: 2^-7.
  return !levels_agree(cases, run, [](const Case& c) { return c.half == DType::kFloat32 ? 1e-4 : 1e-2; });
}
