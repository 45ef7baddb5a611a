// Runs the CPU kernels of glu and of rotary over odd shapes and strides in buffers of the exact size, each of its own,
// so that AddressSanitizer sees every access outside them; and compares the levels with each other. Prints the levels
// that ran; exits 1 on a difference.
#include "cpu_driver.h"

namespace {

using namespace onetrip;

enum class Form { kGlu, kPacked, kPairs, kBias, kBiasNotWanted, kUpNotWanted, kRotary, kInterleaved, kToOtherDtype };

struct Case {
  int64_t n_rows, n_cols;
  DType dtype;
  Activation activation;
  Form form;
  bool is_aligned;
  double dropped = 0;  // share of y
};

std::vector<double> glu(const Case& c) {
  const int64_t n = c.n_rows * c.n_cols;
  const bool is_packed = c.form == Form::kPacked || c.form == Form::kPairs;
  const bool has_bias = c.form == Form::kBias || c.form == Form::kBiasNotWanted;
  const int64_t stride = is_packed ? 2 * c.n_cols : c.n_cols;
  Array gate(n + (is_packed ? n : 0), c.dtype, c.is_aligned), up(n, c.dtype, c.is_aligned), y(n, c.dtype, c.is_aligned),
      dy(n, c.dtype, c.is_aligned), dgate(n + (is_packed ? n : 0), c.dtype, c.is_aligned), dup(n, c.dtype, true),
      bias(c.n_cols, DType::kFloat32, false), dbias(c.n_cols, DType::kFloat32, false);
  gate.fill(1), up.fill(2), dy.fill(3), bias.fill(4);
  const auto second = [&](Array& packed, Array& alone) {
    const int64_t first = c.form == Form::kPairs ? 1 : c.n_cols;
    return has_bias    ? nullptr
           : is_packed ? static_cast<char*>(packed.data()) + first * (c.dtype == DType::kFloat32 ? 4 : 2)
                       : static_cast<char*>(alone.data());
  };
  GluForward forward = {};
  forward.n_rows = c.n_rows, forward.n_cols = c.n_cols;
  forward.gate = gate.data(), forward.up = second(gate, up), forward.bias = has_bias ? bias.data() : nullptr;
  forward.y = y.data(), forward.gate_row_stride = forward.up_row_stride = stride;
  forward.dtype = c.dtype, forward.activation = c.activation;
  forward.clamped = {0.75f, 1.702f, 1.0f, c.form == Form::kPairs};
  const Dropout dropout = {static_cast<uint32_t>(65536 * c.dropped), static_cast<float>(1 / (1 - c.dropped)), 3, 4,
                           nullptr};
  forward.dropout = dropout;
  if (glu_forward_cpu(forward) != 0) exit(1);

  Array workspace(glu_workspace_cpu(c.n_rows, c.n_cols), DType::kFloat32, true);
  GluBackward backward = {};
  backward.n_rows = c.n_rows, backward.n_cols = c.n_cols;
  backward.dy = dy.data(), backward.gate = gate.data(), backward.up = forward.up, backward.bias = forward.bias;
  backward.dgate = dgate.data(), backward.dup = c.form == Form::kUpNotWanted ? nullptr : second(dgate, dup);
  backward.dbias = c.form == Form::kBias ? dbias.data() : nullptr;
  backward.workspace = static_cast<float*>(workspace.data());
  backward.dy_row_stride = c.n_cols;
  backward.gate_row_stride = backward.up_row_stride = backward.dgate_row_stride = backward.dup_row_stride = stride;
  backward.dtype = c.dtype, backward.activation = c.activation, backward.clamped = forward.clamped;
  backward.dropout = dropout;
  if (glu_backward_cpu(backward) != 0) exit(1);

  std::vector<double> results;
  for (Array* output : {&y, &dgate, &dup, &dbias}) {
    if ((output == &dup && (is_packed || !backward.dup)) || (output == &dbias && !backward.dbias)) continue;
    for (double value : output->values()) results.push_back(value);
  }
  return results;
}

// n_rows positions of two sequences, 3 heads of q and 1 of k; a third of the columns of wide heads is copied.
std::vector<double> rotary(const Case& c) {
  const int64_t head_dim = 2 * c.n_cols, n_rotated = head_dim > 8 ? head_dim / 3 * 2 : head_dim;
  Array cos(c.n_rows * n_rotated, DType::kFloat32, false), sin(c.n_rows * n_rotated, DType::kFloat32, false);
  cos.fill(1), sin.fill(2);
  std::vector<double> results;
  for (bool inverse : {false, true}) {
    Rotary args = {};
    args.n_batch = 2, args.n_positions = c.n_rows, args.head_dim = head_dim, args.n_rotated = n_rotated;
    args.cos = cos.data(), args.sin = sin.data();
    args.cos_strides = args.sin_strides = {0, 0, n_rotated};
    args.dtype = args.y_dtype = c.dtype, args.interleaved = c.form == Form::kInterleaved, args.inverse = inverse;
    if (c.form == Form::kToOtherDtype) args.y_dtype = c.dtype == DType::kFloat32 ? DType::kBFloat16 : DType::kFloat32;
    const int64_t n = 2 * c.n_rows * head_dim;
    Array q(3 * n, c.dtype, c.is_aligned), k(n, c.dtype, c.is_aligned), q_out(3 * n, args.y_dtype, c.is_aligned),
        k_out(n, args.y_dtype, c.is_aligned);
    q.fill(3), k.fill(4);
    // q: heads of a position next to each other; k: positions of a head.
    const RotaryStrides of_q = {3 * c.n_rows * head_dim, head_dim, 3 * head_dim};
    const RotaryStrides of_k = {c.n_rows * head_dim, c.n_rows * head_dim, head_dim};
    args.tensors[0] = {q.data(), q_out.data(), 3, of_q, of_q};
    args.tensors[1] = {k.data(), k_out.data(), 1, of_k, of_k};
    if (rotary_cpu(args) != 0) exit(1);
    for (Array* output : {&q_out, &k_out})
      for (double value : output->values()) results.push_back(value);
  }
  return results;
}

std::vector<double> run(const Case& c) { return c.form >= Form::kRotary ? rotary(c) : glu(c); }

}  // namespace

int main() {
  const DType f = DType::kFloat32, b = DType::kBFloat16;
  const auto forms = {Form::kGlu, Form::kPacked, Form::kBias, Form::kBiasNotWanted, Form::kUpNotWanted};
  std::vector<Case> cases;
  for (int64_t n_cols : {1, 3, 15, 17, 33, 65, 127, 1031})
    for (int64_t n_rows : {1, 5, 33})
      for (DType dtype : {f, b}) {
        for (Form form : forms)
          for (int activation = 0; activation < 6; ++activation)
            cases.push_back({n_rows, n_cols, dtype, Activation(activation), form, false, activation % 2 * 0.25});
        for (Form form : {Form::kGlu, Form::kPacked, Form::kUpNotWanted, Form::kPairs})
          for (double dropped : {0.0, 0.25})
            cases.push_back({n_rows, n_cols, dtype, Activation::kClampedSilu, form, false, dropped});
        for (Form form : {Form::kRotary, Form::kInterleaved, Form::kToOtherDtype})
          if (n_cols % 3 == 0 || n_cols < 4) cases.push_back({n_rows, n_cols, dtype, Activation::kSilu, form, false});
      }
  // Outputs that pass the caches.
  for (Form form : forms) {
    cases.push_back({2 * kStreamed / 1131 + 1, 1131, f, Activation::kSilu, form, false});
    cases.push_back({2 * kStreamed / 1136 + 1, 1136, f, Activation::kGelu, form, true});
  }
  for (Form form : {Form::kGlu, Form::kPairs})
    for (int64_t n_cols : {1131, 1136})
      cases.push_back({2 * kStreamed / n_cols + 1, n_cols, f, Activation::kClampedSilu, form, true});
  for (Form form : {Form::kRotary, Form::kInterleaved, Form::kToOtherDtype})
    cases.push_back({kStreamed / 4 / 48 + 1, 48, f, Activation::kSilu, form, true});
  // A bfloat16 may round to either side: 2^-7. Sums over many rows add up.
  return !levels_agree(cases, run, [](const Case& c) {
    return c.dtype == DType::kFloat32 && c.form != Form::kToOtherDtype ? 1e-4 : 1e-2;
  });
}
