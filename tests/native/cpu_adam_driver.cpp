// Runs the CPU kernels of Adam over odd sizes in arrays of the exact size, each of its own, so that AddressSanitizer
// sees every access outside them; and compares the levels with each other. Prints the levels that ran; exits 1 on a
// difference.
#include <memory>

#include "cpu_driver.h"

namespace {

using namespace onetrip;

// n_rows parameters of n_cols elements and one of n_cols + 1.
struct Case {
  int64_t n_rows, n_cols;
  DType param_dtype, grad_dtype;
  bool is_8bit, is_aligned;
  float last;  // the last gradient of each parameter
  AdamRounding rounding = AdamRounding::kNearest;
};

int64_t address(Array& array) { return reinterpret_cast<int64_t>(array.data()); }

// Bytes; the first where arrays of their size start.
class Codes {
 public:
  Codes(int64_t n, uint8_t value) : bytes_(new uint8_t[n]), n_(n) { memset(bytes_.get(), value, n); }
  int64_t address() { return reinterpret_cast<int64_t>(bytes_.get()); }
  void append_to(std::vector<double>& results) {
    for (int64_t i = 0; i < n_; ++i) results.push_back(bytes_[i]);
  }

 private:
  std::unique_ptr<uint8_t[]> bytes_;
  int64_t n_;
};

struct Parameter {
  Array param, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  Codes exp_avg_codes, exp_avg_sq_codes, residual;
  float step = 3.0f;
  Parameter(int64_t n, const Case& c)
      : param(n, c.param_dtype, c.is_aligned),
        grad(n, c.grad_dtype, c.is_aligned),
        exp_avg(c.is_8bit ? 0 : n, DType::kFloat32, c.is_aligned),
        exp_avg_sq(c.is_8bit ? 0 : n, DType::kFloat32, c.is_aligned),
        exp_avg_scale(blocks(n, c), DType::kFloat32, c.is_aligned),
        exp_avg_sq_scale(blocks(n, c), DType::kFloat32, c.is_aligned),
        exp_avg_codes(c.is_8bit ? n : 0, 127),
        exp_avg_sq_codes(c.is_8bit ? n : 0, 0),
        residual(residual_bytes(c) * n, 3) {
    param.fill(1), grad.fill(2);
    for (Array* states : {&exp_avg, &exp_avg_sq}) memset(states->data(), 0, (c.is_8bit ? 0 : n) * 4);
    for (Array* scales : {&exp_avg_scale, &exp_avg_sq_scale}) memset(scales->data(), 0, blocks(n, c) * 4);
    if (c.last != 0.0f && c.grad_dtype == DType::kFloat32)
      memcpy(static_cast<char*>(grad.data()) + (n - 1) * 4, &c.last, 4);
  }
  static int64_t residual_bytes(const Case& c) {
    return c.rounding == AdamRounding::kResidual8 ? 1 : c.rounding == AdamRounding::kResidual16 ? 2 : 0;
  }
  static int64_t blocks(int64_t n, const Case& c) { return c.is_8bit ? (n + kAdamBlock - 1) / kAdamBlock : 0; }
};

// NaN and Inf become numbers that can be compared.
double comparable(double value) { return value != value ? 1e9 : value > 1e30 ? 2e9 : value < -1e30 ? -2e9 : value; }

std::vector<double> run(const Case& c) {
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::vector<AdamTensor> tensors;
  std::vector<AdamChunk> chunks;
  std::vector<AdamCounter> counters;
  for (int64_t i = 0; i <= c.n_rows; ++i) {
    const int64_t n = c.n_cols + (i == c.n_rows);
    parameters.push_back(std::make_unique<Parameter>(n, c));
    Parameter& p = *parameters.back();
    tensors.push_back({address(p.param), address(p.grad), c.is_8bit ? p.exp_avg_codes.address() : address(p.exp_avg),
                       c.is_8bit ? p.exp_avg_sq_codes.address() : address(p.exp_avg_sq), address(p.exp_avg_scale),
                       address(p.exp_avg_sq_scale), n, i,
                       c.rounding == AdamRounding::kStochastic ? (int64_t{1} << 35) - 128 : p.residual.address(), i});
    for (int64_t first = 0; first < n; first += kAdamChunk) chunks.push_back({i, first});
    counters.push_back({reinterpret_cast<int64_t>(&p.step), i % 2});
  }
  const AdamKind kind = {c.param_dtype, c.grad_dtype, c.is_8bit, c.rounding, 0, static_cast<int64_t>(chunks.size())};
  const AdamGroup groups[] = {{1e-2, 0.9, 0.999, 1e-8, 0.1, true, false, nullptr},
                              {1e-1, 0.5, 0.9, 1e-6, 0.1, false, true, nullptr}};
  std::vector<AdamScalars> scalars(counters.size());
  AdamStep args = {
      tensors.data(), chunks.data(), &kind,  1, counters.data(), static_cast<int64_t>(counters.size()), groups, 2,
      scalars.data(), nullptr,       nullptr};
  const float found_inf = 1.0f, none_found = 0.0f, grad_scale = 4.0f;
  for (const float* found : {&none_found, &found_inf, &none_found}) {
    args.found_inf = found, args.grad_scale = &grad_scale;
    if (adam_step_cpu(args) != 0) exit(1);
  }
  std::vector<double> results;
  for (const auto& p : parameters) {
    results.push_back(p->step);
    for (Array* array : {&p->param, &p->exp_avg, &p->exp_avg_sq, &p->exp_avg_scale, &p->exp_avg_sq_scale})
      for (double value : array->values()) results.push_back(comparable(value));
    p->exp_avg_codes.append_to(results);
    p->exp_avg_sq_codes.append_to(results);
    p->residual.append_to(results);
  }
  return results;
}

}  // namespace

int main() {
  const DType types[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  std::vector<Case> cases;
  for (bool is_8bit : {true, false})
    for (bool is_aligned : {true, false})
      for (int64_t n : {1, 5, 15, 17, 127, 128, 255, 4096})
        for (DType param : types) {
          for (DType grad : types) cases.push_back({n < 128 ? 3 : 1, n, param, grad, is_8bit, is_aligned, 0.0f});
          const int n_roundings = param == DType::kFloat32 ? 1 : param == DType::kFloat16 ? 3 : 4;
          for (int rounding = 1; rounding < n_roundings; ++rounding)
            cases.push_back({1, n, param, DType::kFloat32, is_8bit, is_aligned, 0.0f, AdamRounding(rounding)});
        }
  const float infinity = __builtin_inff();
  for (float last : {infinity, -infinity, __builtin_nanf(""), 3e38f, 1e-44f})
    for (bool is_8bit : {true, false}) cases.push_back({2, 200, DType::kFloat32, DType::kFloat32, is_8bit, true, last});
  // On several threads.
  cases.push_back({600, 100, DType::kFloat32, DType::kBFloat16, false, false, 0.0f});
  for (AdamRounding rounding : {AdamRounding::kNearest, AdamRounding::kResidual8, AdamRounding::kStochastic})
    cases.push_back({1, 70'001, DType::kBFloat16, DType::kFloat32, true, false, 0.0f, rounding});
  return !levels_agree(cases, run, [](const Case&) { return 0.0; });  // to the bit
}
