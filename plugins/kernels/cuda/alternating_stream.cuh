// R of the alternating mode on its way to the products: part of it stays in registers and shared memory, the rest is
// streamed from L2 and device memory in every step.
//
// A stage is what a warp multiplies at a time: 16 rows of R, 128 bytes of each, 2 KB. Lane 4g + q holds rows g and g +
// 8, of each the 16 bytes at 16 q and at 64 + 16 q; these are operands of mma.m16n8k16 as they lie, if k is dealt in
// the same way for h. Every lane copies what it will read itself, so nothing here waits for another thread.
//
// The stages of a step come in a fixed order, and after the last one the first one again: copies run ahead into the
// next step, while its blocks still wait for h.
#pragma once

#include "alternating.h"
#include "alternating_ptx.cuh"
#include "elements.cuh"
#include "tensors.cuh"

namespace flashrnn::cuda {

inline constexpr int kSliceBytes = 128;   // of a row of R or h: what a stage covers
inline constexpr int kStageBytes = 2048;  // of a warp

// One configuration of the kernel. A pass multiplies 2 kTiles halves, as many whole groups of 8 units with all gates as
// fit, with kRows rows of the batch.
template <Cell kCell_, DType kType_, int kMostTiles, int kRows_, int kHeld_>
struct Streaming {
  static constexpr Cell kCell = kCell_;
  static constexpr DType kType = kType_;
  static constexpr bool kFma = kType == DType::kFloat32;
  static constexpr int kGates = num_gates(kCell), kRows = kRows_;
  static constexpr int kGroups = 2 * kMostTiles / kGates;          // of 8 units, in a pass
  static constexpr int kTiles = (kGroups * kGates + 1) / 2;        // of a pass
  static constexpr int kHeld = kHeld_ < kTiles ? kHeld_ : kTiles;  // stages in registers, of the first pass and slice
  static constexpr int kPassUnits = kHalfUnits * kGroups;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRing = 4;  // stages of a warp that are being copied
  static_assert(kHeld <= kTiles && kGroups >= 1, "what is held is of one slice");
};

// What a launch tells its blocks beside the tensors.
struct Share : Division {
  int first_group = 0;                // of (direction, head, range of the batch)
  int resident = 0;                   // stages of a warp that stay in shared memory, at most
  int slots = 0;                      // of the rings of alternating_tiled.cuh
  void* hidden[2] = {};               // h by direction, head and row of the batch, rounded
  std::uint32_t* arrivals = nullptr;  // by group of the launch
};

// What a block does.
struct Work {
  int part, direction, head;  // part counts both
  int first_row, end_row;
  int first_unit, groups;  // of 8 units
  int slices;              // of a warp: 128 bytes of each row
  std::int64_t row_bytes;

  __device__ __forceinline__ Work(const Tensors& t, const Share& share, int warps, int element_bytes) {
    const int block = static_cast<int>(blockIdx.x), group = share.first_group + block / share.unit_blocks;
    part = group / share.ranges;
    direction = part / t.H, head = part % t.H;
    first_row = group % share.ranges * share.range_rows;
    end_row = min(first_row + share.range_rows, t.B);
    first_unit = block % share.unit_blocks * share.units;
    groups = (min(share.units, t.D - first_unit) + kHalfUnits - 1) / kHalfUnits;
    row_bytes = static_cast<std::int64_t>(t.D) * element_bytes;
    slices = static_cast<int>((row_bytes + warps * kSliceBytes - 1) / (warps * kSliceBytes));
  }
};

// Of stages in a row, which stay in shared memory: `resident` of `period`, evenly spread.
struct Spread {
  int resident, period, error = 0, count = 0;
  // Whether the next one does.
  __device__ __forceinline__ bool next() {
    error += resident;
    const bool stays = error >= period;
    if (stays) error -= period;
    if (++count == period) count = error = 0;
    return stays;
  }
};

struct Stage {
  uint4 piece[2][2];  // [rows g, g + 8][first, second 64 bytes]
};

// Where the stages of a block begin in R: of each m-tile the bytes from row 0 of the first gate to the first rows of
// its two halves, in shared memory.
template <class C>
struct TileTable {
  static constexpr int kEntryBytes = 2 * sizeof(std::int64_t);
  __host__ __device__ static std::size_t bytes(int units) {
    return static_cast<std::size_t>(units / kHalfUnits + C::kGroups - 1) / C::kGroups * C::kTiles * kEntryBytes;
  }

  std::int64_t* at;

  // Halves behind the block's units repeat some units, and nobody reads their sums.
  __device__ __forceinline__ void fill(const Tensors& t, const Work& work) const {
    const std::int64_t gate_bytes = static_cast<std::int64_t>(t.H) * t.D * work.row_bytes;
    const int passes = (work.groups + C::kGroups - 1) / C::kGroups;
    for (int i = static_cast<int>(threadIdx.x); i < passes * 2 * C::kTiles; i += C::kThreads) {
      const int half = i % (2 * C::kTiles), group = i / (2 * C::kTiles) * C::kGroups + half / C::kGates;
      const int unit = min(work.first_unit + group * kHalfUnits, t.D - kHalfUnits);
      at[i] = half % C::kGates * gate_bytes + unit * work.row_bytes;
    }
  }
};

template <class C>
struct WeightStream {
  const char* rows;  // this lane's bytes of its first row of the first gate, in the warp's first slice
  int inside;        // bytes from there to the end of the row
  int groups, slices;
  Spread ahead, here;                           // what is to be copied, and to be read
  std::uint32_t table, entry, pass_end;         // shared addresses: of the tiles to be copied
  int slice = 0;                                // to be copied
  std::uint32_t ring, fill = 0, read_ring = 0;  // shared address, and bytes from there
  std::uint32_t stay, read_stay = 0;

  __device__ __forceinline__ WeightStream(const Tensors& t, const Work& work, const TileTable<C>& tiles_at,
                                          int resident, std::uint32_t shared, int warp, int lane) {
    using E = Element<C::kType>;
    const std::int64_t offset = warp * work.slices * kSliceBytes + lane % 4 * 16;
    inside = static_cast<int>(offset < work.row_bytes ? work.row_bytes - offset : 0);
    rows = reinterpret_cast<const char*>(static_cast<const E*>(t.r) + weight_offset(t, C::kGates, 0, work.part, 0)) +
           lane / 4 * work.row_bytes + (inside > 0 ? offset : 0);
    groups = work.groups, slices = work.slices;
    int period = -min(C::kHeld, tiles(0));
    for (int p = 0; p < passes(); ++p) period += slices * tiles(p);
    here = ahead = {min(resident, period), period};
    table = ptx::shared_address(tiles_at.at);
    ring = shared + static_cast<std::uint32_t>(lane) * 16;
    stay = ring + C::kRing * kStageBytes;
  }

  __device__ __forceinline__ int passes() const { return (groups + C::kGroups - 1) / C::kGroups; }
  __device__ __forceinline__ int tiles(int p) const {
    return (min(C::kGroups, groups - p * C::kGroups) * C::kGates + 1) / 2;
  }
  __device__ __forceinline__ std::uint32_t entry_of(int p, int tile) const {
    return table + static_cast<std::uint32_t>((p * C::kTiles + tile) * TileTable<C>::kEntryBytes);
  }

  __device__ __forceinline__ void copy(std::uint32_t to) const {
    const int left = inside - slice * kSliceBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* const from = rows + ptx::load_shared_8_signed(entry + 8 * half) + slice * kSliceBytes;
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        ptx::copy_async_16_or_zero(64 * piece < left, to + static_cast<std::uint32_t>((2 * half + piece) * 512),
                                   64 * piece < left ? from + 64 * piece : rows);
      }
    }
  }
  __device__ __forceinline__ void start_pass(int p) {
    entry = entry_of(p, 0), pass_end = entry_of(p, tiles(p));
    slice = 0;
  }
  __device__ __forceinline__ void start_period() {
    start_pass(0);
    entry = entry_of(0, min(C::kHeld, tiles(0)));
    if (entry == pass_end) next_slice();
  }
  __device__ __forceinline__ void next_slice() {
    const std::uint32_t pass = (pass_end - table - 1) / (C::kTiles * TileTable<C>::kEntryBytes);
    entry = entry_of(static_cast<int>(pass), 0);
    if (++slice == slices) start_pass(static_cast<int>(pass) + 1);
  }
  __device__ __forceinline__ void advance() {
    entry += TileTable<C>::kEntryBytes;
    if (ahead.count == 0) {
      start_period();
    } else if (entry == pass_end) {
      next_slice();
    }
  }

  // What is held, what stays, and the first copies of the rest.
  __device__ __forceinline__ void start(Stage (&held)[C::kHeld > 0 ? C::kHeld : 1]) {
#pragma unroll
    for (int m = 0; m < C::kHeld; ++m) {
      const std::uint32_t at = entry_of(0, min(m, tiles(0) - 1));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* const from = rows + ptx::load_shared_8_signed(at + 8 * half);
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
          held[m].piece[half][piece] =
              64 * piece < inside ? __ldg(reinterpret_cast<const uint4*>(from + 64 * piece)) : uint4{};
        }
      }
    }
    start_period();
    std::uint32_t to = stay;
    for (int i = 0; i < ahead.period; ++i) {
      if (ahead.next()) {
        copy(to);
        to += kStageBytes;
      }
      advance();
    }
    ptx::commit_copies();
    for (int i = 0; i < C::kRing; ++i) refill();
    ptx::wait_copies<C::kRing>();  // all but the ring
  }

  // Copies the next stage that does not stay.
  __device__ __forceinline__ void refill() {
    if (ahead.resident < ahead.period) {
      while (ahead.next()) advance();
      copy(ring + fill);
      advance();
      fill = fill + kStageBytes == C::kRing * kStageBytes ? 0 : fill + kStageBytes;
    }
    ptx::commit_copies();
  }

  // The next stage of this step or, behind the last one, the first of the next. Its place in the ring is free again
  // once it has been multiplied. Returns whether it came through the ring.
  __device__ __forceinline__ bool read(Stage& stage) {
    const bool stays = here.next();
    std::uint32_t from = stay + read_stay;
    if (stays) {
      read_stay += kStageBytes;
    } else {
      ptx::wait_copies<C::kRing - 2>();
      from = ring + read_ring;
      read_ring = read_ring + kStageBytes == C::kRing * kStageBytes ? 0 : read_ring + kStageBytes;
    }
    if (here.count == 0) read_stay = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        stage.piece[h][piece] = ptx::load_shared_16(from + static_cast<std::uint32_t>((2 * h + piece) * 512));
      }
    }
    return !stays;
  }
};

}  // namespace flashrnn::cuda
