// What the native kernels need to know, and nothing of torch: addresses, sizes, strides, numbers.
// Every pointer lies on the device that the launcher runs on; every stride is in elements of its tensor.
#pragma once
#include <cstdint>

namespace onetrip {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class Norm : int32_t { kNone = 0, kLayer = 1, kRms = 2 };

// Where the dropout mask comes from: see common/philox.h for the function of (seed, offset, element index).
struct Dropout {
  uint32_t threshold;     // an element is kept iff its 16 random bits are >= threshold, p * 2^16; 0: no dropout at all
  float scale;            // kept elements are multiplied by it: 2^16 / (2^16 - threshold), and 0 where that keeps none
  uint64_t seed, offset;  // used where state is null
  const int64_t* state;   // or {seed, offset} in memory of the device (CUDA graphs, torch.compile); read by the kernel
};

// z = residual + dropout(x + bias);  y = round_to(n_dtype, normalise(z)) * (weight + weight_offset) + norm_bias
// z_dtype is float32, or the dtype that x and residual have in common.
struct RowNormForward {
  int64_t n_rows, n_cols;
  const void* x;          // [n_rows, n_cols] x_dtype, last stride 1
  const void* residual;   // [n_rows, n_cols] residual_dtype, last stride 1; null: nothing is added
  const void* bias;       // [n_cols] bias_dtype; null: none
  const void* weight;     // [n_cols] weight_dtype; null: 1
  const void* norm_bias;  // [n_cols] norm_bias_dtype; null: 0
  void* y;                // [n_rows, n_cols] y_dtype, contiguous; null exactly where norm is kNone
  void* z;                // [n_rows, n_cols] z_dtype, contiguous; null: not stored
  float* mean;            // [n_rows]; null: not stored (always for kRms)
  float* rstd;            // [n_rows]; null: not stored
  int64_t x_row_stride, residual_row_stride;
  DType x_dtype, residual_dtype, bias_dtype, weight_dtype, norm_bias_dtype, z_dtype;
  DType n_dtype;  // the normalised value is rounded to it before the weight; kFloat32: no rounding
  DType y_dtype;
  Norm norm;
  bool center_z;  // store z - mean instead of z, so that backward needs no mean (float32 z, kLayer only)
  float eps, weight_offset;
  Dropout dropout;
};

// Gradients of the above. g = gradient of z, from dy through the norm, plus dz where z was returned to the caller.
// dresidual = g;  dx = dropout_backward(g);  dbias = sum over rows of dx;  dweight = sum dy * n;  dnorm_bias = sum dy.
struct RowNormBackward {
  int64_t n_rows, n_cols;
  const void* dy;      // [n_rows, n_cols] y_dtype, last stride 1; null: no gradient through the norm
  const void* dz;      // [n_rows, n_cols] z_dtype, last stride 1; null: none
  const void* z;       // [n_rows, n_cols] z_dtype, last stride 1: the normalised tensor; null exactly where dy is null
  const float* mean;   // [n_rows]; null for kRms and where z was stored centred
  const float* rstd;   // [n_rows]
  const void* weight;  // [n_cols]; null: 1
  void* dx;            // [n_rows, n_cols] x_dtype, contiguous; null: not wanted
  void* dresidual;     // [n_rows, n_cols] residual_dtype, contiguous; null: not wanted
  void* dbias;         // [n_cols] bias_dtype; null: not wanted
  void* dweight;       // [n_cols] weight_dtype; null: not wanted
  void* dnorm_bias;    // [n_cols] norm_bias_dtype; null: not wanted
  float* workspace;    // row_norm_workspace_* floats, not initialised, at a multiple of 8 bytes;
                       // null where 0
  int64_t dy_row_stride, dz_row_stride, z_row_stride;
  DType x_dtype, residual_dtype;  // z_dtype where dx, dresidual are null; z_dtype obeys forward's rule
  DType bias_dtype, weight_dtype, norm_bias_dtype, z_dtype, y_dtype;
  Norm norm;
  float weight_offset;
  Dropout dropout;
};

// Where the mask of a row starts: row = ((i0 * sizes[1] + i1) * sizes[2] + i2) * sizes[3] + i3, and the mask's row
// starts at the sum of i_k * strides[k]. Strides are in elements; 0 where the mask is broadcast. Unused dimensions come
// first, of size 1 and stride 0.
struct MaskRows {
  int64_t sizes[4], strides[4];
  int64_t col_stride;
};
enum class MaskType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kBool = 3 };  // bool: one byte, 1 keeps

// P = softmax(scale * scores + mask);  y = dropout(P). A row whose largest value is -Inf (all masked) gives zeros.
struct SoftmaxForward {
  int64_t n_rows, n_cols;
  const void* scores;  // [n_rows, n_cols] dtype, last stride 1
  const void* mask;    // mask_type, read by mask_rows; null: none
  void* y;             // [n_rows, n_cols] dtype, contiguous
  void*
      p;  // [n_rows, n_cols] dtype, contiguous: P, the sign bit set where dropout drops; null: not stored (no dropout)
  int64_t scores_row_stride;
  DType dtype;
  MaskType mask_type;
  MaskRows mask_rows;
  int64_t n_queries;  // row r is query r % n_queries and sees columns up to n_cols - n_queries + query; 0: not causal
  float scale;
  Dropout dropout;
};

// g = P * (dP - sum over the row of P * dP), dP = dropout_backward(dy);  dscores = scale * g;  dmask = sum of g over
// the rows that share a row of the mask. Columns that causality hides are not read: their g is 0, whatever lies there.
struct SoftmaxBackward {
  int64_t n_rows, n_cols;
  const void* dy;    // [n_rows, n_cols] dtype, last stride 1
  const void* p;     // [n_rows, n_cols] dtype, last stride 1: y where nothing was dropped, else p as forward stored it
  void* dscores;     // [n_rows, n_cols] dtype, contiguous; null: not wanted
  float* dmask;      // [mask rows, n_cols], mask rows counted over the dimensions of stride != 0; null: not wanted
  float* workspace;  // softmax_workspace_*(...) floats, not initialised; null where 0
  int64_t dy_row_stride, p_row_stride;
  DType dtype;
  MaskRows mask_rows;  // read where dmask is wanted
  int64_t n_queries;   // as forward's; 0: not causal
  float scale;
  bool has_dropout;  // p carries the mask in its sign
  float dropout_scale;
};

// y = x * cos + rotate(x) * sin in the first n_rotated columns of q and of k, the other columns copied. rotate(x): with
// halves (-x[n_rotated / 2 + i], x[i]), interleaved (-x[2i + 1], x[2i]). inverse: the transposed map, for gradients.
// Where all three dtypes are one, products and sum are rounded to it each; else all is float32, rounded once.
struct RotaryStrides {
  int64_t batch, head, position;  // the last stride is 1
};
struct RotaryTensor {
  const void* x;    // [n_batch, n_heads, n_positions, head_dim] dtype
  void* y;          // the same, y_dtype
  int64_t n_heads;  // 0: there is no such tensor
  RotaryStrides x_strides, y_strides;
};
struct Rotary {
  int64_t n_batch, n_positions, head_dim;
  int64_t n_rotated;                       // even, at least 2, at most head_dim
  RotaryTensor tensors[2];                 // q and k
  const void *cos, *sin;                   // [n_batch, n_positions, n_rotated] table_dtype
  RotaryStrides cos_strides, sin_strides;  // head: 0; batch: 0 where all sequences share it
  DType dtype, y_dtype, table_dtype;
  bool interleaved, inverse;
};

// In the order of KERNEL_ACTIVATIONS in reference/glu.py; then kClampedSilu: silu with the numbers of ClampedGlu.
enum class Activation : int32_t { kSilu, kGelu, kGeluTanh, kRelu2, kRelu, kQuickGelu, kSoftcap, kClampedSilu };

// g = min(gate, limit);  y = g / (1 + e^(-alpha g)) * (clamp(up, -limit, limit) + up_offset)
struct ClampedGlu {
  float limit, alpha, up_offset;  // limit: may be infinite
  bool interleaved;  // gate's and up's columns take turns in one matrix: both have last stride 2, and up is gate + 1
};

// y = dropout(act(gate) * up), or without up y = dropout(act(gate + bias)); in float32, rounded once.
struct GluForward {
  int64_t n_rows, n_cols;
  const void* gate;  // [n_rows, n_cols] dtype, last stride 1
  const void* up;    // [n_rows, n_cols] dtype, last stride 1; null: no factor
  const void* bias;  // [n_cols] bias_dtype; null: 0 (always, where there is up)
  void* y;           // [n_rows, n_cols] dtype, contiguous
  int64_t gate_row_stride, up_row_stride;
  DType dtype, bias_dtype;
  Activation activation;
  ClampedGlu clamped;  // of kClampedSilu; kSoftcap: alpha tanh(x / alpha)
  Dropout dropout;     // of elements of y
};

// g = dropout's gradient of dy;  dup = g * act(gate);  dgate = g * up * act'(gate), or g * act'(gate + bias);
// dbias = sum over rows of dgate.
struct GluBackward {
  int64_t n_rows, n_cols;
  const void* dy;    // [n_rows, n_cols] dtype, last stride 1
  const void* gate;  // gate, up: as forward's; or of relu without up y, which has the signs that are needed
  const void* up;
  const void* bias;  // added to gate; null: nothing is added
  void* dgate;       // [n_rows, n_cols] dtype, last stride 1; null: not wanted
  void* dup;         // [n_rows, n_cols] dtype, last stride 1; null: not wanted (always, without up)
  void* dbias;       // [n_cols] bias_dtype; null: not wanted (always, with up)
  float* workspace;  // glu_workspace_cpu(n_rows, n_cols) floats where dbias is wanted, not initialised
  int64_t dy_row_stride, gate_row_stride, up_row_stride, dgate_row_stride, dup_row_stride;
  DType dtype, bias_dtype;
  Activation activation;
  ClampedGlu clamped;  // as forward's; where interleaved dgate and dup are, too, and either both or none is wanted
  Dropout dropout;     // as forward's; threshold 0 where gate is y: dy is multiplied by scale
};

// t = softcap * tanh(scale * logits / softcap) (softcap 0: scale * logits);  lse = log(sum of exp(t));
// loss = lse - (1 - label_smoothing) * t[label] - label_smoothing * mean(t) + lse_square_scale * lse^2;
// dlogits = gradient of weights * loss + entropy_weights * entropy, entropy = -sum of p * log(p), p = exp(t - lse).
// Rows whose label is ignore_index: zeros. Rows with another label outside [0, n_cols): NaN.
struct CrossEntropy {
  int64_t n_rows, n_cols;
  const void* logits;            // [n_rows, n_cols] dtype, last stride 1
  const int64_t* labels;         // [n_rows]
  float* loss;                   // [n_rows]; null: not wanted
  float* stats;                  // [n_rows, 2]: the largest t, and lse less it; null: not wanted
  float* entropy;                // [n_rows]; null: not wanted
  const float* weights;          // [n_rows], or one number (weight_stride 0); null: `weight` for each row
  const float* entropy_weights;  // [n_rows]; null: zeros. Not with has_stats
  void* dlogits;                 // [n_rows, n_cols] dtype, contiguous; may be logits; null: not wanted
  float* total;                  // one number: the sum of loss over divisor, added up in double; null: not wanted
  float weight;
  int64_t divisor;
  int64_t logits_row_stride, weight_stride;
  bool has_stats;  // stats are read, not written; no loss and no entropy then
  DType dtype;
  int64_t ignore_index;
  float scale, softcap, label_smoothing, lse_square_scale;
};

// One step of Adam over many parameters. The tables are rows of int64 numbers in memory of the device, addresses
// included, so that Python builds them as integer tensors; they are read 16 bytes at a time. Blocks of kAdamBlock
// elements share a scale.
constexpr int64_t kAdamBlock = 128;
// A chunk lies in one parameter and starts at a multiple of it. A parameter's follow one another in the table, in order
// and up to its end.
constexpr int64_t kAdamChunk = 4096;

struct alignas(16) AdamTensor {
  int64_t param;             // [numel] param_dtype, updated
  int64_t grad;              // [numel] grad_dtype
  int64_t exp_avg;           // [numel] codes (signed map), or float32 where its kind is not 8-bit; updated
  int64_t exp_avg_sq;        // [numel] codes of the square root (unsigned map), or float32; updated
  int64_t exp_avg_scale;     // [ceil(numel / kAdamBlock)] float32; 0 where not 8-bit
  int64_t exp_avg_sq_scale;  // as exp_avg_scale, for the square root
  int64_t numel;
  int64_t counter;   // index of its AdamCounter
  int64_t residual;  // [numel] int8 or int16, updated; where rounded stochastically, the index of its first element
  int64_t key;       // of its random bits; 0 where not rounded stochastically
};
struct AdamCounter {
  int64_t step;  // address of a float32: the steps taken so far; one more afterwards
  int64_t group;
};
struct alignas(16) AdamChunk {
  int64_t tensor;  // index into tensors
  int64_t first;   // its first element
};
// How a parameter keeps its update: python_pkg/onetrip/reference/rounding.py. All but the first are for 16-bit ones.
enum class AdamRounding : int { kNearest, kResidual8, kResidual16, kStochastic };
// Tensors of the same dtypes, next to each other in the table of chunks: one kernel launch.
struct AdamKind {
  DType param_dtype, grad_dtype;
  bool is_8bit;
  AdamRounding rounding;
  int64_t first_chunk, n_chunks;  // n_chunks below 2^32, of all tensors' 1.7e13 elements
};
struct AdamGroup {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, maximize;
  const float* lr_address;  // read instead of lr, on the device; null: lr
};
// What a step of one parameter multiplies with, computed in float64 from its group and its number of steps.
struct alignas(16) AdamScalars {
  float grad_factor;  // 1 / grad_scale, negative to maximize
  float l2;           // weight decay of Adam, added to the gradient; 0 where decoupled
  float decay;        // 1 - lr * weight_decay where decoupled (AdamW), else 1
  float one_minus_beta1, beta2, one_minus_beta2;
  float inv_bias_correction1;       // 1 / (1 - beta1^t)
  float inv_sqrt_bias_correction2;  // 1 / sqrt(1 - beta2^t)
  float eps, lr;
  float largest_update;  // C_t, what exact Adam's |update| / lr never exceeds
  float step;            // the number of this step, from 1; 0: a gradient was not finite, nothing changes
};
struct AdamStep {
  const AdamTensor* tensors;
  const AdamChunk* chunks;
  const AdamKind* kinds;  // on the host
  int64_t n_kinds;
  const AdamCounter* counters;
  int64_t n_counters;
  const AdamGroup* groups;  // on the host
  int64_t n_groups;
  AdamScalars* scalars;     // [n_counters] workspace
  const float* grad_scale;  // one number; null: 1
  const float* found_inf;   // one number, not 0: skip the step; null: never
};
// The sum of the squares of each chunk's gradient. Nothing but grad, numel, and dtypes of gradients is read.
struct AdamSquares {
  const AdamTensor* tensors;
  const AdamChunk* chunks;
  const AdamKind* kinds;
  int64_t n_kinds;
  double* sums;  // [chunks of all kinds]
};

// Each returns 0, or an error code of its device (cudaError_t). They launch and do not wait.
int row_norm_forward_cpu(const RowNormForward& args);
int row_norm_backward_cpu(const RowNormBackward& args);
int row_norm_forward_cuda(const RowNormForward& args, int device, void* stream);
int row_norm_backward_cuda(const RowNormBackward& args, int device, void* stream);

int softmax_forward_cpu(const SoftmaxForward& args);
int softmax_backward_cpu(const SoftmaxBackward& args);
int softmax_forward_cuda(const SoftmaxForward& args, int device, void* stream);
int softmax_backward_cuda(const SoftmaxBackward& args, int device, void* stream);

int glu_forward_cpu(const GluForward& args);
int glu_backward_cpu(const GluBackward& args);
int64_t glu_workspace_cpu(int64_t n_rows, int64_t n_cols);  // floats, for dbias; as row_norm's, of the sizes alone

// How many labels are not ignore_index; -1 where one of them is outside [0, n_classes).
int64_t kept_labels(const int64_t* labels, int64_t n_rows, int64_t n_classes, int64_t ignore_index);
int cross_entropy_cpu(const CrossEntropy& args);  // no CUDA kernel: Triton's moves the same bytes

// sums += terms, of n numbers. A sum is float32 in two parts: the bfloat16 nearest to it (of two the larger one), and
// by how many units of float32 it is larger than that.
struct AddToSums {
  int64_t n;
  void* nearest;      // [n] bfloat16
  int16_t* rest;      // [n]
  const void* terms;  // [n] bfloat16
  bool is_first;      // rest is not read: zeros
};
int add_to_sums_cpu(const AddToSums& args);

int adam_step_cpu(const AdamStep& args);
int adam_squares_cpu(const AdamSquares& args);
int rotary_cpu(const Rotary& args);  // no CUDA kernel: Triton's moves the same bytes
int adam_step_cuda(const AdamStep& args, int device, void* stream);
int adam_squares_cuda(const AdamSquares& args, int device, void* stream);

// Floats of workspace for dmask: partial sums over a partition that is a function of the sizes alone.
int64_t softmax_workspace_cpu(int64_t n_rows, int64_t n_cols, const MaskRows& mask_rows);
int64_t softmax_workspace_cuda(int64_t n_rows, int64_t n_cols, const MaskRows& mask_rows);

// Floats of workspace for n_wanted of {dbias, dweight, dnorm_bias}, which may be 0. The partition of the rows, and with
// it every bit of the gradients, is a function of the sizes alone on a CPU, and of the sizes and the GPU on a GPU.
int64_t row_norm_workspace_cpu(int64_t n_rows, int64_t n_cols, int n_wanted);
int64_t row_norm_workspace_cuda(int device, int64_t n_rows, int64_t n_cols, int n_wanted);
// From now on GPUs add up the gradients of row_norm's parameters as one with 128 SMs, whatever they have.
void set_gpu_independent_sums(bool enabled);

// "avx512vbmi", "avx512", "avx2" or "baseline": what the CPU kernels were picked for at load. set_cpu_level forces a
// lower one (for tests) and returns false where this machine or this build lacks it.
const char* cpu_level();
bool set_cpu_level(const char* level);

// "" where at least one CUDA device can run this build's kernels, else the reason in plain words.
const char* cuda_unavailable_reason(int device);
const char* cuda_error_string(int code);
const char* cuda_architectures();  // as built, e.g. "7.5 8.0 9.0 10.0 12.0"; "" where built without nvcc

}  // namespace onetrip
