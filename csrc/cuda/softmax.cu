// Softmax on NVIDIA GPUs: the path that each row takes, the sums over rows that share a mask row, the launches.
// The kernels are in softmax_forward.cuh and softmax_backward.cuh; csrc/launch.h documents every argument.
#include "softmax_backward.cuh"
#include "softmax_forward.cuh"

#ifndef ONETRIP_SOFTMAX_TYPES
#define ONETRIP_SOFTMAX_TYPES(F) F(float) F(__half) F(__nv_bfloat16)
#endif

namespace onetrip {

// Paths. A row takes the first path that holds its columns; row_norm.cu uses the same names.
//   path      threads a row                   columns a thread   columns
//   narrow    1 to 16 (float32 8, 16)                8           128
//   warp      32                                     8           256
//   block     the fewest warps that hold it         16           16384
//   cluster   as block, in 2, 4 or 8 blocks         16           65536, from 8193 on; aligned rows, GPUs with clusters
//   wide      512 walk the row                       8           any
// Rows of up to 16384 columns have the same bits from a cluster (cluster_of_row() in launch.cuh) as from a block.
// Backward where rows share a row of the mask: 8 columns a thread up to 8192 columns (narrow, warp, block), then wide.
constexpr int kWarpColumns = kWarpThreads * kChunkColumns;
constexpr int kBlockColumns = kMaxThreads * kBlockChunks * kChunkColumns;
constexpr int kSharedColumns = kMaxThreads * kChunkColumns;

namespace {

Divisor divisor_of(int64_t divisor) {
  uint32_t shift = 0;
  while ((int64_t{1} << shift) < divisor) ++shift;
  const uint64_t size = static_cast<uint64_t>(divisor), excess = (uint64_t{1} << shift) - size;
  using Wide = unsigned __int128;
  return {divisor, static_cast<uint64_t>((static_cast<Wide>(excess) << 64) / size + 1),
          static_cast<uint32_t>((static_cast<Wide>(excess) << 32) / size + 1), shift};
}

Causality causality_of(int64_t n_rows, int64_t n_queries) {
  return {n_queries != 0, n_rows <= int64_t{1} << 31, divisor_of(n_queries != 0 ? n_queries : 1)};
}

// The threads of a row in registers: lanes of one warp with a chunk each (narrow, warp), or whole warps (block).
template <typename T>
RowThreads threads_of_held_row(int64_t n_cols) {
  return threads_of_row<T>(n_cols, n_cols <= kWarpColumns ? kChunkColumns : kBlockChunks * kChunkColumns);
}
dim3 block_of(const RowThreads& threads) { return dim3(static_cast<unsigned>(threads.rows * threads.count)); }

template <typename T, bool kFast>
cudaError_t launch_forward(const SoftmaxForward& args, ForwardLaunch launch, const DeviceInfo& info,
                           cudaStream_t stream) {
  if (args.n_cols > kBlockColumns) {
    const auto kernel = softmax_forward_wide_kernel<T, kFast>;
    launch.kept_tiles = tiles_to_keep(args.n_cols, sizeof(T), info);
    const int64_t shared_bytes = launch.kept_tiles * kWideThreads * kChunkColumns * static_cast<int64_t>(sizeof(T));
    const cudaError_t status = prepare(kernel, info);
    if (status != cudaSuccess) return status;
    return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, 1), dim3(kWideThreads), static_cast<size_t>(shared_bytes),
                          stream, args, launch);
  }
  const bool one_warp = args.n_cols <= kWarpColumns;
  launch.threads = threads_of_held_row<T>(args.n_cols);
  const auto kernel = one_warp ? softmax_forward_kernel<T, 1, kFast> : softmax_forward_kernel<T, kBlockChunks, kFast>;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, launch.threads.rows), block_of(launch.threads), 0, stream,
                        args, launch);
}

template <typename T>
cudaError_t launch_forward(const SoftmaxForward& args, const DeviceInfo& info, cudaStream_t stream) {
  ForwardLaunch launch{};
  launch.causality = causality_of(args.n_rows, args.n_queries);
  launch.plain = args.mask == nullptr && args.p == nullptr && args.dropout.threshold == 0 && !launch.causality.on;
  for (int k = 0; k < 3; ++k) launch.mask_sizes[k] = divisor_of(args.mask != nullptr ? args.mask_rows.sizes[k + 1] : 1);
  VectorAccess access(args.n_cols, kChunkColumns);
  access.require(args.scores, args.dtype, args.scores_row_stride);
  access.require(args.y, args.dtype, args.n_cols);
  access.require(args.p, args.dtype, args.n_cols);
  bool fast = true;
  if (args.mask != nullptr) {
    const int size = args.mask_type == MaskType::kBool ? 1 : args.mask_type == MaskType::kFloat32 ? 4 : 2;
    for (const int64_t stride : args.mask_rows.strides) access.require(args.mask, size, stride);
    fast = args.mask_rows.col_stride == 1;
  }
  fast = fast && access.possible();
  const auto kernel = softmax_forward_cluster_kernel<T>;
  const ClusterShape shape = cluster_of_row(args.n_cols, kBlockChunks * kChunkColumns);
  if (fast && shape.blocks != 0 && clusters_at_once(kernel, shape.blocks, shape.threads, 0, info) > 0) {
    return ONETRIP_LAUNCH_CLUSTERS(kernel, shape.blocks, grid_of_clusters(args.n_rows, shape.blocks),
                                   dim3(shape.threads), 0, stream, args, launch);
  }
  return fast ? launch_forward<T, true>(args, launch, info, stream)
              : launch_forward<T, false>(args, launch, info, stream);
}

// How rows that share a row of the mask are shared out, a function of the sizes alone.
struct SharingPlan {
  MaskSharing sharing;
  RowThreads threads;
  bool wide;
};

template <typename T>
SharingPlan plan_sharing(int64_t n_cols, const MaskRows& rows) {
  SharingPlan plan{};
  MaskSharing& sharing = plan.sharing;
  sharing.n_mask_rows = sharing.n_sharing = sharing.moving_inner = sharing.sharing_inner = 1;
  // From the fastest dimension on: sizes of the two kinds, joined where neighbours are of one kind.
  int64_t steps = 1;
  int n_moving = 0, n_sharing = 0, last = -1;
  for (int k = 3; k >= 0; steps *= rows.sizes[k], --k) {
    if (rows.sizes[k] == 1) continue;
    const bool moving = rows.strides[k] != 0;
    int& count = moving ? n_moving : n_sharing;
    if (last != static_cast<int>(moving)) {
      ++count;
      (moving ? sharing.moving_steps : sharing.sharing_steps)[2 - count] = steps;
    }
    if (count == 1) (moving ? sharing.moving_inner : sharing.sharing_inner) *= rows.sizes[k];
    (moving ? sharing.n_mask_rows : sharing.n_sharing) *= rows.sizes[k];
    last = moving;
  }
  // One list of rows a row of the mask, where that fills the info. Else several: first those of a block's groups, of at
  // least 2 rows each, then those of several blocks, of at least 16 rows each: their partial sums cost 8 bytes a
  // column, 8% of what 16 rows of a 16-bit type do.
  constexpr int64_t kFillingThreads = 1 << 18, kMinRows = 16, kMaxParts = 2048;
  plan.wide = n_cols > kSharedColumns;
  plan.threads = plan.wide ? RowThreads{kWideThreads, kLog2MaxThreads, 1} : threads_of_row<T>(n_cols, kChunkColumns);
  const int count = plan.threads.count;
  const int64_t lists_wanted = at_most(sharing.n_sharing, kFillingThreads / count / sharing.n_mask_rows);
  const int most_groups = count < kSharedBlock ? kSharedBlock / count : 1;
  sharing.n_groups = most_groups;
  sharing.n_parts = 1;
  if (lists_wanted > 1) {
    const int fewest_groups = count < kWarpThreads ? kWarpThreads / count : 1;  // a warp
    const int64_t groups = at_most(most_groups, at_most(lists_wanted, sharing.n_sharing / 2));
    sharing.n_groups = groups > fewest_groups ? static_cast<int>(groups) : fewest_groups;
    const int64_t parts = at_most(ceil_div(lists_wanted, sharing.n_groups), sharing.n_sharing / kMinRows);
    sharing.n_parts = parts > 1 ? at_most(parts, kMaxParts) : 1;
    sharing.joined = sharing.n_parts * sharing.n_groups > 1;
  }
  const int groups_joined = sharing.joined ? sharing.n_groups : 1;
  sharing.rows_per_group = ceil_div(sharing.n_sharing, sharing.n_parts * groups_joined);
  sharing.n_parts = ceil_div(sharing.n_sharing, sharing.rows_per_group * groups_joined);  // less those left empty
  return plan;
}

template <typename T, bool kFast>
cudaError_t launch_backward_wide(const SoftmaxBackward& args, const MaskSharing& sharing, const DeviceInfo& info,
                                 cudaStream_t stream) {
  const auto kernel = softmax_backward_wide_kernel<T, kFast>;
  const int64_t kept_tiles = tiles_to_keep(args.n_cols, 2 * sizeof(T), info);
  const int64_t shared_bytes = kept_tiles * kWideThreads * kChunkColumns * 2 * static_cast<int64_t>(sizeof(T));
  const cudaError_t status = prepare(kernel, info);
  if (status != cudaSuccess) return status;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(sharing.n_mask_rows * sharing.n_parts, 1), dim3(kWideThreads),
                        static_cast<size_t>(shared_bytes), stream, args, sharing,
                        causality_of(args.n_rows, args.n_queries), kept_tiles);
}

template <typename T, bool kFast>
cudaError_t launch_backward_rows(const SoftmaxBackward& args, cudaStream_t stream) {
  const bool one_warp = args.n_cols <= kWarpColumns;
  const RowThreads threads = threads_of_held_row<T>(args.n_cols);
  const auto kernel = one_warp ? softmax_backward_kernel<T, 1, kFast> : softmax_backward_kernel<T, kBlockChunks, kFast>;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_rows, threads.rows), block_of(threads), 0, stream, args, threads,
                        causality_of(args.n_rows, args.n_queries));
}

template <typename T, bool kFast>
cudaError_t launch_backward_shared(const SoftmaxBackward& args, const SharingPlan& plan, cudaStream_t stream) {
  const auto kernel = softmax_backward_shared_kernel<T, kFast>;
  const MaskSharing& sharing = plan.sharing;
  const int n_threads = plan.threads.count * sharing.n_groups;
  const size_t shared_bytes = sharing.joined ? sizeof(float) * kChunkColumns * n_threads : 0;
  const int64_t n_blocks =
      sharing.joined ? sharing.n_mask_rows * sharing.n_parts : ceil_div(sharing.n_mask_rows, sharing.n_groups);
  return ONETRIP_LAUNCH(kernel, grid_of_rows(n_blocks, 1), dim3(n_threads), shared_bytes, stream, args, plan.threads,
                        sharing, causality_of(args.n_rows, args.n_queries));
}

cudaError_t launch_parts(const SoftmaxBackward& args, const MaskSharing& sharing, cudaStream_t stream) {
  const auto kernel = softmax_parts_kernel<kMaxThreads>;
  const int64_t n_warps = at_most(sharing.n_parts, kMaxWarps);
  return ONETRIP_LAUNCH(kernel, grid_of_rows(sharing.n_mask_rows * ceil_div(args.n_cols, kWarpThreads), 1),
                        dim3(static_cast<unsigned>(n_warps * kWarpThreads)), 0, stream, args, sharing.n_mask_rows,
                        sharing.n_parts);
}

template <typename T>
cudaError_t launch_backward(const SoftmaxBackward& args, const DeviceInfo& info, cudaStream_t stream) {
  VectorAccess access(args.n_cols, kChunkColumns);
  access.require(args.dy, args.dtype, args.dy_row_stride);
  access.require(args.p, args.dtype, args.p_row_stride);
  access.require(args.dscores, args.dtype, args.n_cols);
  access.require(args.dmask, DType::kFloat32, args.n_cols);
  access.require(args.workspace, DType::kFloat32, args.n_cols);
  const bool fast = access.possible();
  SharingPlan plan{};
  if (args.dmask != nullptr) plan = plan_sharing<T>(args.n_cols, args.mask_rows);
  const bool summed = plan.sharing.n_sharing > 1;
  if (!summed) {  // every row is the only one of its row of the mask
    plan.sharing = MaskSharing{args.n_rows, 1, 1, {1, 0}, 1, {0, 0}, 1, 1, 1, false};
    plan.wide = args.n_cols > kBlockColumns;
  }
  const auto kernel = softmax_backward_cluster_kernel<T>;
  const ClusterShape shape = cluster_of_row(args.n_cols, kBlockChunks * kChunkColumns);
  if (fast && !summed && shape.blocks != 0 && clusters_at_once(kernel, shape.blocks, shape.threads, 0, info) > 0) {
    return ONETRIP_LAUNCH_CLUSTERS(kernel, shape.blocks, grid_of_clusters(args.n_rows, shape.blocks),
                                   dim3(shape.threads), 0, stream, args, causality_of(args.n_rows, args.n_queries));
  }
  cudaError_t status = cudaSuccess;
  if (plan.wide) {
    status = fast ? launch_backward_wide<T, true>(args, plan.sharing, info, stream)
                  : launch_backward_wide<T, false>(args, plan.sharing, info, stream);
  } else if (!summed) {
    status = fast ? launch_backward_rows<T, true>(args, stream) : launch_backward_rows<T, false>(args, stream);
  } else {
    status = fast ? launch_backward_shared<T, true>(args, plan, stream)
                  : launch_backward_shared<T, false>(args, plan, stream);
  }
  if (status != cudaSuccess || args.dmask == nullptr || plan.sharing.n_parts == 1) return status;
  return launch_parts(args, plan.sharing, stream);
}

}  // namespace

int softmax_forward_cuda(const SoftmaxForward& args, int device, void* stream) {
  if (args.n_rows == 0 || args.n_cols == 0) return cudaSuccess;
  return on_device(device, [&](const DeviceInfo& info) {
#define ONETRIP_FORWARD(T) \
  if (args.dtype == DTypeOf<T>::value) return launch_forward<T>(args, info, static_cast<cudaStream_t>(stream));
    ONETRIP_SOFTMAX_TYPES(ONETRIP_FORWARD)
    return cudaErrorNotSupported;
  });
}

int softmax_backward_cuda(const SoftmaxBackward& args, int device, void* stream) {
  if (args.n_rows == 0 || args.n_cols == 0) return cudaSuccess;
  return on_device(device, [&](const DeviceInfo& info) {
#define ONETRIP_BACKWARD(T) \
  if (args.dtype == DTypeOf<T>::value) return launch_backward<T>(args, info, static_cast<cudaStream_t>(stream));
    ONETRIP_SOFTMAX_TYPES(ONETRIP_BACKWARD)
    return cudaErrorNotSupported;
  });
}

int64_t softmax_workspace_cuda(int64_t n_rows, int64_t n_cols, const MaskRows& mask_rows) {
  if (n_rows == 0 || n_cols == 0) return 0;
  int64_t n_floats = 0;
  for (const SharingPlan& plan : {plan_sharing<float>(n_cols, mask_rows), plan_sharing<__half>(n_cols, mask_rows)}) {
    const MaskSharing& sharing = plan.sharing;
    const int64_t wanted = sharing.n_parts > 1 ? sharing.n_mask_rows * sharing.n_parts * n_cols : 0;
    if (wanted > n_floats) n_floats = wanted;
  }
  return n_floats;
}

}  // namespace onetrip
