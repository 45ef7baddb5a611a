// z = residual + dropout(x + bias);  y = round(normalise(z)) * (weight + weight_offset) + norm_bias, and its gradients.
//
// Forward takes a row through two stages with float32 in between, templates over the dtypes that they meet: `assemble`
// reads x and residual, rounds z once and sums its deviations from the mean of the row's first columns; `normalise`
// writes y. normalise_rows does both where z is x. In between the row is x or z itself where that is float32, else a
// buffer of the thread. Memory sees each input read once and each output written once.
//
// Backward takes a block of rows through two: `project` reads dy and z and sums w*dy*n and w*dy of each row;
// `propagate` goes down the columns of the block, writes dx and dresidual, and adds to the parameter gradients, whose
// sums stay in registers for the rows of the block and in cache for the rows of the part. Reads dy, z, dz once, writes
// dx and dresidual once.
//
// Threads take tasks of consecutive rows. Backward's tasks are the parts of row_partition(), a function of the sizes
// alone, and the parts are added in order: no bit of a gradient depends on the number of threads or on which took what.
#include <cerrno>

#include "row_norm_backward.h"
#include "row_norm_forward.h"

namespace onetrip::ONETRIP_LEVEL {

int row_norm_forward(const RowNormForward& args) {
  const int64_t n_rows = args.n_rows, n_cols = args.n_cols;
  if (n_rows <= 0 || n_cols <= 0) return 0;
  const Parameter bias(args.bias, args.bias_dtype, 0.0f, n_cols);
  const Parameter weight(args.weight, args.weight_dtype, args.weight_offset, n_cols);
  const Parameter norm_bias(args.norm_bias, args.norm_bias_dtype, 0.0f, n_cols);
  if (bias.failed() || weight.failed() || norm_bias.failed()) return ENOMEM;

  const bool has_norm = args.norm != Norm::kNone, has_dropout = args.dropout.threshold != 0;
  const bool is_z_float32 = args.z_dtype == DType::kFloat32;
  const bool stores_z = args.z && !args.center_z;
  const auto is_x_or_float32 = [&](DType dtype) { return dtype == args.x_dtype || dtype == DType::kFloat32; };
  // Only these are compiled; another half type of y or n goes through normalise_row.
  const bool is_z_x = has_norm && !stores_z && !bias.values() && !args.residual && !has_dropout &&
                      is_x_or_float32(args.y_dtype) && is_x_or_float32(args.n_dtype);

  const DType residual_dtype = args.residual ? args.residual_dtype : args.x_dtype;
  if (!is_z_dtype(args.z_dtype, args.x_dtype, residual_dtype) || (args.center_z && !is_z_float32)) return ENOTSUP;
  const auto assemble_row = with_type(args.x_dtype, [&](auto x) {
    return with_type(residual_dtype, [&](auto r) {
      using X = decltype(x);
      using R = decltype(r);
      return with_type_or_float32<CommonType<X, R>>(args.z_dtype, [](auto z) { return &assemble<X, R, decltype(z)>; });
    });
  });
  const auto normalise_one = with_type(args.y_dtype, [&](auto y) {
    return with_type(args.n_dtype, [](auto n) { return &normalise_row<decltype(y), decltype(n)>; });
  });
  const auto normalise_all = with_type(args.x_dtype, [&](auto x) {
    using X = decltype(x);
    return with_type_or_float32<X>(args.y_dtype, [&](auto y) {
      return with_type_or_float32<X>(args.n_dtype, [](auto n) { return &normalise_rows<X, decltype(y), decltype(n)>; });
    });
  });

  // Narrow rows draw their random bits several rows at a time, wide ones some columns at a time.
  const bool draws_columns = has_dropout && n_cols > DropoutMask::kColumns;
  const int64_t rows_per_draw = clamp(DropoutMask::kColumns / n_cols, 1, DropoutMask::kMaxRows);
  const int64_t cols_per_draw = draws_columns ? DropoutMask::kColumns : n_cols;
  const int64_t rows_per_task = round_up(clamp(kTaskElements / n_cols, 1, n_rows), rows_per_draw);
  const int64_t row_floats = round_up(n_cols, 16) * (is_z_x && n_cols <= kMaxColumnsAtOnce ? kRowsAtOnce : 1);
  const int64_t x_size = size_of(args.x_dtype), residual_size = size_of(args.residual_dtype);
  const bool streams = n_rows * n_cols * size_of(has_norm ? args.y_dtype : args.z_dtype) >= kStreamBytes;
  const Normalisation norm = {args, weight.values(), norm_bias.values(), streams};
  // Reads are spread over what computes: the next row's x comes while this row's bits are drawn, its residual while
  // this row is normalised. 4096 x 1024 float32, p = 0.1, 2 threads: 2.51 ms, 2.71 with both in the latter; one thread
  // without either 5.4 against 4.1.
  const bool draws_rows_singly = has_dropout && rows_per_draw == 1;

  const auto run_row = [&](int64_t row, DropoutMask& mask, int row_of_draw, float* buffer) {
    const void* x = at(args.x, row * args.x_row_stride, args.x_dtype);
    const void* residual = at(args.residual, row * args.residual_row_stride, args.residual_dtype);
    const char* next_x = streams ? static_cast<const char*>(x) + args.x_row_stride * x_size : nullptr;
    const char* next_residual =
        streams && residual ? static_cast<const char*>(residual) + args.residual_row_stride * residual_size : nullptr;
    void* z = stores_z ? at(args.z, row * n_cols, args.z_dtype) : nullptr;
    const bool streams_z = streams && is_line_aligned(z, nullptr);
    const float* values = buffer;
    Deviations deviations;
    Assembly assembly = {x,     residual, bias.values(), z, streams_z, has_norm ? buffer : nullptr,
                         &mask, nullptr,  args.norm};
    if (z && is_z_float32 && !streams_z) {  // the stored z serves as the row
      assembly.z = nullptr;
      values = assembly.values = static_cast<float*>(z);
    }
    for (int64_t begin = 0; begin < n_cols; begin += cols_per_draw) {
      const int64_t end = smaller(begin + cols_per_draw, n_cols);
      if (draws_rows_singly) {
        mask.fill(row, 1, begin, end, n_cols, {next_x ? next_x + begin * x_size : nullptr, x_size});
      }
      if (has_dropout) assembly.bits = mask.row(row_of_draw);
      assemble_row(assembly, begin, end, deviations);
    }
    if (has_norm) {
      normalise_one(norm, row, values, deviations,
                    {draws_rows_singly ? nullptr : next_x, next_residual, x_size, residual_size});
    }
  };
  const auto run_task = [&](int64_t task, float* buffer) {
    const int64_t task_begin = task * rows_per_task, task_end = smaller(n_rows, task_begin + rows_per_task);
    if (is_z_x) return normalise_all(norm, task_begin, task_end, buffer);
    DropoutMask mask(args.dropout, buffer + row_floats);
    for (int64_t first = task_begin; first < task_end; first += rows_per_draw) {
      const int n = static_cast<int>(smaller(rows_per_draw, task_end - first));
      if (has_dropout && !draws_rows_singly) mask.fill(first, n, 0, n_cols, n_cols);
      for (int k = 0; k < n; ++k) run_row(first + k, mask, k, buffer);
    }
  };
  const int64_t n_tasks = (n_rows + rows_per_task - 1) / rows_per_task;
  return run_tasks(n_tasks, n_rows * n_cols, row_floats + DropoutMask::kFloats, run_task);
}

int row_norm_backward(const RowNormBackward& args) {
  const int64_t n_rows = args.n_rows, n_cols = args.n_cols;
  if (n_cols <= 0) return 0;
  const Parameter weight(args.weight, args.weight_dtype, args.weight_offset, n_cols);
  if (weight.failed()) return ENOMEM;
  const auto project_block = with_type(args.y_dtype, [&](auto y) {
    return with_type(args.z_dtype, [](auto z) { return &project<decltype(y), decltype(z)>; });
  });
  if (!is_z_dtype(args.z_dtype, args.x_dtype, args.residual_dtype)) return ENOTSUP;
  const bool has_dropout = args.dropout.threshold != 0;
  const bool is_norm = args.dy && args.dx && !args.dz && !args.dresidual && !args.dbias && !has_dropout;
  const auto propagate_block = with_type(args.x_dtype, [&](auto x) {
    using X = decltype(x);
    if (is_norm) return &propagate<true, X, X, X>;
    return with_type(args.residual_dtype, [&](auto r) {
      using R = decltype(r);
      return with_type_or_float32<CommonType<X, R>>(args.z_dtype,
                                                    [](auto d) { return &propagate<false, X, R, decltype(d)>; });
    });
  });

  const RowPartition partition = row_partition(n_rows, n_cols);
  struct Sum {
    void* to;
    DType dtype;
    int slot;  // among those wanted
  };
  Sum sums[] = {{args.dbias, args.bias_dtype, 0},
                {args.dweight, args.weight_dtype, 0},
                {args.dnorm_bias, args.norm_bias_dtype, 0}};
  int n_wanted = 0;
  for (Sum& sum : sums) sum.slot = sum.to ? n_wanted++ : 0;
  const int64_t part_floats = n_wanted * partition.slot_floats;

  const int64_t rows_per_block = clamp(kBlockElements / n_cols, kMinBlockRows, kMaxBlockRows);
  const bool draws_columns = has_dropout && rows_per_block * n_cols > DropoutMask::kWholeRows;
  const int64_t cols_per_draw = draws_columns ? DropoutMask::kColumns : n_cols;
  const int64_t row_floats = round_up(n_cols, 16), block_floats = rows_per_block * row_floats;
  const bool streams = n_rows * n_cols * size_of(args.x_dtype) >= kStreamBytes && n_cols % 32 == 0 &&
                       is_line_aligned(args.dx, args.dresidual);
  const bool copies_dy = args.dy && args.y_dtype != DType::kFloat32;
  const bool copies_z = args.dy && args.z_dtype != DType::kFloat32;

  const auto run_part = [&](int64_t part, float* buffer) {
    float* dump = buffer;
    float* dy_copy = dump + 16;
    float* z_copy = dy_copy + copies_dy * block_floats;
    DropoutMask mask(args.dropout, z_copy + copies_z * block_floats);
    memset(dump, 0, 16 * sizeof(float));
    float* slots = args.workspace + part * part_floats;
    if (n_wanted) memset(slots, 0, part_floats * sizeof(float));
    const auto slot = [&](int i) { return sums[i].to ? slots + sums[i].slot * partition.slot_floats : dump; };

    BackwardBlock block = {};
    block.weight = weight.values();
    block.dy_row_stride = copies_dy ? row_floats : args.dy_row_stride;
    block.z_row_stride = copies_z ? row_floats : args.z_row_stride;
    block.dz_row_stride = args.dz_row_stride;
    block.dy_size = size_of(args.y_dtype), block.z_size = size_of(args.z_dtype);
    block.next_dy_stride = args.dy_row_stride * block.dy_size;
    block.next_z_stride = args.z_row_stride * block.z_size;
    block.n_cols = n_cols;
    block.dbias = slot(0), block.dweight = slot(1), block.dnorm_bias = slot(2);
    block.dbias_step = args.dbias != nullptr, block.dweight_step = args.dweight != nullptr;
    block.dnorm_bias_step = args.dnorm_bias != nullptr;
    block.streams = streams;
    block.mask = has_dropout ? &mask : nullptr;
    const int64_t part_end = smaller(n_rows, (part + 1) * partition.rows_per_part);
    for (int64_t first = part * partition.rows_per_part; first < part_end; first += rows_per_block) {
      block.n_rows = static_cast<int>(smaller(rows_per_block, part_end - first));
      const void* dy = at(args.dy, first * args.dy_row_stride, args.y_dtype);
      const void* z = at(args.z, first * args.z_row_stride, args.z_dtype);
      block.next_dy = static_cast<const char*>(dy) + block.n_rows * block.next_dy_stride;
      block.next_z = static_cast<const char*>(z) + block.n_rows * block.next_z_stride;
      block.dy = copies_dy ? dy_copy : static_cast<const float*>(dy);
      block.z = copies_z ? z_copy : static_cast<const float*>(z);
      block.dz = at(args.dz, first * args.dz_row_stride, args.z_dtype);
      block.dx = at(args.dx, first * n_cols, args.x_dtype);
      block.dresidual = at(args.dresidual, first * n_cols, args.residual_dtype);
      if (args.dy) project_block(args, first, dy_copy, z_copy, block);
      for (int64_t begin = 0; begin < n_cols; begin += cols_per_draw) {
        const int64_t end = smaller(begin + cols_per_draw, n_cols);
        if (has_dropout) mask.fill(first, block.n_rows, begin, end, n_cols);
        propagate_block(block, begin, end);
      }
    }
  };
  const int64_t buffer_floats = 16 + (copies_dy + copies_z) * block_floats + DropoutMask::kFloats;
  if (const int error = run_tasks(partition.n_parts, n_rows * n_cols, buffer_floats, run_part)) return error;

  const int64_t cols_per_task = 256;
  return run_tasks((n_cols + cols_per_task - 1) / cols_per_task, partition.n_parts * part_floats, 16,
                   [&](int64_t task, float*) {
                     const int64_t begin = task * cols_per_task, end = smaller(begin + cols_per_task, n_cols);
                     for (const Sum& sum : sums) {
                       if (!sum.to) continue;
                       const float* slots = args.workspace + sum.slot * partition.slot_floats;
                       with_type(sum.dtype, [&](auto type) {
                         add_parts<decltype(type)>(slots, part_floats, partition.n_parts, sum.to, begin, end);
                       });
                     }
                   });
}

}  // namespace onetrip::ONETRIP_LEVEL
