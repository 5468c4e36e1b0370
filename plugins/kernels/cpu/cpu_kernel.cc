#include "cpu_kernel.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#include "step.h"
#include "team.h"

namespace flashrnn::cpu {
namespace {

// A chunk of less work than this (multiply-accumulates per step) is not worth the 0.2 us that its step costs to share.
constexpr std::int64_t kMinChunkWork = 96 * 1024;

constexpr std::size_t kMaxTasks = 256;  // handed to the pool: more than it has threads, little to run through in vain

// Rows of states are an odd number of cache lines apart. A power of two would put all rows of a batch into a few sets
// of the L1 cache: 0.7 to 0.9 of the product's speed.
constexpr std::int64_t kLineFloats = 16;

// How a call is cut up. A function of B and the spec, never of T: though no result depends on it.
struct Plan {
  explicit Plan(const Params& p)
      : isa(best_isa()),
        G(num_gates(p.cell)),
        Gb(num_biases(p.cell)),
        S(num_states(p.cell)),
        blocks(static_cast<int>((p.D + isa.lanes - 1) / isa.lanes)),
        groups(even((blocks * static_cast<int>(G) + kGroupVectors - 1) / kGroupVectors)),
        stride(((p.D + isa.lanes + kLineFloats - 1) / kLineFloats | 1) * kLineFloats),
        rows(static_cast<int>(std::min<std::int64_t>(p.B, kMaxRows))),
        tiles(p.B == 0 ? 0 : (p.B + rows - 1) / rows) {
    const std::int64_t work = G * p.D * p.D * rows;
    chunks = static_cast<int>(std::clamp<std::int64_t>(work / kMinChunkWork, 1, std::min(groups, kMaxChunks)));
  }
  // Two threads get equal shares of few groups. An odd number of more than 8 stays: one group less, the others fuller,
  // makes an LSTM's step 0.99 times as long for one thread (D = 256, AVX2); two get 17 and 15 of its 32 blocks.
  static int even(int count) { return count == 1 || count > 8 ? count : (count + 1) / 2 * 2; }
  std::int64_t recurrences(const Params& p) const { return p.N * p.H * tiles; }
  std::int64_t packed_group(const Params& p) const { return kGroupVectors * p.D * isa.lanes; }  // elements
  std::int64_t packed_head(const Params& p) const { return groups * packed_group(p); }

  const Isa& isa;
  std::int64_t G, Gb, S;
  int blocks;             // of `lanes` units
  int groups;             // of blocks
  std::ptrdiff_t stride;  // of a row of units
  int rows;               // of a full tile
  std::int64_t tiles;
  int chunks;
};

// Hands out aligned pieces of the workspace; from a null base it measures how much is needed.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    std::byte* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

struct Workspace {
  Workspace(const Params& p, const Plan& plan, void* base) {
    Carver carver(base);
    const std::int64_t padded = p.N * p.H * p.B * plan.stride;
    progress = carver.take<Progress>(plan.recurrences(p));
    lengths = carver.take<std::int64_t>(p.B);
    b = carver.take<float>(p.N * p.H * plan.Gb * plan.stride);
    h[0] = carver.take<float>(padded);
    h[1] = carver.take<float>(padded);
    states = carver.take<float>(plan.S * padded);
    bytes = carver.used();
  }
  Progress* progress;     // [N, H, tiles]
  std::int64_t* lengths;  // [B], clamped to 0..T
  float* b;               // [N, H, Gb, stride]
  float* h[2];            // [N, H, B, stride]
  float* states;          // [N, H, tiles][S, rows, stride]
  std::size_t bytes;
};

template <class Element>
void pack_elements(const Params& p, const Plan& plan, void* packed) {
  const auto* r = static_cast<const Element*>(p.r);
  auto* out = static_cast<Element*>(packed);
  const std::int64_t lanes = plan.isa.lanes, V = panel_vectors(plan.isa.registers);
  std::fill(out, out + p.N * p.H * plan.packed_head(p), Element{0});
  for (std::int64_t head = 0; head < p.N * p.H; ++head) {
    const std::int64_t n = head / p.H, h = head % p.H;
    for (std::int64_t group = 0; group < plan.groups; ++group, out += plan.packed_group(p)) {
      const std::int64_t first = plan.blocks * group / plan.groups * lanes;
      const std::int64_t last = std::min(plan.blocks * (group + 1) / plan.groups * lanes, p.D);
      for (std::int64_t unit = first; unit < last; ++unit) {
        for (std::int64_t g = 0; g < plan.G; ++g) {
          const Element* from = r + (((n * plan.G + g) * p.H + h) * p.D + unit) * p.D;
          const std::int64_t vector = (unit - first) / lanes * plan.G + g;
          Element* to = out + (vector / V * p.D * V + vector % V) * lanes + (unit - first) % lanes;
          for (std::int64_t k = 0; k < p.D; ++k) to[k * V * lanes] = from[k];
        }
      }
    }
  }
}

// A row of [.., D] floats, padded with zeros.
void copy_padded(const float* from, std::int64_t D, float* to, std::ptrdiff_t stride) {
  std::copy(from, from + D, to);
  std::fill(to + D, to + stride, 0.0f);
}

// [N, Gb, H, D] to [N, H, Gb, stride].
void copy_biases(const Params& p, const Plan& plan, float* to) {
  for (std::int64_t head = 0; head < p.N * p.H; ++head) {
    for (std::int64_t g = 0; g < plan.Gb; ++g) {
      const float* from = p.b + ((head / p.H * plan.Gb + g) * p.H + head % p.H) * p.D;
      copy_padded(from, p.D, to + (head * plan.Gb + g) * plan.stride, plan.stride);
    }
  }
}

// Place of a recurrence's first row and unit in the states [S, N, B, H, D], of one state.
std::int64_t state_offset(const Params& p, std::int64_t s, std::int64_t head, std::int64_t row) {
  return ((s * p.N + head / p.H) * p.B + row) * p.H * p.D + head % p.H * p.D;
}

void describe(const Params& p, const Plan& plan, const Workspace& work, const void* packed, std::int64_t head,
              std::int64_t row, Recurrence& rec) {
  const std::int64_t bytes = element_bytes(p.dtype), heads = p.N * p.H, padded_row = head * p.B + row;
  const std::int64_t wx_row = heads * p.D * plan.G, y_row = heads * p.D;
  const bool batch_first = p.attributes.layout != 0;
  rec.wx_time = batch_first ? wx_row : wx_row * p.B;
  rec.wx_row = batch_first ? wx_row * p.T : wx_row;
  rec.y_time = batch_first ? y_row : y_row * p.B;
  rec.y_row = batch_first ? y_row * p.T : y_row;
  rec.wx = static_cast<const std::byte*>(p.wx) + (row * rec.wx_row + head * p.D * plan.G) * bytes;
  rec.y = static_cast<std::byte*>(p.y) + (row * rec.y_row + head * p.D) * bytes;
  rec.r = static_cast<const std::byte*>(packed) + head * plan.packed_head(p) * bytes;
  rec.b = work.b + head * plan.Gb * plan.stride;
  rec.h[0] = work.h[0] + padded_row * plan.stride;
  rec.h[1] = work.h[1] + padded_row * plan.stride;
  rec.states = work.states + plan.S * padded_row * plan.stride;
  rec.lengths = work.lengths + row;
  rec.T = p.T;
  rec.rows = static_cast<int>(std::min<std::int64_t>(plan.rows, p.B - row));
  rec.D = static_cast<int>(p.D);
  rec.blocks = plan.blocks;
  rec.groups = plan.groups;
  rec.stride = plan.stride;
  rec.backward = (head / p.H + p.attributes.reverse) % 2 == 1;
  rec.options = {p.attributes.clip, p.attributes.relu, p.attributes.normalizer_floor};
}

void load_states(const Params& p, const Plan& plan, std::int64_t head, std::int64_t row, const Recurrence& rec) {
  for (std::int64_t s = 0; s < plan.S; ++s) {
    for (std::int64_t i = 0; i < rec.rows; ++i) {
      const float* from = p.initial_states + state_offset(p, s, head, row + i);
      copy_padded(from, p.D, rec.states + (s * rec.rows + i) * plan.stride, plan.stride);
    }
  }
  plan.isa.round_h[static_cast<int>(p.dtype)](rec);
}

void store_states(const Params& p, const Plan& plan, std::int64_t head, std::int64_t row, const Recurrence& rec) {
  for (std::int64_t s = 0; s < plan.S; ++s) {
    for (std::int64_t i = 0; i < rec.rows; ++i) {
      const bool in_h = s == 0 && p.dtype == DType::kFloat32;
      const float* from = (in_h ? rec.h[p.T & 1] : rec.states + s * rec.rows * plan.stride) + i * plan.stride;
      std::copy(from, from + p.D, p.final_states + state_offset(p, s, head, row + i));
    }
  }
}

// What the threads of the pool share: each one visits every recurrence, starting from one of its own.
struct Team {
  Progress* progress;
  std::size_t count;
  std::atomic<std::size_t> arrived{0};

  static void task(void* argument, std::size_t) noexcept {
    auto& team = *static_cast<Team*>(argument);
    const std::size_t first = team.arrived.fetch_add(1, std::memory_order_relaxed);
    for (std::size_t i = 0; i < team.count; ++i) join(team.progress[(first + i) % team.count]);
  }
};

}  // namespace

std::size_t packed_bytes(const Params& p) noexcept {
  return static_cast<std::size_t>(p.N * p.H * Plan(p).packed_head(p) * element_bytes(p.dtype));
}

void pack(const Params& p, void* packed) noexcept {
  if (p.dtype == DType::kFloat32) {
    pack_elements<float>(p, Plan(p), packed);
  } else {
    pack_elements<std::uint16_t>(p, Plan(p), packed);
  }
}

std::size_t workspace_bytes(const Params& p) noexcept { return Workspace(p, Plan(p), nullptr).bytes; }

void run(const Params& p, const void* packed, void* workspace, const ThreadPool& pool) noexcept {
  const Plan plan(p);
  if (p.B == 0) return;
  if (p.T == 0) {
    std::copy(p.initial_states, p.initial_states + plan.S * p.N * p.B * p.H * p.D, p.final_states);
    return;
  }
  const Workspace work(p, plan, workspace);
  for (std::int64_t row = 0; row < p.B; ++row) {
    work.lengths[row] = std::clamp<std::int64_t>(p.sequence_lens[p.num_lens == 1 ? 0 : row], 0, p.T);
  }
  copy_biases(p, plan, work.b);
  const std::int64_t count = plan.recurrences(p);
  for (std::int64_t i = 0; i < count; ++i) {
    auto& progress = *new (work.progress + i) Progress;
    progress.step = plan.isa.step[static_cast<int>(p.cell)][static_cast<int>(p.dtype)];
    progress.chunks = plan.chunks;
    const std::int64_t head = i / plan.tiles, row = i % plan.tiles * plan.rows;
    describe(p, plan, work, packed, head, row, progress.recurrence);
    load_states(p, plan, head, row, progress.recurrence);
  }
  Team team{work.progress, static_cast<std::size_t>(count)};
  const std::size_t tasks = std::min<std::size_t>(team.count * static_cast<std::size_t>(plan.chunks), kMaxTasks);
  if (tasks == 1) {
    Team::task(&team, 0);
  } else {
    pool.run(pool.context, Team::task, tasks, &team);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    store_states(p, plan, i / plan.tiles, i % plan.tiles * plan.rows, work.progress[i].recurrence);
  }
}

const char* instruction_set() noexcept { return best_isa().name; }

}  // namespace flashrnn::cpu
