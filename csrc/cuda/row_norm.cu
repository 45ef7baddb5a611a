// The row_norm family on NVIDIA cards: which kernel takes which row, how rows are shared out, and the launches.
// The kernels are in row_norm_forward.cuh and row_norm_backward*.cuh; the contract is launch.h.
#include "launch.cuh"
#include "row_norm_backward_wide.cuh"
#include "row_norm_forward.cuh"

// Types of x and z (residual's and dresidual's dtype is z's). Parameters, y and dy may have any dtype.
#ifndef ONETRIP_ROW_NORM_PAIRS
#define ONETRIP_ROW_NORM_PAIRS(F) \
  F(float, float) F(__half, __half) F(__nv_bfloat16, __nv_bfloat16) F(__half, float) F(__nv_bfloat16, float)
#endif

namespace onetrip {

// The table. A row goes to the first path that it fits, by its columns; to the wide kernels where it fits none.
//   path      threads a row                           forward: columns (a thread)    backward: columns (a thread)
//   eighths   8 lanes                                    64 (8)                         64 (8)
//   warp      32 lanes                                  256 (8)                        256 (8)
//   cluster   8 blocks of 512 on several SMs          65536 (16)
//   block     as needed, forward 1024, backward 512   16384 (16)                      4096 (8)
//   wide      512, again and again
// Clusters (cluster_of_row() in launch.cuh) take rows of more than 8192 columns that are aligned and normalised, on
// cards that have them. Rows of up to 16384 columns get the same bits from a cluster as from a block.
enum class Path { kEighths, kWarp, kBlock, kWide };
constexpr int kEighthsThreads = 8, kNarrowColumns = 8;
static_assert(forward_columns(kWarpThreads) == kNarrowColumns && kBackwardColumns == kNarrowColumns, "the table");

// NVRTC compiles no host code, so that nothing would ask for the kernels.
#ifdef __CUDACC_RTC__

#define ONETRIP_INSTANTIATE(X, Z, kVector)                                                                        \
  template __global__ void row_norm_forward_kernel<X, Z, kEighthsThreads, kVector>(RowNormForward);               \
  template __global__ void row_norm_forward_kernel<X, Z, kWarpThreads, kVector>(RowNormForward);                  \
  template __global__ void row_norm_forward_kernel<X, Z, 0, kVector>(RowNormForward);                             \
  template __global__ void row_norm_forward_wide_kernel<X, Z, kVector>(RowNormForward, int64_t);                  \
  template __global__ void row_norm_backward_kernel<X, Z, kEighthsThreads, kVector>(RowNormBackward, bool,        \
                                                                                    BackwardPartition);           \
  template __global__ void row_norm_backward_kernel<X, Z, kWarpThreads, kVector>(RowNormBackward, bool,           \
                                                                                 BackwardPartition);              \
  template __global__ void row_norm_backward_kernel<X, Z, 0, kVector>(RowNormBackward, bool, BackwardPartition);  \
  template __global__ void row_norm_backward_wide_kernel<X, Z, kVector>(RowNormBackward, bool, BackwardPartition, \
                                                                        WideCache);
#define ONETRIP_INSTANTIATE_BOTH(X, Z) \
  ONETRIP_INSTANTIATE(X, Z, true)      \
  ONETRIP_INSTANTIATE(X, Z, false)     \
  template __global__ void row_norm_forward_cluster_kernel<X, Z>(RowNormForward);
ONETRIP_ROW_NORM_PAIRS(ONETRIP_INSTANTIATE_BOTH)
template __global__ void row_norm_partials_kernel<kMaxThreads>(const float*, int64_t, int64_t, PartialSums);

#else

namespace {

Path choose_path(int64_t n_cols, int block_columns) {
  return n_cols <= kEighthsThreads * kNarrowColumns ? Path::kEighths
         : n_cols <= kWarpThreads * kNarrowColumns  ? Path::kWarp
         : n_cols <= block_columns                  ? Path::kBlock
                                                    : Path::kWide;
}

// The threads of the whole warps that a row needs.
int threads_for(int64_t n_cols, int columns_per_thread) {
  return static_cast<int>(ceil_div(n_cols, static_cast<int64_t>(columns_per_thread) * kWarpThreads)) * kWarpThreads;
}

struct BackwardShape {
  Path path;
  int row_threads, n_groups;
};

// 512 threads a block, or as near as whole groups come. At most 8 groups of several warps, of 15 named barriers.
BackwardShape backward_shape(int64_t n_cols) {
  const Path path = choose_path(n_cols, kBackwardColumns * kBackwardThreads);
  const int row_threads = path == Path::kEighths ? kEighthsThreads
                          : path == Path::kWarp  ? kWarpThreads
                          : path == Path::kBlock ? threads_for(n_cols, kBackwardColumns)
                                                 : kBackwardThreads;
  return {path, row_threads, kBackwardThreads / row_threads};
}

// The fixed partition of the rows, a function of the sizes alone. A partial row costs 4 bytes a column written and 4
// read for each of up to three sums; the rows themselves at least 6 bytes a column in 16-bit types (dy, z, dx), 8 with
// dresidual. With 32 rows a block the partial sums of LayerNorm (two) add 16 / (32 * 6) = 8% and those of the full
// block (three) 24 / (32 * 8) = 9%. Two blocks an SM fill the 132 SMs of an H100: 256 blocks are 97% of a wave. So
// fewer than 8192 rows are shared out thinner, down to a row a group, to keep 256 blocks (4096 x 1024: 16 rows each, 2
// MB a sum, which stays in L2); many rows make at most 2048 blocks, 8 waves, whose tail is small.
BackwardPartition backward_partition(int64_t n_rows, int64_t n_cols) {
  constexpr int64_t kRowsPerBlock = 32, kRowsPerGroup = 4, kFillingBlocks = 256, kMaxBlocks = 2048;
  const BackwardShape shape = backward_shape(n_cols);
  const int64_t wanted_rows =
      kRowsPerGroup * shape.n_groups > kRowsPerBlock ? kRowsPerGroup * shape.n_groups : kRowsPerBlock;
  int64_t n_blocks = ceil_div(n_rows, wanted_rows);
  if (n_blocks < kFillingBlocks) {
    // A wide row's partial sums are as long as itself and go through memory with every batch: a full batch at least.
    const int64_t most = ceil_div(n_rows, shape.path == Path::kWide ? kMaxBatchRows : shape.n_groups);
    n_blocks = most < kFillingBlocks ? most : kFillingBlocks;
  } else if (n_blocks > kMaxBlocks) {
    n_blocks = kMaxBlocks;
  }
  const int64_t rows_per_block = ceil_div(n_rows, n_blocks);
  return {rows_per_block, ceil_div(n_rows, rows_per_block), shape.row_threads, shape.n_groups};
}

template <typename X, typename Z, bool kVectorAccess>
cudaError_t launch_forward_wide(const RowNormForward& args, int device, cudaStream_t stream) {
  const auto kernel = row_norm_forward_wide_kernel<X, Z, kVectorAccess>;
  int shared_limit = 0;
  cudaError_t status = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  // Without a norm there is no second walk.
  const int64_t kept_tiles = args.norm == Norm::kNone ? 0 : tiles_to_keep(args.n_cols, sizeof(Z), shared_limit);
  const int64_t shared_bytes = kept_tiles * kWideThreads * kChunkColumns * static_cast<int64_t>(sizeof(Z));
  status = allow_shared(kernel, shared_bytes);
  if (status != cudaSuccess) return status;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, 1), dim3(kWideThreads), static_cast<size_t>(shared_bytes),
                        stream, args, kept_tiles);
}

template <typename X, typename Z, bool kVectorAccess>
cudaError_t launch_forward_rows(const RowNormForward& args, int device, cudaStream_t stream) {
  const Path path = choose_path(args.n_cols, forward_columns(0) * kMaxThreads);
  if (path == Path::kWide) return launch_forward_wide<X, Z, kVectorAccess>(args, device, stream);
  const auto kernel = path == Path::kEighths ? row_norm_forward_kernel<X, Z, kEighthsThreads, kVectorAccess>
                      : path == Path::kWarp  ? row_norm_forward_kernel<X, Z, kWarpThreads, kVectorAccess>
                                             : row_norm_forward_kernel<X, Z, 0, kVectorAccess>;
  const int row_threads = path == Path::kEighths ? kEighthsThreads
                          : path == Path::kWarp  ? kWarpThreads
                                                 : threads_for(args.n_cols, forward_columns(0));
  const int threads = path == Path::kBlock ? row_threads : 128;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, threads / row_threads), dim3(threads), 0, stream, args);
}

template <typename X, typename Z>
cudaError_t launch_forward(const RowNormForward& args, int device, cudaStream_t stream) {
  VectorAccess access(args.n_cols, kChunkColumns);
  access.require(args.x, args.x_dtype, args.x_row_stride);
  access.require(args.residual, args.residual_dtype, args.residual_row_stride);
  access.require(args.y, args.y_dtype, args.n_cols);
  access.require(args.z, args.z_dtype, args.n_cols);
  access.require(args.bias, args.bias_dtype, 0);
  access.require(args.weight, args.weight_dtype, 0);
  access.require(args.norm_bias, args.norm_bias_dtype, 0);

  const ClusterShape shape = cluster_of_row(args.n_cols);
  const auto kernel = row_norm_forward_cluster_kernel<X, Z>;
  if (shape.blocks != 0 && access.possible() && args.norm != Norm::kNone &&
      runs_in_clusters(kernel, shape.blocks, shape.threads, 0, device)) {
    return ONETRIP_LAUNCH_CLUSTERS(kernel, shape.blocks, grid_of_clusters(args.n_rows, shape.blocks),
                                   dim3(shape.threads), 0, stream, args);
  }
  return access.possible() ? launch_forward_rows<X, Z, true>(args, device, stream)
                           : launch_forward_rows<X, Z, false>(args, device, stream);
}

// Bytes of dynamic shared memory that a block of backward may ask for.
struct SharedLimits {
  int64_t one_block;    // at most
  int64_t half_filled;  // so that blocks with half of an SM's threads fit side by side
};

cudaError_t shared_limits(SharedLimits& limits, int device) {
  int block_bytes = 0, sm_bytes = 0, reserved = 0, sm_threads = 0;
  const auto get = [device](int& value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(&value, attribute, device);
  };
  cudaError_t status = get(block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (status == cudaSuccess) status = get(sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  if (status == cudaSuccess) status = get(reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  if (status == cudaSuccess) status = get(sm_threads, cudaDevAttrMaxThreadsPerMultiProcessor);
  limits.one_block = block_bytes - kStaticSharedBytes;
  const int64_t blocks = ceil_div(sm_threads / 2, kBackwardThreads);
  const int64_t share = sm_bytes / (blocks > 0 ? blocks : 1) - reserved - kStaticSharedBytes;
  limits.half_filled = share < limits.one_block ? share : limits.one_block;
  return status;
}

template <typename X, typename Z, bool kFast>
cudaError_t launch_backward_wide(const RowNormBackward& args, bool vector_access, const BackwardPartition& partition,
                                 const SharedLimits& limits, cudaStream_t stream) {
  constexpr int64_t kTileColumns = kBackwardThreads * kBackwardColumns;
  const auto kernel = row_norm_backward_wide_kernel<X, Z, kFast>;
  WideCache cache{kMaxBatchRows, 0};
  int64_t shared_bytes = 0;
  if (args.dy != nullptr) {
    // As many rows as fit at once; of a row that does not fit alone, as many tiles as do. A row that would take a whole
    // SM's memory gets it: reading it twice costs more than a second block gains.
    const int64_t tile_bytes = kTileColumns * (size_of(args.y_dtype) + static_cast<int64_t>(sizeof(Z)));
    const int64_t n_tiles = ceil_div(args.n_cols, kTileColumns);
    const int64_t limit = n_tiles * tile_bytes <= limits.half_filled ? limits.half_filled : limits.one_block;
    const int64_t tiles_that_fit = limit / tile_bytes, rows_that_fit = tiles_that_fit / n_tiles;
    if (rows_that_fit > 0)
      cache.batch_rows = static_cast<int>(rows_that_fit < kMaxBatchRows ? rows_that_fit : kMaxBatchRows);
    cache.tiles = static_cast<int>(rows_that_fit > 0 ? n_tiles : tiles_that_fit / kMaxBatchRows);
    shared_bytes = cache.batch_rows * cache.tiles * tile_bytes;
    const cudaError_t status =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  return ONETRIP_LAUNCH(kernel, dim3(static_cast<unsigned>(partition.n_blocks)), dim3(kBackwardThreads),
                        static_cast<size_t>(shared_bytes), stream, args, vector_access, partition, cache);
}

cudaError_t launch_partials(const RowNormBackward& args, int64_t n_blocks, cudaStream_t stream) {
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
  const int64_t column_blocks = ceil_div(args.n_cols, kWarpThreads);
  const auto kernel = row_norm_partials_kernel<kMaxThreads>;
  return ONETRIP_LAUNCH(kernel,
                        dim3(static_cast<unsigned>(column_blocks < kMaxGrid ? column_blocks : kMaxGrid), n_wanted),
                        dim3(kMaxThreads), 0, stream, args.workspace, n_blocks, args.n_cols, sums);
}

template <typename X, typename Z, bool kFast>
cudaError_t launch_backward_rows(const RowNormBackward& args, bool vector_access, const BackwardShape& shape,
                                 const BackwardPartition& partition, int shared_bytes, cudaStream_t stream) {
  const auto kernel = shape.path == Path::kEighths ? row_norm_backward_kernel<X, Z, kEighthsThreads, kFast>
                      : shape.path == Path::kWarp  ? row_norm_backward_kernel<X, Z, kWarpThreads, kFast>
                                                   : row_norm_backward_kernel<X, Z, 0, kFast>;
  const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  return ONETRIP_LAUNCH(kernel, dim3(static_cast<unsigned>(partition.n_blocks)),
                        dim3(shape.row_threads * shape.n_groups), static_cast<size_t>(shared_bytes), stream, args,
                        vector_access, partition);
}

template <typename X, typename Z>
cudaError_t launch_backward(const RowNormBackward& args, int device, cudaStream_t stream) {
  VectorAccess access(args.n_cols, kChunkColumns);
  access.require(args.dy, args.y_dtype, args.dy_row_stride);
  access.require(args.dz, args.z_dtype, args.dz_row_stride);
  access.require(args.z, args.z_dtype, args.z_row_stride);
  access.require(args.dx, args.x_dtype, args.n_cols);
  access.require(args.dresidual, args.residual_dtype, args.n_cols);
  access.require(args.weight, args.weight_dtype, 0);
  access.require(args.workspace, DType::kFloat32, args.n_cols);

  const BackwardShape shape = backward_shape(args.n_cols);
  const BackwardPartition partition = backward_partition(args.n_rows, args.n_cols);
  SharedLimits limits{};
  cudaError_t status = shared_limits(limits, device);
  if (status != cudaSuccess) return status;
  const bool vector_access = access.possible(), dy_like_x = args.y_dtype == DTypeOf<X>::value;
  if (shape.path == Path::kWide) {
    status = vector_access && dy_like_x
                 ? launch_backward_wide<X, Z, true>(args, true, partition, limits, stream)
                 : launch_backward_wide<X, Z, false>(args, vector_access, partition, limits, stream);
  } else {
    const auto shared_bytes = [&](bool fast) {
      return static_cast<int>(sizeof(float)) * backward_shared_floats(fast, args, shape.row_threads);
    };
    const bool fast = vector_access && dy_like_x && shared_bytes(true) <= limits.one_block;
    status =
        fast ? launch_backward_rows<X, Z, true>(args, true, shape, partition, shared_bytes(true), stream)
             : launch_backward_rows<X, Z, false>(args, vector_access, shape, partition, shared_bytes(false), stream);
  }
  return status == cudaSuccess ? launch_partials(args, partition.n_blocks, stream) : status;
}

}  // namespace

int row_norm_forward_cuda(const RowNormForward& args, int device, void* stream) {
  if (args.n_rows == 0 || args.n_cols == 0) return cudaSuccess;
  if (args.residual != nullptr && args.residual_dtype != args.z_dtype) return cudaErrorNotSupported;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
#define ONETRIP_FORWARD(X, Z)                                                     \
  if (args.x_dtype == DTypeOf<X>::value && args.z_dtype == DTypeOf<Z>::value) {   \
    return launch_forward<X, Z>(args, device, static_cast<cudaStream_t>(stream)); \
  }
  ONETRIP_ROW_NORM_PAIRS(ONETRIP_FORWARD)
  return cudaErrorNotSupported;
}

int row_norm_backward_cuda(const RowNormBackward& args, int device, void* stream) {
  if (args.n_rows == 0 || args.n_cols == 0) return cudaSuccess;
  if (args.dresidual != nullptr && args.residual_dtype != args.z_dtype) return cudaErrorNotSupported;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
#define ONETRIP_BACKWARD(X, Z)                                                     \
  if (args.x_dtype == DTypeOf<X>::value && args.z_dtype == DTypeOf<Z>::value) {    \
    return launch_backward<X, Z>(args, device, static_cast<cudaStream_t>(stream)); \
  }
  ONETRIP_ROW_NORM_PAIRS(ONETRIP_BACKWARD)
  return cudaErrorNotSupported;
}

int64_t row_norm_workspace_cuda(int64_t n_rows, int64_t n_cols, int n_wanted) {
  if (n_rows == 0 || n_cols == 0) return 0;
  return n_wanted * backward_partition(n_rows, n_cols).n_blocks * n_cols;
}

#endif  // __CUDACC_RTC__

}  // namespace onetrip
