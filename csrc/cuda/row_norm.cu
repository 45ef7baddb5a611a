// The row_norm family on NVIDIA GPUs: the path that each row takes, the partition of rows among blocks, the launches.
// The kernels are in row_norm_forward.cuh and row_norm_backward*.cuh; csrc/launch.h documents every argument.
#include <atomic>

#include "launch.cuh"
#include "row_norm_backward_pipelined.cuh"
#include "row_norm_backward_wide.cuh"
#include "row_norm_forward.cuh"

// Types of x and z (residual's and dresidual's dtype is z's). Parameters, y and dy may have any dtype.
#ifndef ONETRIP_ROW_NORM_PAIRS
#define ONETRIP_ROW_NORM_PAIRS(F) \
  F(float, float) F(__half, __half) F(__nv_bfloat16, __nv_bfloat16) F(__half, float) F(__nv_bfloat16, float)
#endif

// Tests set fewer, or each part would be one row.
#ifndef ONETRIP_ANY_GPU_SMS
#define ONETRIP_ANY_GPU_SMS 128
#endif

namespace onetrip {

// Paths. A row takes the first path that holds its columns; softmax.cu uses the same names.
//   forward   threads a row                   columns (16 a thread; of 16-bit rows to 32, in brackets)
//   narrow    8, 16                           128, 256 (256, 512)
//   warp      32                              512 (1024)
//   block     whole warps, forward_shape()    16384
//   cluster   as block, in 2, 4 or 8 blocks   65536, from 8193 on; aligned rows, GPUs with clusters
//   wide      512 walk the row                any
// Rows of up to 16384 columns have the same bits from a cluster (cluster_of_row() in launch.cuh) as from a block.
//   backward  threads a row                   columns (8 a thread)
//   narrow    8                               64
//   warp      32                              256
//   block     the fewest warps that hold it   4096
//   wide      512 for the row's means, then 512 for each tile of 4096 columns
// Backward is pipelined (cp.async, 16 columns a thread) where there is a norm, rows are aligned, dy is float32 (as
// under autocast) or has x's dtype, and the GPU has the instructions: 8 or 16 lanes or whole warps up to 8192 columns,
// clusters of 2, 4 or 8 blocks up to 65536.
constexpr int64_t kRegisterColumns = 16384;
constexpr int kNarrowThreads = 8;

namespace {

// The threads of the whole warps that a row needs.
int threads_for(int64_t n_cols, int columns_per_thread) {
  return static_cast<int>(ceil_div(n_cols, static_cast<int64_t>(columns_per_thread) * kWarpThreads)) * kWarpThreads;
}

// The pipelined kernels and the one that adds up their partial sums ask for this: an SM that divides its memory anew
// first waits until all its blocks have ended.
constexpr int kPipelinedCarveout = cudaSharedmemCarveoutMaxShared;

// The fewest blocks of a cluster that hold a row, with kPipelinedColumns columns a thread; 8 for wider rows, which do
// not fit.
constexpr int64_t kPipelinedBlockColumns = static_cast<int64_t>(kPipelinedThreads) * kPipelinedColumns;
int pipelined_blocks(int64_t n_cols) {
  int n_blocks = 1;
  while (n_blocks < kMaxClusterBlocks && n_blocks * kPipelinedBlockColumns < n_cols) n_blocks *= 2;
  return n_blocks;
}

// Threads of a block that share a pipelined row.
int pipelined_row_threads(int64_t n_cols) {
  return n_cols <= 8 * kPipelinedColumns ? 8
         : n_cols <= kWarpThreads * kBackwardColumns
             ? 16
             : threads_for(n_cols, kPipelinedColumns * pipelined_blocks(n_cols));
}

struct BackwardShape {
  int row_threads, n_groups;
  int row_blocks;
};

// As many groups of lanes as make 512 threads of 8 columns each, and as many of whole warps as make 256 of 16 columns,
// but at least one: at most 8, of 15 named barriers.
BackwardShape backward_shape(int64_t n_cols) {
  const int row_threads = n_cols <= kNarrowThreads * kBackwardColumns ? kNarrowThreads
                          : n_cols <= kWarpThreads * kBackwardColumns ? kWarpThreads
                          : n_cols <= kTileColumns                    ? threads_for(n_cols, kBackwardColumns)
                                                                      : kBackwardThreads;
  const int64_t n_groups = row_threads <= kWarpThreads ? kBackwardThreads / row_threads
                                                       : kPipelinedThreads / 2 / pipelined_row_threads(n_cols);
  return {row_threads, static_cast<int>(at_least_one(n_groups)), pipelined_blocks(n_cols)};
}

// Parts of rows that run at the same time on so many SMs. Pipelined: 512 threads with 128 registers each fill an SM; a
// wide row's part is a cluster. Otherwise: two blocks an SM (where registers leave room for one, two full waves), and a
// wide row's part is a block for each of its tiles.
int64_t pipelined_parts(int64_t n_cols, const BackwardShape& shape, int64_t n_multiprocessors) {
  const int64_t resident = kPipelinedThreads / (pipelined_row_threads(n_cols) * shape.n_groups);
  return at_least_one(n_multiprocessors * at_least_one(resident) / shape.row_blocks);
}
int64_t other_parts(int64_t n_cols, int64_t n_multiprocessors) {
  return at_least_one(2 * n_multiprocessors / ceil_div(n_cols, kTileColumns));
}

int64_t parts_at_once(int64_t n_cols, const BackwardShape& shape, const DeviceInfo& info) {
  const int64_t parts = pipelined_parts(n_cols, shape, info.n_multiprocessors);
  if (info.has_copies && n_cols <= kPipelinedBlockColumns) return parts;
  const auto kernel = row_norm_backward_pipelined_kernel<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, kClusterRow>;
  const int threads = pipelined_row_threads(n_cols) * shape.n_groups;
  const int64_t n_clusters = n_cols <= kMaxClusterBlocks * kPipelinedBlockColumns
                                 ? clusters_at_once(kernel, shape.row_blocks, threads, 0, info, kPipelinedCarveout)
                                 : 0;
  return n_clusters > 0 ? at_most(parts, n_clusters) : other_parts(n_cols, info.n_multiprocessors);
}

std::atomic<bool> gpu_independent{false};
constexpr int64_t kAnyGpu = ONETRIP_ANY_GPU_SMS;  // SMs whose parts every GPU takes if set_gpu_independent_sums asks

// One wave: as many parts as run at the same time; fewer where a group would be left without a row. A partial row costs
// 4 bytes a column written and 4 read for each of up to three sums, the rows themselves at least 6 bytes a column in
// 16-bit types: two sums of parts of 32 rows (4096 x 8192 on 132 SMs) add 8%.
BackwardPartition backward_partition(int64_t n_rows, int64_t n_cols, const DeviceInfo& info, bool any_gpu) {
  const BackwardShape shape = backward_shape(n_cols);
  const int64_t at_once = any_gpu ? pipelined_parts(n_cols, shape, kAnyGpu) : parts_at_once(n_cols, shape, info);
  const int64_t n_steps = ceil_div(n_rows, shape.n_groups), n_parts = at_most(at_once, n_steps);
  const int64_t rows_per_part = ceil_div(n_steps, n_parts) * shape.n_groups;
  return {static_cast<int>(rows_per_part), static_cast<int>(n_parts), shape.row_threads, shape.n_groups};
}

// At least as many parts as any of these partitions has, whatever the driver answers about clusters, and whether or not
// another thread asks for the other partition before the launch.
int64_t most_parts(int64_t n_rows, int64_t n_cols, const DeviceInfo& info) {
  const BackwardShape shape = backward_shape(n_cols);
  int64_t most = other_parts(n_cols, info.n_multiprocessors);
  for (const int64_t n_multiprocessors : {int64_t{info.n_multiprocessors}, kAnyGpu}) {
    const int64_t parts = pipelined_parts(n_cols, shape, n_multiprocessors);
    if (parts > most) most = parts;
  }
  return at_most(most, ceil_div(n_rows, shape.n_groups));
}

// Size of the partial sums, in floats. The wide path's row means (float2) follow, 8-byte aligned.
int64_t partial_floats(int64_t n_parts, int64_t n_cols, int n_wanted) {
  return ceil_div(n_wanted * n_parts * n_cols, 2) * 2;
}

int wanted_sums(const RowNormBackward& args) {
  return (args.dbias != nullptr ? 1 : 0) + (args.dweight != nullptr ? 1 : 0) + (args.dnorm_bias != nullptr ? 1 : 0);
}

template <typename X, typename Z, bool kVectorAccess>
cudaError_t launch_forward_wide(const RowNormForward& args, const DeviceInfo& info, cudaStream_t stream) {
  const auto kernel = row_norm_forward_wide_kernel<X, Z, kVectorAccess>;
  // Without a norm there is no second walk.
  const int64_t kept_tiles = args.norm == Norm::kNone ? 0 : tiles_to_keep(args.n_cols, sizeof(Z), info);
  const int64_t shared_bytes = kept_tiles * kWideThreads * kChunkColumns * static_cast<int64_t>(sizeof(Z));
  const cudaError_t status = prepare(kernel, info);
  if (status != cudaSuccess) return status;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, 1), dim3(kWideThreads), static_cast<size_t>(shared_bytes),
                        stream, args, kept_tiles);
}

struct ForwardShape {
  int row_threads, chunks;  // chunks a thread
};

// The fewest lanes that hold the row, with as few chunks each as that takes; beyond a warp, whole warps, where three
// chunks a thread may leave fewer lanes idle than four. (Past kClusterColumns a cluster may take the row, in four.)
template <typename Z>
ForwardShape forward_shape(int64_t n_cols) {
  constexpr int kMost = kMostChunks<Z>, kThree = kMost - 1;
  const int n_chunks = static_cast<int>(ceil_div(n_cols, kChunkColumns));
  const int lanes = lanes_of_row<Z>(n_cols), each = static_cast<int>(ceil_div(n_chunks, lanes));
  if (each <= kMost) return {lanes, each > kFewestChunks ? each : kFewestChunks};
  const int most = threads_for(n_cols, kMost * kChunkColumns), three = threads_for(n_cols, kThree * kChunkColumns);
  const bool fewer_idle = kMost > kFewestChunks && n_cols <= kClusterColumns && three * kThree < most * kMost;
  return fewer_idle ? ForwardShape{three, kThree} : ForwardShape{most, kMost};
}

template <typename X, typename Z, int kLanes, Access kAccess>
auto forward_kernel_of(int chunks) {
  if constexpr (kMostChunks<Z> > kFewestChunks) {
    if constexpr (kLanes == kFewestLanes)
      if (chunks == kFewestChunks) return row_norm_forward_kernel<X, Z, kLanes, kFewestChunks, kAccess>;
    if (chunks < kMostChunks<Z>) return row_norm_forward_kernel<X, Z, kLanes, kMostChunks<Z> - 1, kAccess>;
  }
  return row_norm_forward_kernel<X, Z, kLanes, kMostChunks<Z>, kAccess>;
}

// Rows that are read element by element are rare: one kernel for all lanes, one for blocks, both of the most chunks. A
// chunk past the row's end adds zeros: the row has the same bits.
template <typename X, typename Z, Access kAccess>
auto forward_kernel(const ForwardShape& shape) {
  const auto [row_threads, chunks] = shape;
  if constexpr (kAccess == Access::kElements) {
    return row_threads <= kWarpThreads ? row_norm_forward_kernel<X, Z, kAnyLanes, kMostChunks<Z>, kAccess>
                                       : row_norm_forward_kernel<X, Z, 0, kMostChunks<Z>, kAccess>;
  } else {
    return row_threads == kFewestLanes   ? forward_kernel_of<X, Z, kFewestLanes, kAccess>(chunks)
           : row_threads == 16           ? forward_kernel_of<X, Z, 16, kAccess>(chunks)
           : row_threads == kWarpThreads ? forward_kernel_of<X, Z, kWarpThreads, kAccess>(chunks)
                                         : forward_kernel_of<X, Z, 0, kAccess>(chunks);
  }
}

template <typename X, typename Z, Access kAccess>
cudaError_t launch_forward_rows(const RowNormForward& args, const DeviceInfo& info, cudaStream_t stream) {
  if (args.n_cols > kRegisterColumns)
    return launch_forward_wide<X, Z, kAccess != Access::kElements>(args, info, stream);
  const ForwardShape shape = forward_shape<Z>(args.n_cols);
  const auto kernel = forward_kernel<X, Z, kAccess>(shape);
  const int threads = shape.row_threads <= kWarpThreads ? 128 : shape.row_threads;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, threads / shape.row_threads), dim3(threads), 0, stream, args);
}

template <typename X, typename Z>
cudaError_t launch_forward(const RowNormForward& args, const DeviceInfo& info, cudaStream_t stream) {
  VectorAccess access(args.n_cols, kChunkColumns);
  access.require(args.x, args.x_dtype, args.x_row_stride);
  access.require(args.residual, args.residual_dtype, args.residual_row_stride);
  access.require(args.y, args.y_dtype, args.n_cols);
  access.require(args.z, args.z_dtype, args.n_cols);
  access.require(args.bias, args.bias_dtype, 0);
  access.require(args.weight, args.weight_dtype, 0);
  access.require(args.norm_bias, args.norm_bias_dtype, 0);
  const auto like_z = [&](const void* tensor, DType dtype) { return tensor == nullptr || dtype == args.z_dtype; };
  const bool uniform = (args.n_dtype == DType::kFloat32 || args.n_dtype == args.z_dtype) && !args.center_z &&
                       like_z(args.y, args.y_dtype) && like_z(args.bias, args.bias_dtype) &&
                       like_z(args.weight, args.weight_dtype) && like_z(args.norm_bias, args.norm_bias_dtype);
  const bool quickest = access.possible() && (uniform || kQuickestAccess<Z> == Access::kVectors);

  const ClusterShape shape = cluster_of_row(args.n_cols, kMostChunks<Z> * kChunkColumns);
  const auto kernel = row_norm_forward_cluster_kernel<X, Z>;
  if (shape.blocks != 0 && quickest && args.norm != Norm::kNone &&
      clusters_at_once(kernel, shape.blocks, shape.threads, 0, info) > 0) {
    return ONETRIP_LAUNCH_CLUSTERS(kernel, shape.blocks, grid_of_clusters(args.n_rows, shape.blocks),
                                   dim3(shape.threads), 0, stream, args);
  }
  return quickest            ? launch_forward_rows<X, Z, kQuickestAccess<Z> >(args, info, stream)
         : access.possible() ? launch_forward_rows<X, Z, Access::kVectors>(args, info, stream)
                             : launch_forward_rows<X, Z, Access::kElements>(args, info, stream);
}

// Whether the GPU can run the pipelined kernel for these rows; if so, status is that of the launch.
template <typename X, typename Z, typename Y, int kRowThreads>
bool launch_pipelined_rows(const RowNormBackward& args, const BackwardPartition& partition, const DeviceInfo& info,
                           cudaStream_t stream, cudaError_t& status) {
  const auto kernel = row_norm_backward_pipelined_kernel<X, Z, Y, kRowThreads>;
  KernelInfo kernel_info{};
  status = prepare(kernel, info, kernel_info, kPipelinedCarveout);
  if (status != cudaSuccess) return true;
  const int static_bytes = kernel_info.static_shared;
  if (static_bytes == 0) return false;  // every kernel with a body has the state of dropout
  const int n_blocks = pipelined_blocks(args.n_cols), row_threads = pipelined_row_threads(args.n_cols);
  const int threads = row_threads * partition.n_groups;
  // As many blocks on an SM as its registers are enough for; fewer, where their shared memory then holds no row.
  PipelinePlan plan{};
  for (int resident = kPipelinedThreads / threads; resident > 0 && plan.dy_z == 0; resident /= 2) {
    const int64_t share = at_most(info.block_shared, info.shared / resident - info.reserved_shared);
    plan = pipeline_plan<Z, Y>(args, row_threads, partition, share - static_bytes);
  }
  if (plan.dy_z == 0) return false;
  const int own_pieces = dbias_pieces(args) + plan.dy_z * kStagePieces<Z, Y> + plan.dz * kPieces<Z>;
  const size_t shared_bytes = static_cast<size_t>(weight_pieces(args) * row_threads + own_pieces * threads) * 16;
  const dim3 grid(static_cast<unsigned>(n_blocks), static_cast<unsigned>(partition.n_parts));
  if (n_blocks == 1) {
    status = ONETRIP_LAUNCH(kernel, grid, dim3(threads), shared_bytes, stream, args, partition, plan);
    return true;
  }
  if (clusters_at_once(kernel, n_blocks, threads, shared_bytes, info, kPipelinedCarveout) == 0) return false;
  status = ONETRIP_LAUNCH_CLUSTERS(kernel, n_blocks, grid, dim3(threads), shared_bytes, stream, args, partition, plan);
  return true;
}

template <typename X, typename Z, typename Y>
bool launch_backward_pipelined(const RowNormBackward& args, const BackwardPartition& partition, const DeviceInfo& info,
                               cudaStream_t stream, cudaError_t& status) {
  const auto launch = args.n_cols > kPipelinedBlockColumns            ? launch_pipelined_rows<X, Z, Y, kClusterRow>
                      : args.n_cols > kWarpThreads * kBackwardColumns ? launch_pipelined_rows<X, Z, Y, 0>
                      : args.n_cols > 8 * kPipelinedColumns           ? launch_pipelined_rows<X, Z, Y, 16>
                                                                      : launch_pipelined_rows<X, Z, Y, 8>;
  return launch(args, partition, info, stream, status);
}

// dy has x's dtype, or is float32 beside a 16-bit x, or of 16 bits beside a float32 x: autocast mixes them.
template <typename X, typename Z>
bool launch_pipelined_by_dy(const RowNormBackward& args, const BackwardPartition& partition, const DeviceInfo& info,
                            cudaStream_t stream, cudaError_t& status) {
  const auto launch = [&](auto y) {
    if constexpr (sizeof(X) != sizeof(y) || DTypeOf<X>::value == DTypeOf<decltype(y)>::value)
      return launch_backward_pipelined<X, Z, decltype(y)>(args, partition, info, stream, status);
    return false;
  };
  return args.y_dtype == DType::kFloat32   ? launch(float{})
         : args.y_dtype == DType::kFloat16 ? launch(__half{})
                                           : launch(__nv_bfloat16{});
}

template <typename X, typename Z, bool kFast>
cudaError_t launch_backward_wide(const RowNormBackward& args, bool vector_access, const BackwardPartition& partition,
                                 cudaStream_t stream) {
  const dim3 block(kBackwardThreads);
  float2* means = nullptr;
  if (args.dy != nullptr) {
    means =
        reinterpret_cast<float2*>(args.workspace + partial_floats(partition.n_parts, args.n_cols, wanted_sums(args)));
    const auto kernel = row_norm_backward_means_kernel<X, Z, kFast>;
    const cudaError_t status =
        ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, 1), block, 0, stream, args, vector_access, means);
    if (status != cudaSuccess) return status;
  }
  const auto kernel = row_norm_backward_columns_kernel<X, Z, kFast>;
  const size_t shared_bytes =
      ((args.dbias != nullptr ? 1 : 0) + (args.dweight != nullptr ? 1 : 0)) * kSumFloats * sizeof(float);
  const dim3 grid(static_cast<unsigned>(ceil_div(args.n_cols, kTileColumns)), static_cast<unsigned>(partition.n_parts));
  return ONETRIP_LAUNCH(kernel, grid, block, shared_bytes, stream, args, vector_access, partition, means);
}

cudaError_t launch_partials(const RowNormBackward& args, int64_t n_parts, const DeviceInfo& info, cudaStream_t stream) {
  PartialSums sums{};
  unsigned n_wanted = 0;
  const auto want = [&](void* out, DType dtype) {
    if (out == nullptr) return;
    sums.out[n_wanted] = out;
    sums.dtype[n_wanted++] = dtype;
  };
  want(args.dbias, args.bias_dtype);
  want(args.dweight, args.weight_dtype);
  want(args.dnorm_bias, args.norm_bias_dtype);
  if (n_wanted == 0) return cudaSuccess;
  int columns = kWarpThreads;
  while (columns > kFewestPartialColumns && ceil_div(args.n_cols, columns) * n_wanted < info.n_multiprocessors)
    columns /= 2;
  constexpr int kWholeWarps = kWarpThreads / kFewestPartialColumns;
  const int64_t n_groups = at_most(kPartialGroups, ceil_div(n_parts, kWholeWarps) * kWholeWarps);
  const auto kernel = row_norm_partials_kernel<kPartialGroups * kWarpThreads>;
  KernelInfo kernel_info{};
  const cudaError_t status = prepare(kernel, info, kernel_info, kPipelinedCarveout);
  if (status != cudaSuccess) return status;
  return ONETRIP_LAUNCH_EARLY(kernel, starts_early(kernel_info, info),
                              dim3(static_cast<unsigned>(at_most(ceil_div(args.n_cols, columns), kMaxGrid)), n_wanted),
                              dim3(static_cast<unsigned>(columns), static_cast<unsigned>(n_groups)), 0, stream,
                              args.workspace, n_parts, args.n_cols, sums);
}

template <typename X, typename Z, bool kFast>
cudaError_t launch_backward_rows(const RowNormBackward& args, bool vector_access, const BackwardShape& shape,
                                 const BackwardPartition& partition, int shared_bytes, const DeviceInfo& info,
                                 cudaStream_t stream) {
  const auto kernel = shape.row_threads == kNarrowThreads ? row_norm_backward_kernel<X, Z, kNarrowThreads, kFast>
                      : shape.row_threads == kWarpThreads ? row_norm_backward_kernel<X, Z, kWarpThreads, kFast>
                                                          : row_norm_backward_kernel<X, Z, 0, kFast>;
  const cudaError_t status = prepare(kernel, info);
  if (status != cudaSuccess) return status;
  return ONETRIP_LAUNCH(kernel, dim3(static_cast<unsigned>(partition.n_parts)),
                        dim3(shape.row_threads * shape.n_groups), static_cast<size_t>(shared_bytes), stream, args,
                        vector_access, partition);
}

template <typename X, typename Z>
cudaError_t launch_backward(const RowNormBackward& args, const DeviceInfo& info, cudaStream_t stream) {
  VectorAccess access(args.n_cols, kChunkColumns);
  access.require(args.dy, args.y_dtype, args.dy_row_stride);
  access.require(args.dz, args.z_dtype, args.dz_row_stride);
  access.require(args.z, args.z_dtype, args.z_row_stride);
  access.require(args.dx, args.x_dtype, args.n_cols);
  access.require(args.dresidual, args.residual_dtype, args.n_cols);
  access.require(args.weight, args.weight_dtype, 0);
  access.require(args.workspace, DType::kFloat32, args.n_cols);

  const BackwardShape shape = backward_shape(args.n_cols);
  const BackwardPartition partition = backward_partition(args.n_rows, args.n_cols, info, gpu_independent);
  cudaError_t status = cudaSuccess;
  const bool vector_access = access.possible(), fast = vector_access && args.y_dtype == DTypeOf<X>::value;
  const bool pipelined = vector_access && args.dy != nullptr &&
                         args.n_cols <= kMaxClusterBlocks * kPipelinedBlockColumns &&
                         launch_pipelined_by_dy<X, Z>(args, partition, info, stream, status);
  if (!pipelined && args.n_cols > kTileColumns) {
    status = fast ? launch_backward_wide<X, Z, true>(args, true, partition, stream)
                  : launch_backward_wide<X, Z, false>(args, vector_access, partition, stream);
  } else if (!pipelined) {
    const auto shared_bytes = [&](bool fast_kernel) {
      return static_cast<int>(sizeof(float)) * backward_shared_floats(fast_kernel, args, shape.row_threads);
    };
    status = fast && shared_bytes(true) <= info.block_shared - kStaticSharedBytes
                 ? launch_backward_rows<X, Z, true>(args, true, shape, partition, shared_bytes(true), info, stream)
                 : launch_backward_rows<X, Z, false>(args, vector_access, shape, partition, shared_bytes(false), info,
                                                     stream);
  }
  return status == cudaSuccess ? launch_partials(args, partition.n_parts, info, stream) : status;
}

}  // namespace

int row_norm_forward_cuda(const RowNormForward& args, int device, void* stream) {
  if (args.n_rows == 0 || args.n_cols == 0) return cudaSuccess;
  if (args.residual != nullptr && args.residual_dtype != args.z_dtype) return cudaErrorNotSupported;
  return on_device(device, [&](const DeviceInfo& info) {
#define ONETRIP_FORWARD(X, Z)                                                   \
  if (args.x_dtype == DTypeOf<X>::value && args.z_dtype == DTypeOf<Z>::value) { \
    return launch_forward<X, Z>(args, info, static_cast<cudaStream_t>(stream)); \
  }
    ONETRIP_ROW_NORM_PAIRS(ONETRIP_FORWARD)
    return cudaErrorNotSupported;
  });
}

int row_norm_backward_cuda(const RowNormBackward& args, int device, void* stream) {
  if (args.n_rows == 0 || args.n_cols == 0) return cudaSuccess;
  if (args.dresidual != nullptr && args.residual_dtype != args.z_dtype) return cudaErrorNotSupported;
  const bool has_means = args.dy != nullptr && args.n_cols > kTileColumns;
  if (args.workspace == nullptr && (has_means || wanted_sums(args) > 0)) {
    return cudaErrorInvalidValue;  // the GPU could not be asked how large it must be
  }
  return on_device(device, [&](const DeviceInfo& info) {
#define ONETRIP_BACKWARD(X, Z)                                                   \
  if (args.x_dtype == DTypeOf<X>::value && args.z_dtype == DTypeOf<Z>::value) {  \
    return launch_backward<X, Z>(args, info, static_cast<cudaStream_t>(stream)); \
  }
    ONETRIP_ROW_NORM_PAIRS(ONETRIP_BACKWARD)
    return cudaErrorNotSupported;
  });
}

int64_t row_norm_workspace_cuda(int device, int64_t n_rows, int64_t n_cols, int n_wanted) {
  int64_t n_floats = 0;
  if (n_rows == 0 || n_cols == 0) return n_floats;
  on_device(device, [&](const DeviceInfo& info) {
    n_floats = partial_floats(most_parts(n_rows, n_cols, info), n_cols, n_wanted);
    if (n_cols > kTileColumns) n_floats += 2 * n_rows;
    return cudaSuccess;
  });
  return n_floats;
}

void set_gpu_independent_sums(bool enabled) { gpu_independent = enabled; }

}  // namespace onetrip
