#include "experts.h"

#include <algorithm>
#include <stdexcept>

namespace sparkle {
namespace {

constexpr int kPartOutputs = 32;       // of the inner size that a thread computes at once
constexpr int kDownPartOutputs = 128;  // the inner size is the smaller one: parts of about the same bytes
constexpr int kLinearPartBytes = 64 << 10;

struct RowPointers {
  std::vector<const float*> x, sums;
  Rows rows(int first, int n) const { return {x.data() + first, sums.data() + first, n}; }
};

// Parts of `n_outputs`, multiples of the tile.
int n_parts(int n_outputs, int part) { return (n_outputs + part - 1) / part; }

}  // namespace

void linear(Processor& processor, const QuantMatrix& m, const float* x, int n_rows, float* y) {
  const int n_groups = m.n_groups();
  std::vector<float> sums(static_cast<std::size_t>(n_rows) * n_groups);
  RowPointers pointers;
  for (int r = 0; r < n_rows; ++r) {
    pointers.x.push_back(x + static_cast<std::size_t>(r) * m.n_in);
    pointers.sums.push_back(sums.data() + static_cast<std::size_t>(r) * n_groups);
    processor.use.group_sums(pointers.x.back(), m.n_in, m.group, sums.data() + static_cast<std::size_t>(r) * n_groups);
  }
  const int fit = kLinearPartBytes / static_cast<int>(m.row_bytes()) / kOutputTile * kOutputTile;
  const int part = std::max(fit, kOutputTile);
  processor.workers.run(static_cast<std::uint32_t>(n_parts(m.n_out, part)), [&](std::uint32_t i, int thread) {
    const int begin = static_cast<int>(i) * part, end = std::min(m.n_out, begin + part);
    processor.use.linear(m, begin, end, pointers.rows(0, n_rows), y + begin, m.n_out,
                         processor.scratch_of(thread, scratch_floats(m)));
  });
}

ExpertMlp::ExpertMlp(std::vector<ExpertRegion> regions) : regions_(std::move(regions)) {
  if (regions_.empty()) throw std::invalid_argument("experts without a region");
  for (const auto& region : regions_) {
    for (const Projection* p : {&region.gate, &region.up, &region.down}) check(p->shape);
    const QuantMatrix &gate = region.gate.shape, &up = region.up.shape, &down = region.down.shape;
    if (gate.n_in != up.n_in || gate.n_out != up.n_out || down.n_in != gate.n_out || gate.group != up.group ||
        down.n_out != regions_.front().down.shape.n_out)
      throw std::invalid_argument("an expert's projections do not fit each other");
  }
}

const ExpertRegion& ExpertMlp::region_of(std::int32_t slot) const {
  for (const auto& region : regions_)
    if (slot >= 0 && static_cast<std::uint32_t>(slot) - region.first_slot < region.n_slots) return region;
  throw std::out_of_range("slot " + std::to_string(slot) + " is in no region of these experts");
}

void ExpertMlp::run(Processor& processor, const float* x, const std::vector<Pair>& pairs, float* out) {
  std::vector<Pair> ordered;
  for (const Pair& pair : pairs)
    if (pair.slot >= 0) ordered.push_back(pair);
  if (ordered.empty()) return;
  std::stable_sort(ordered.begin(), ordered.end(), [](const Pair& a, const Pair& b) { return a.slot < b.slot; });

  std::vector<Job> jobs;
  for (int i = 0; i < static_cast<int>(ordered.size()); ++i) {
    if (i == 0 || ordered[i].slot != ordered[i - 1].slot) {
      const ExpertRegion& region = region_of(ordered[i].slot);
      jobs.push_back({&region, static_cast<std::uint32_t>(ordered[i].slot) - region.first_slot, i, 0});
    }
    ++jobs.back().n_rows;
  }

  const QuantMatrix &gate = regions_.front().gate.shape, &down = regions_.front().down.shape;
  const int n_pairs = static_cast<int>(ordered.size()), n_inner = gate.n_out;
  const std::size_t x_groups = gate.n_groups(), inner_groups = down.n_groups();
  sums_.resize(n_pairs * x_groups);
  inner_.resize(static_cast<std::size_t>(n_pairs) * n_inner);
  inner_sums_.resize(n_pairs * inner_groups);

  // Sums of x's groups, once for each row; `ordered` may name a row many times.
  RowPointers inputs, inners;
  int n_rows = 0;
  for (const Pair& pair : ordered) n_rows = std::max(n_rows, pair.row + 1);
  std::vector<const float*> sums_of(static_cast<std::size_t>(n_rows), nullptr);
  std::size_t n_sums = 0;
  for (int i = 0; i < n_pairs; ++i) {
    const float* row = x + static_cast<std::size_t>(ordered[i].row) * gate.n_in;
    if (sums_of[ordered[i].row] == nullptr) {
      float* sums = sums_.data() + n_sums++ * x_groups;
      processor.use.group_sums(row, gate.n_in, gate.group, sums);
      sums_of[ordered[i].row] = sums;
    }
    inputs.x.push_back(row);
    inputs.sums.push_back(sums_of[ordered[i].row]);
    inners.x.push_back(inner_.data() + static_cast<std::size_t>(i) * n_inner);
    inners.sums.push_back(inner_sums_.data() + i * inner_groups);
  }

  const int n_jobs = static_cast<int>(jobs.size());
  const int inner_parts = n_parts(n_inner, kPartOutputs);
  processor.workers.run(static_cast<std::uint32_t>(n_jobs * inner_parts), [&](std::uint32_t i, int thread) {
    const Job& job = jobs[i / inner_parts];
    const int begin = static_cast<int>(i % inner_parts) * kPartOutputs;
    const int end = std::min(n_inner, begin + kPartOutputs), n = end - begin;
    const QuantMatrix gate_of = job.region->gate.of(job.slot), up_of = job.region->up.of(job.slot);
    const std::size_t part = static_cast<std::size_t>(job.n_rows) * n;
    float* scratch = processor.scratch_of(thread, 2 * part + scratch_floats(gate_of));
    const Rows rows = inputs.rows(job.first, job.n_rows);
    processor.use.linear(gate_of, begin, end, rows, scratch, n, scratch + 2 * part);
    processor.use.linear(up_of, begin, end, rows, scratch + part, n, scratch + 2 * part);
    for (int r = 0; r < job.n_rows; ++r)
      processor.use.swiglu(scratch + r * n, scratch + part + r * n, n,
                           inner_.data() + static_cast<std::size_t>(job.first + r) * n_inner + begin);
  });

  for (int i = 0; i < n_pairs; ++i)
    processor.use.group_sums(inners.x[i], n_inner, down.group, inner_sums_.data() + i * inner_groups);

  const int down_parts = n_parts(down.n_out, kDownPartOutputs);
  processor.workers.run(static_cast<std::uint32_t>(n_jobs * down_parts), [&](std::uint32_t i, int thread) {
    const Job& job = jobs[i / down_parts];
    const int begin = static_cast<int>(i % down_parts) * kDownPartOutputs;
    const int end = std::min(down.n_out, begin + kDownPartOutputs), n = end - begin;
    const QuantMatrix down_of = job.region->down.of(job.slot);
    const std::size_t part = static_cast<std::size_t>(job.n_rows) * n;
    float* scratch = processor.scratch_of(thread, part + scratch_floats(down_of));
    processor.use.linear(down_of, begin, end, inners.rows(job.first, job.n_rows), scratch, n, scratch + part);
    for (int r = 0; r < job.n_rows; ++r)
      std::copy_n(scratch + r * n, n,
                  out + static_cast<std::size_t>(ordered[job.first + r].place) * down.n_out + begin);
  });
}

}  // namespace sparkle
