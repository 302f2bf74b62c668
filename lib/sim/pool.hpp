// SPDX-License-Identifier: MIT
//
// Memory pools: of this process (created, or the standard one of a device) and imported ones.
//
// A pool hands out blocks: an address with a chunk of its own behind it. Memory that was freed and whose work is done
// becomes an idle block, which the next allocation of about its size gets, at the same address with the same bytes; an
// importer that still maps it then writes into the next owner's memory (fact P7). Idle blocks above the threshold go
// back to the device at the next synchronisation. A real pool carves its blocks from pieces of 32 MiB; here that shows
// only in what it says about itself.
//
// PoolMemory is one allocation or import. The register owns it until it is freed; after cuMemFreeAsync, the operation
// in the stream does. A pool that was destroyed lives until all its memory came back.
#pragma once

#include <sim/address_space.hpp>

#include <array>
#include <memory>
#include <mutex>
#include <vector>

namespace gpuloan::sim {

class Block {
 public:
  Block() noexcept = default;
  Block(Block&&) noexcept = default;
  Block& operator=(Block&& other) noexcept;
  ~Block();
  [[nodiscard]] static CuResult make(std::shared_ptr<Chunk> chunk, Block& out);

  [[nodiscard]] explicit operator bool() const noexcept { return chunk_ != nullptr; }
  [[nodiscard]] DevicePtr start() const noexcept { return start_; }
  [[nodiscard]] const std::shared_ptr<Chunk>& chunk() const noexcept { return chunk_; }
  [[nodiscard]] std::size_t size() const noexcept { return chunk_->size(); }

 private:
  DevicePtr start_ = 0; // set aside in the address space
  std::shared_ptr<Chunk> chunk_;
};

class PoolState : public std::enable_shared_from_this<PoolState> {
 public:
  enum class Origin { Standard, Created, Imported };
  PoolState(Origin which, int device, int types);

  const Origin origin;
  const int physical;
  const int handle_types; // HandleType bits
  // These are set before anybody else sees the pool.
  std::uint64_t handle = 0;
  std::uint64_t max_bytes = 0; // 0: no limit

  [[nodiscard]] CuResult allocate(std::size_t bytes, DevicePtr& out);
  // Gives memory of an imported pool an address.
  [[nodiscard]] CuResult import(std::shared_ptr<Chunk> chunk, std::size_t bytes, DevicePtr& out);

  // A new descriptor that stands for the pool, and what it is known by once there was one.
  [[nodiscard]] CuResult export_to(int& out_fd);
  [[nodiscard]] bool exported() const;
  [[nodiscard]] off_t identity() const; // StateFile::pool_byte; 0 before it was exported
  void set_identity(off_t identity); // of an imported pool

  void set_threshold(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t threshold() const;
  [[nodiscard]] std::uint64_t used_bytes() const;
  [[nodiscard]] std::uint64_t reserved_bytes() const;
  void set_access(int device, int access);
  // cuMemPoolTrimTo: gives back what is idle, but keeps at least so much.
  void trim_to(std::uint64_t keep);
  void trim_to_threshold();
  // The end of the handle: nothing is kept any more. False, and no change, while memory of an imported pool is out.
  [[nodiscard]] bool retire();

 private:
  friend class PoolMemory;
  [[nodiscard]] CuResult make_block(std::size_t bytes, Block& out);
  [[nodiscard]] std::uint64_t held_bytes() const;
  [[nodiscard]] Block take_idle(std::size_t bytes);
  void hand_out(RangeKind kind, Block block, std::size_t bytes, DevicePtr& out);
  void take_back(Block block, std::size_t bytes);
  [[nodiscard]] std::vector<Block> drop_idle(std::uint64_t keep);

  mutable std::mutex mutex_; // all below
  std::vector<Block> idle_; // oldest first
  std::array<int, kMaxDevices> access_{};
  std::uint64_t threshold_ = 0;
  std::uint64_t used_ = 0; // as asked for
  std::uint64_t held_ = 0; // in use or idle
  std::size_t out_ = 0; // pieces of PoolMemory
  bool retired_ = false;
  Fd card_; // pool_share.cpp
  off_t identity_ = 0;
};

using PoolRef = std::shared_ptr<PoolState>;

class PoolMemory {
 public:
  PoolMemory(PoolRef pool, RangeKind kind, Block block, std::size_t bytes) noexcept
      : pool_(std::move(pool)), kind_(kind), block_(std::move(block)), bytes_(bytes) {}
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;
  ~PoolMemory(); // takes the memory out of the address space; the block goes back to the pool

  [[nodiscard]] DevicePtr start() const noexcept { return block_.start(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] RangeKind kind() const noexcept { return kind_; }
  [[nodiscard]] const PoolState& pool() const noexcept { return *pool_; }
  [[nodiscard]] const Chunk& chunk() const noexcept { return *block_.chunk(); }
  // Its pool goes on counting it as used (fact P15).
  void stay_counted() noexcept { counted_ = 0; }

 private:
  const PoolRef pool_;
  const RangeKind kind_; // Pooled or Imported
  Block block_;
  const std::size_t bytes_;
  std::size_t counted_ = bytes_;
};

// What every synchronising call does at its end.
void trim_pools();

} // namespace gpuloan::sim
