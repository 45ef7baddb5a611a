// Steps of Adam: see driver.h. squares, where it is an output: the sums of squares of the gradients' chunks, float64 by
// its bits. Every other output NAME is updated in place: it begins as the input old.NAME.
#include "common/adam.h"
#include "driver.h"

namespace {

std::string numbered(const std::string& name, int64_t i) { return name + "." + std::to_string(i); }

int64_t address(const Case& c, const std::string& name) { return reinterpret_cast<int64_t>(c.tensor(name)); }

onetrip::AdamGroup group_of(const Case& c, int64_t i) {
  const auto number = [&](const char* name) { return c.numbers.at(numbered("group", i) + "." + name); };
  return {number("lr"),
          number("beta1"),
          number("beta2"),
          number("eps"),
          number("weight_decay"),
          number("decoupled") != 0.0,
          number("maximize") != 0.0,
          reinterpret_cast<const float*>(c.tensor(numbered("lr", i)))};
}

// Chunks of the tensors of a kind, next to each other, in the order in which kinds first occur.
void sort_chunks(const Case& c, const std::vector<onetrip::AdamTensor>& tensors, std::vector<onetrip::AdamKind>* kinds,
                 std::vector<onetrip::AdamChunk>* chunks) {
  std::vector<std::vector<onetrip::AdamChunk>> of_kind;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const onetrip::DType param = c.dtype(numbered("param_dtype", i)), grad = c.dtype(numbered("grad_dtype", i));
    const bool is_8bit = tensors[i].exp_avg_scale != 0;
    const auto rounding = static_cast<onetrip::AdamRounding>(c.integer(numbered("rounding", i)));
    size_t k = 0;
    const auto same = [&](const onetrip::AdamKind& kind) {
      return kind.param_dtype == param && kind.grad_dtype == grad && kind.is_8bit == is_8bit &&
             kind.rounding == rounding;
    };
    while (k < kinds->size() && !same((*kinds)[k])) ++k;
    if (k == kinds->size()) {
      kinds->push_back({param, grad, is_8bit, rounding, 0, 0});
      of_kind.emplace_back();
    }
    for (int64_t first = 0; first < tensors[i].numel; first += onetrip::kAdamChunk)
      of_kind[k].push_back({static_cast<int64_t>(i), first});
  }
  for (size_t k = 0; k < kinds->size(); ++k) {
    (*kinds)[k].first_chunk = static_cast<int64_t>(chunks->size());
    (*kinds)[k].n_chunks = static_cast<int64_t>(of_kind[k].size());
    chunks->insert(chunks->end(), of_kind[k].begin(), of_kind[k].end());
  }
}

int launch(const Case& c) {
  for (const std::string& name : c.output_order)
    if (name != "squares") std::memcpy(c.tensor(name), c.tensor("old." + name), c.outputs.at(name).bytes());
  std::vector<onetrip::AdamTensor> tensors;
  for (int64_t i = 0; i < c.integer("n_tensors"); ++i) {
    const std::string residual = numbered("residual", i);
    tensors.push_back({address(c, numbered("param", i)), address(c, numbered("grad", i)),
                       address(c, numbered("exp_avg", i)), address(c, numbered("exp_avg_sq", i)),
                       address(c, numbered("exp_avg_scale", i)), address(c, numbered("exp_avg_sq_scale", i)),
                       c.integer(numbered("numel", i)), c.integer(numbered("counter", i)),
                       c.tensor(residual) != nullptr ? address(c, residual) : c.integer(numbered("first", i)),
                       c.integer(numbered("key", i))});
  }
  std::vector<onetrip::AdamCounter> counters;
  for (int64_t i = 0; i < c.integer("n_counters"); ++i)
    counters.push_back({address(c, numbered("step", i)), c.integer(numbered("group_of_counter", i))});
  std::vector<onetrip::AdamGroup> groups;
  for (int64_t i = 0; i < c.integer("n_groups"); ++i) groups.push_back(group_of(c, i));
  std::vector<onetrip::AdamKind> kinds;
  std::vector<onetrip::AdamChunk> chunks;
  sort_chunks(c, tensors, &kinds, &chunks);
  if (char* const sums = c.tensor("squares")) {
    const onetrip::AdamSquares squares{tensors.data(), chunks.data(), kinds.data(), static_cast<int64_t>(kinds.size()),
                                       reinterpret_cast<double*>(sums)};
    if (const int code = onetrip::adam_squares_cuda(squares, c.device, nullptr)) return code;
  }
  onetrip::AdamScalars unwritten;
  std::memset(static_cast<void*>(&unwritten), 0xFF, sizeof unwritten);
  std::vector<onetrip::AdamScalars> scalars(counters.size(), unwritten);
  const onetrip::AdamStep args{tensors.data(),
                               chunks.data(),
                               kinds.data(),
                               static_cast<int64_t>(kinds.size()),
                               counters.data(),
                               static_cast<int64_t>(counters.size()),
                               groups.data(),
                               static_cast<int64_t>(groups.size()),
                               scalars.data(),
                               reinterpret_cast<const float*>(c.tensor("grad_scale")),
                               reinterpret_cast<const float*>(c.tensor("found_inf"))};
  return onetrip::adam_step_cuda(args, c.device, nullptr);
}

}  // namespace
