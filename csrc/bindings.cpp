// The pybind11 module onetrip._native: tensors and plain numbers in, error codes out. Torch is met on the Python side
// only: of a tensor nothing is known but that it has data_ptr().
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "common/adam.h"
#include "eager/glu.h"
#include "eager/rotary.h"
#include "eager/row_norm.h"
#include "eager/softmax.h"
#include "launch.h"
#include "operands.h"
#include "tensor_look.h"
#include "without_cuda.h"

namespace py = pybind11;

namespace {

using onetrip::Arguments;
using onetrip::DType;
using onetrip::make_function;
using onetrip::Norm;
using onetrip::operands_reader;
using onetrip::returned;
using onetrip::state_of;
using onetrip::tensor_look;

// As dropout_threshold and dropout_scale of python_pkg/onetrip/reference/philox.py; nearbyint rounds half to even too.
onetrip::Dropout dropout(double p) {
  const double rounded = std::nearbyint(p * 65536.0);
  const double threshold = p > 0.0 && p < 1.0 ? std::clamp(rounded, 1.0, 65535.0) : rounded;
  const double scale = threshold < 65536.0 ? 65536.0 / (65536.0 - threshold) : 0.0;
  return {static_cast<uint32_t>(threshold), static_cast<float>(scale), 0, 0, nullptr};
}

// Operands, outputs and gradients are the NamedTuples of python_pkg/onetrip/reference/row_norm.py, in their order.
void read(onetrip::RowNormForward& call, Arguments& from) {
  from.read_group(call.x, call.residual, call.bias, call.weight, call.norm_bias);
  from.read(call.x_row_stride, call.residual_row_stride);
  from.read_group(call.y, call.z, call.mean, call.rstd);
  from.read(call.dropout);
}

// Where rstd is None it follows mean, or a centred z (eager/row_norm.h).
void read(onetrip::RowNormBackward& call, Arguments& from) {
  from.read_group(call.dy, call.dz, call.z, call.mean, call.rstd, call.weight);
  from.read(call.dy_row_stride, call.dz_row_stride, call.z_row_stride);
  if (call.z && !call.rstd)
    call.rstd = call.mean ? call.mean + call.n_rows : static_cast<const float*>(call.z) + call.n_rows * call.n_cols;
  from.read_group(call.dx, call.dresidual, call.dbias, call.dweight, call.dnorm_bias);
  from.read(call.workspace, call.dropout);
}

void read(onetrip::SoftmaxForward& call, Arguments& from) {
  from.read(call.scores, call.scores_row_stride, call.mask, call.y, call.p, call.n_queries, call.dropout);
}

void read(onetrip::SoftmaxBackward& call, Arguments& from) {
  from.read(call.dy, call.dy_row_stride, call.p, call.p_row_stride, call.dscores, call.dmask, call.workspace,
            call.n_queries);
}

// Columns of a tensor: (tensor or None, first column, row stride).
template <typename T>
void read_columns(Arguments& from, DType dtype, T*& columns, int64_t& row_stride) {
  columns = from.tensor<T>();
  const int64_t first = from.integer() * (dtype == DType::kFloat32 ? 4 : 2);
  row_stride = from.integer();
  if (columns) columns = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(columns) + first);
}

void read(onetrip::GluForward& call, Arguments& from) {
  read_columns(from, call.dtype, call.gate, call.gate_row_stride);
  read_columns(from, call.dtype, call.up, call.up_row_stride);
  from.read(call.bias, call.y, call.dropout);
}

void read(onetrip::GluBackward& call, Arguments& from) {
  read_columns(from, call.dtype, call.dy, call.dy_row_stride);
  read_columns(from, call.dtype, call.gate, call.gate_row_stride);
  read_columns(from, call.dtype, call.up, call.up_row_stride);
  from.read(call.bias);
  read_columns(from, call.dtype, call.dgate, call.dgate_row_stride);
  read_columns(from, call.dtype, call.dup, call.dup_row_stride);
  from.read(call.dbias, call.workspace, call.dropout);
}

// n_rows, n_cols, logits, row stride, labels, loss, stats, has_stats, entropy, weights, weight_stride,
// entropy_weights, dlogits, total, divisor. weights may be one float. The losses of which the total is wanted follow
// the stats where they are None: an allocation less.
void read(onetrip::CrossEntropy& call, Arguments& from) {
  from.read(call.n_rows, call.n_cols, call.logits, call.logits_row_stride, call.labels, call.loss, call.stats);
  call.has_stats = from.integer() != 0;
  from.read(call.entropy);
  call.weights = from.tensor_or<const float>(call.weight);
  from.read(call.weight_stride, call.entropy_weights, call.dlogits, call.total, call.divisor);
  if (call.total && !call.loss) call.loss = call.stats + 2 * call.n_rows;
}

// Sequences share cos and sin of 2 dimensions (positions, columns), and of 3 with a first one of size 1.
onetrip::RotaryStrides table_strides(Arguments strides, bool is_shared) {
  const int64_t batch = strides.left() == 3 ? strides.integer() : 0;
  return {is_shared ? 0 : batch, 0, strides.integer()};
}

// cos, sin, shape, strides of cos, of sin; then for q and for k: x, y, shape, strides of x, of y; None as x: none
// there.
void read(onetrip::Rotary& call, Arguments& from) {
  from.read(call.cos, call.sin);
  Arguments table = from.group();
  const bool is_shared = table.left() == 2 || table.integer() == 1;
  table.integer();
  table.read(call.n_rotated);
  call.cos_strides = table_strides(from.group(), is_shared);
  call.sin_strides = table_strides(from.group(), is_shared);
  for (onetrip::RotaryTensor& tensor : call.tensors) {
    from.read(tensor.x);
    if (!tensor.x) continue;
    from.read(tensor.y);
    from.read_group(call.n_batch, tensor.n_heads, call.n_positions, call.head_dim);
    for (onetrip::RotaryStrides* strides : {&tensor.x_strides, &tensor.y_strides})
      from.group().read(strides->batch, strides->head, strides->position);
  }
}

template <auto cpu, auto cuda, typename Call>
PyObject* launch(PyObject* plan, PyObject* const* values, Py_ssize_t n) {
  return returned([&] {
    Call call = state_of<Call>(plan);
    Arguments from(values, n);
    const int device = static_cast<int>(from.integer());
    void* stream = reinterpret_cast<void*>(from.integer());
    from.read(call.n_rows, call.n_cols);
    read(call, from);
    from.end();
    py::gil_scoped_release without_gil;
    return device < 0 ? cpu(call) : cuda(call, device, stream);
  });
}

// The same of a family that runs on the CPU alone and reads all arguments by itself.
template <auto cpu, typename Call>
PyObject* launch_on_cpu(PyObject* plan, PyObject* const* values, Py_ssize_t n) {
  return returned([&] {
    Call call = state_of<Call>(plan);
    Arguments from(values, n);
    read(call, from);
    from.end();
    py::gil_scoped_release without_gil;
    return cpu(call);
  });
}

// A Python function of one call's device, stream, sizes and tensors. What a plan fixes (dtypes, numbers) is in it
// already.
template <auto cpu, auto cuda, typename Call>
py::object launcher(const Call& plan) {
  return make_function<launch<cpu, cuda, Call>>(plan);
}

py::object row_norm_forward(int x_dtype, int residual_dtype, int bias_dtype, int weight_dtype, int norm_bias_dtype,
                            int z_dtype, int n_dtype, int y_dtype, int norm, bool center_z, double eps,
                            double weight_offset, double dropout_p) {
  onetrip::RowNormForward args{};
  args.x_dtype = DType(x_dtype);
  args.residual_dtype = DType(residual_dtype);
  args.bias_dtype = DType(bias_dtype);
  args.weight_dtype = DType(weight_dtype);
  args.norm_bias_dtype = DType(norm_bias_dtype);
  args.z_dtype = DType(z_dtype);
  args.n_dtype = DType(n_dtype);
  args.y_dtype = DType(y_dtype);
  args.norm = Norm(norm);
  args.center_z = center_z;
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.dropout = dropout(dropout_p);
  return launcher<onetrip::row_norm_forward_cpu, onetrip::row_norm_forward_cuda>(args);
}

py::object row_norm_backward(int x_dtype, int residual_dtype, int bias_dtype, int weight_dtype, int norm_bias_dtype,
                             int z_dtype, int y_dtype, int norm, double weight_offset, double dropout_p) {
  onetrip::RowNormBackward args{};
  args.x_dtype = DType(x_dtype);
  args.residual_dtype = DType(residual_dtype);
  args.bias_dtype = DType(bias_dtype);
  args.weight_dtype = DType(weight_dtype);
  args.norm_bias_dtype = DType(norm_bias_dtype);
  args.z_dtype = DType(z_dtype);
  args.y_dtype = DType(y_dtype);
  args.norm = Norm(norm);
  args.weight_offset = static_cast<float>(weight_offset);
  args.dropout = dropout(dropout_p);
  return launcher<onetrip::row_norm_backward_cpu, onetrip::row_norm_backward_cuda>(args);
}

// Sizes slowest first, strides, at most 4 of each.
onetrip::MaskRows mask_rows(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                            int64_t col_stride = 1) {
  onetrip::MaskRows rows{{1, 1, 1, 1}, {0, 0, 0, 0}, col_stride};
  if (sizes.size() > 4 || sizes.size() != strides.size())
    throw std::invalid_argument("a mask has at most 4 dimensions");
  const size_t first = 4 - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    rows.sizes[first + i] = sizes[i];
    rows.strides[first + i] = strides[i];
  }
  return rows;
}

py::object softmax_forward(int dtype, double scale, double dropout_p, int mask_type,
                           const std::vector<int64_t>& mask_sizes, const std::vector<int64_t>& mask_strides,
                           int64_t mask_col_stride) {
  onetrip::SoftmaxForward args{};
  args.dtype = DType(dtype);
  args.scale = static_cast<float>(scale);
  args.mask_type = onetrip::MaskType(mask_type);
  args.mask_rows = mask_rows(mask_sizes, mask_strides, mask_col_stride);
  args.dropout = dropout(dropout_p);
  return launcher<onetrip::softmax_forward_cpu, onetrip::softmax_forward_cuda>(args);
}

py::object softmax_backward(int dtype, double scale, double dropout_p, const std::vector<int64_t>& mask_sizes,
                            const std::vector<int64_t>& mask_strides) {
  onetrip::SoftmaxBackward args{};
  args.dtype = DType(dtype);
  args.scale = static_cast<float>(scale);
  args.mask_rows = mask_rows(mask_sizes, mask_strides);
  args.has_dropout = dropout_p > 0.0;
  args.dropout_scale = dropout(dropout_p).scale;
  return launcher<onetrip::softmax_backward_cpu, onetrip::softmax_backward_cuda>(args);
}

// limit, alpha, up_offset, interleaved.
using ClampedNumbers = std::tuple<double, double, double, bool>;

template <typename Call>
Call glu_plan(int dtype, int bias_dtype, int activation, double dropout_p, const ClampedNumbers& numbers) {
  Call args{};
  args.dtype = DType(dtype);
  args.bias_dtype = DType(bias_dtype);
  args.activation = onetrip::Activation(activation);
  const auto& [limit, alpha, up_offset, interleaved] = numbers;
  args.clamped = {static_cast<float>(limit), static_cast<float>(alpha), static_cast<float>(up_offset), interleaved};
  args.dropout = dropout(dropout_p);
  return args;
}

py::object glu_forward(int dtype, int bias_dtype, int activation, double dropout_p, const ClampedNumbers& numbers) {
  using Call = onetrip::GluForward;
  const auto plan = glu_plan<Call>(dtype, bias_dtype, activation, dropout_p, numbers);
  return launcher<onetrip::glu_forward_cpu, onetrip::no_cuda_kernel<Call>>(plan);
}

// draws: whether the pass needs the mask; else it multiplies by the dropout's scale alone.
py::object glu_backward(int dtype, int bias_dtype, int activation, double dropout_p, const ClampedNumbers& numbers,
                        bool draws) {
  using Call = onetrip::GluBackward;
  auto plan = glu_plan<Call>(dtype, bias_dtype, activation, dropout_p, numbers);
  if (!draws) plan.dropout.threshold = 0;
  return launcher<onetrip::glu_backward_cpu, onetrip::no_cuda_kernel<Call>>(plan);
}

int64_t softmax_workspace(int device, int64_t n_rows, int64_t n_cols, const std::vector<int64_t>& mask_sizes,
                          const std::vector<int64_t>& mask_strides) {
  const onetrip::MaskRows rows = mask_rows(mask_sizes, mask_strides);
  return device < 0 ? onetrip::softmax_workspace_cpu(n_rows, n_cols, rows)
                    : onetrip::softmax_workspace_cuda(n_rows, n_cols, rows);
}

py::object cross_entropy(int dtype, int64_t ignore_index, double label_smoothing, double softcap,
                         double lse_square_scale, double scale) {
  onetrip::CrossEntropy args{};
  args.dtype = DType(dtype);
  args.ignore_index = ignore_index;
  args.label_smoothing = static_cast<float>(label_smoothing);
  args.softcap = static_cast<float>(softcap);
  args.lse_square_scale = static_cast<float>(lse_square_scale);
  args.scale = static_cast<float>(scale);
  return make_function<launch_on_cpu<onetrip::cross_entropy_cpu, onetrip::CrossEntropy>>(args);
}

py::object rotary(int dtype, int y_dtype, int table_dtype, bool interleaved, bool inverse) {
  onetrip::Rotary args{};
  args.dtype = DType(dtype);
  args.y_dtype = DType(y_dtype);
  args.table_dtype = DType(table_dtype);
  args.interleaved = interleaved;
  args.inverse = inverse;
  return make_function<launch_on_cpu<onetrip::rotary_cpu, onetrip::Rotary>>(args);
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

int add_to_sums(uintptr_t nearest, uintptr_t rest, uintptr_t terms, int64_t n, bool is_first) {
  return onetrip::add_to_sums_cpu(
      {n, pointer<void>(nearest), pointer<int16_t>(rest), pointer<const void>(terms), is_first});
}

int64_t row_norm_workspace(int device, int64_t n_rows, int64_t n_cols, int n_wanted) {
  return device < 0 ? onetrip::row_norm_workspace_cpu(n_rows, n_cols, n_wanted)
                    : onetrip::row_norm_workspace_cuda(device, n_rows, n_cols, n_wanted);
}

// (lr, beta1, beta2, eps, weight_decay, decoupled, maximize, address of lr or 0)
using AdamGroupNumbers = std::tuple<double, double, double, double, double, bool, bool, uintptr_t>;
// (param_dtype, grad_dtype, is_8bit, rounding, first_chunk, n_chunks)
using AdamKindNumbers = std::tuple<int, int, bool, int, int64_t, int64_t>;

std::vector<onetrip::AdamKind> adam_kinds(const std::vector<AdamKindNumbers>& kinds) {
  std::vector<onetrip::AdamKind> structs;
  for (const auto& [param_dtype, grad_dtype, is_8bit, rounding, first_chunk, n_chunks] : kinds)
    structs.push_back(
        {DType(param_dtype), DType(grad_dtype), is_8bit, onetrip::AdamRounding(rounding), first_chunk, n_chunks});
  return structs;
}

int adam_squares(int device, uintptr_t stream, uintptr_t tensors, uintptr_t chunks,
                 const std::vector<AdamKindNumbers>& kinds, uintptr_t sums) {
  const auto kind_structs = adam_kinds(kinds);
  const onetrip::AdamSquares args{pointer<const onetrip::AdamTensor>(tensors),
                                  pointer<const onetrip::AdamChunk>(chunks), kind_structs.data(),
                                  static_cast<int64_t>(kind_structs.size()), pointer<double>(sums)};
  return device < 0 ? onetrip::adam_squares_cpu(args) : onetrip::adam_squares_cuda(args, device, pointer<void>(stream));
}

int adam_step(int device, uintptr_t stream, uintptr_t tensors, uintptr_t chunks,
              const std::vector<AdamKindNumbers>& kinds, uintptr_t counters, int64_t n_counters,
              const std::vector<AdamGroupNumbers>& groups, uintptr_t scalars, uintptr_t grad_scale,
              uintptr_t found_inf) {
  const auto kind_structs = adam_kinds(kinds);
  std::vector<onetrip::AdamGroup> group_structs;
  for (const auto& [lr, beta1, beta2, eps, weight_decay, decoupled, maximize, lr_address] : groups)
    group_structs.push_back(
        {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, pointer<const float>(lr_address)});
  const onetrip::AdamStep args{pointer<const onetrip::AdamTensor>(tensors),
                               pointer<const onetrip::AdamChunk>(chunks),
                               kind_structs.data(),
                               static_cast<int64_t>(kind_structs.size()),
                               pointer<const onetrip::AdamCounter>(counters),
                               n_counters,
                               group_structs.data(),
                               static_cast<int64_t>(group_structs.size()),
                               pointer<onetrip::AdamScalars>(scalars),
                               pointer<const float>(grad_scale),
                               pointer<const float>(found_inf)};
  return device < 0 ? onetrip::adam_step_cpu(args) : onetrip::adam_step_cuda(args, device, pointer<void>(stream));
}

py::tuple adam_code_maps() {
  constexpr auto signed_map = onetrip::make_code_map<onetrip::kSignedMagnitudes>(0);
  constexpr auto unsigned_map = onetrip::make_code_map<onetrip::kUnsignedMagnitudes>(1);
  const auto list = [](const float* values, int n) { return std::vector<float>(values, values + n); };
  return py::make_tuple(list(signed_map.value, onetrip::kSignedMagnitudes),
                        list(signed_map.threshold, onetrip::kSignedMagnitudes),
                        list(unsigned_map.value, onetrip::kUnsignedMagnitudes),
                        list(unsigned_map.threshold, onetrip::kUnsignedMagnitudes));
}

}  // namespace

// Operators come in two steps: from what a plan fixes (dtypes and norms as their codes, numbers) to a launcher, and
// from one call's device (-1: the CPU), stream, n_rows, n_cols and then what read() above reads in its order, to a
// launch. Launches release the GIL. They return 0 or the device's error code.
PYBIND11_MODULE(_native, module) {
  module.doc() = "Native kernels of onetrip: tensors, sizes, strides and a stream in, error codes out.";
  module.def("row_norm_forward", &row_norm_forward, "A launcher of the forward pass, for these dtypes and numbers.");
  module.def("row_norm_eager", &onetrip::row_norm_eager,
             "A function of plain operands and rng, from two launchers: the result.");
  onetrip::define_eager<onetrip::EagerRowNorm>(module, "row_norm");
  module.def("row_norm_backward", &row_norm_backward, "A launcher of the backward pass, for these dtypes and numbers.");
  module.def("set_gpu_independent_sums", &onetrip::set_gpu_independent_sums,
             "Add up gradients of row_norm's parameters alike on every GPU.");
  module.def("row_norm_workspace", &row_norm_workspace, "Floats of workspace that row_norm_backward needs.");
  module.def("softmax_forward", &softmax_forward, "A launcher of the forward pass, for this dtype, mask and numbers.");
  module.def("softmax_eager", &onetrip::softmax_eager, "As row_norm_eager.");
  onetrip::define_eager<onetrip::EagerSoftmax>(module, "softmax");
  module.def("softmax_backward", &softmax_backward,
             "A launcher of the backward pass, for this dtype, mask and numbers.");
  module.def("softmax_workspace", &softmax_workspace, "Floats of workspace that the mask's gradient needs.");
  module.def(
      "rotary_eager", &onetrip::rotary_eager,
      "As row_norm_eager, of one launcher and the codes of operands and gradients; of another backend's kernel too.");
  onetrip::define_eager<onetrip::EagerRotary>(module, "rotary");
  module.def("rotary", &rotary, "A launcher of the rotation on the CPU, for these dtypes and this form.");
  module.def("glu_forward", &glu_forward, "A launcher of the forward pass, for these dtypes and this activation.");
  module.def("glu_backward", &glu_backward, "A launcher of the backward pass, for these dtypes and this activation.");
  module.def("glu_eager", &onetrip::glu_eager, "As row_norm_eager; of another backend's kernels too.");
  onetrip::define_eager<onetrip::EagerGlu>(module, "glu");
  module.def("glu_workspace", &onetrip::glu_workspace_cpu, "Floats of workspace that the bias's gradient needs.");
  module.def("cross_entropy", &cross_entropy, "A launcher of losses and gradients on the CPU, for these numbers.");
  module.def("add_to_sums", &add_to_sums, py::call_guard<py::gil_scoped_release>(),
             "Adds n bfloat16 numbers to float32 sums in two parts; by address: bfloat16 parts, int16 parts, numbers.");
  module.def(
      "kept_labels",
      [](uintptr_t labels, int64_t n_rows, int64_t n_classes, int64_t ignore_index) {
        return onetrip::kept_labels(reinterpret_cast<const int64_t*>(labels), n_rows, n_classes, ignore_index);
      },
      "How many labels, by address, are not ignore_index; -1 where one of them is no class.");
  module.def("adam_step", &adam_step, py::call_guard<py::gil_scoped_release>(),
             "One step over all parameters: tables by address (csrc/launch.h), kinds and groups as lists of tuples.");
  module.def("adam_squares", &adam_squares, py::call_guard<py::gil_scoped_release>(),
             "Sums of the squares of the gradients' chunks: tables, kinds as in adam_step, float64 sums by address.");
  py::class_<onetrip::TensorLook>(module, "TensorLook")
      .def("__call__", &onetrip::TensorLook::operator())
      .def("with_grads", &onetrip::TensorLook::with_grads);
  module.def("tensor_look", &tensor_look,
             "A TensorLook (csrc/tensor_look.h) for these types; None where it cannot be.");
  module.def("same_values", &onetrip::same_values, "Whether the values of these dicts, in order, are these objects.");
  module.def("adam_code_maps", &adam_code_maps,
             "Magnitudes and thresholds of the signed map, then of the unsigned one, as the kernels use them.");
  module.def("use_torch", &onetrip::use_torch,
             "What eager calls use: Tensor, Parameter, torch.is_grad_enabled, torch.empty_like, the stream of a GPU's "
             "index, raise_error, 3 dtypes.");
  module.def("operands_reader", &operands_reader<onetrip::operands_code>,
             "A function of x, residual and vectors: the code of their dtypes where they fit, else -1.");
  module.def("scores_reader", &operands_reader<onetrip::scores_code>,
             "A function of scores, mask and causal: the code of their dtypes where softmax takes them, else -1.");
  module.def("rotary_reader", &operands_reader<onetrip::rotary_code>,
             "A function of q, k, cos and sin: the code of their dtypes where they fit, else -1.");
  module.def(
      "labels_reader", &operands_reader<onetrip::labels_code>,
      "A function of ignore_index, labels and logits, or hidden, weight, bias: kept_labels where they fit, else -1.");
  module.def("cpu_level", &onetrip::cpu_level,
             "The instruction set that CPU kernels use: avx512vbmi, avx512, avx2 or baseline.");
  module.def("set_cpu_level", &onetrip::set_cpu_level, "Force a lower level; False where it is not there.");
  module.def("cuda_unavailable_reason", &onetrip::cuda_unavailable_reason,
             "Why this build cannot run on the CUDA device; \"\" if it can.");
  module.def("cuda_error_string", &onetrip::cuda_error_string, "Name and text of a CUDA error code.");
  module.def("cuda_architectures", &onetrip::cuda_architectures, "Compute capabilities built for; \"\" without CUDA.");
}
