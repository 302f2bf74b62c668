// SPDX-License-Identifier: MIT
//
// Arena: the exporter's memory for one peer, in chunks.
//
// A chunk is one physical allocation with one descriptor, for one peer and one access class. Its descriptor crosses the
// socket once, before the first loan in it; after that a loan is (chunk, offset, bytes). Regions of 1 MiB and more get a
// chunk of their own (2 MiB rounding); smaller ones share 2 MiB chunks. Device chunks are VMM memory, host chunks are
// memfds that both sides map (`segment`).
//
// States of a chunk:
//   Live     has regions, or is idle and kept for the next region of the same class
//   Recalled idle and over the threshold: the peer was asked to unmap; dropped at UNMAPPED
//   Retired  the peer was lost while it could still map it: no new regions; dropped with its last region
//   dropped  unmapped and released by us: gone if the peer never had it, else surrendered, that is, counted until the
//            peer's holders are proven gone. Soundness does not rest on that proof: the driver reuses the memory only
//            when the last mapping anywhere is gone (V3, V12).
//
// Locked inside; may be called with the exporter's lock held, never calls back. Region objects stay valid until destroy().
#pragma once

#include <driver/handles.hpp>
#include <memory/account.hpp>
#include <memory/arena_streams.hpp>

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

namespace gpuloan::memory {

struct RegionSpec {
  std::uint64_t bytes = 0;
  std::uint64_t alignment = 0; // 0: 256; power of two up to 2 MiB
  gpuloan_access access = GPULOAN_ACCESS_WRITE;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE;
  bool own_chunk = false; // shares its chunk with nothing, also when small
};

class Arena;
struct PooledChunk;

// A live piece of a chunk. Everything but the arena's bookkeeping is constant, so it is read without a lock.
class Region {
 public:
  [[nodiscard]] std::uint64_t bytes() const noexcept { return spec_.bytes; }
  [[nodiscard]] const RegionSpec& spec() const noexcept { return spec_; }
  // Exporter's device address; 0 for 0 bytes, and for host memory without a device.
  [[nodiscard]] std::uint64_t pointer() const noexcept { return pointer_; }
  [[nodiscard]] std::byte* host() const noexcept { return host_; } // host memory only
  [[nodiscard]] std::uint64_t chunk_id() const noexcept { return chunk_id_; } // 0 for 0 bytes
  [[nodiscard]] std::uint64_t chunk_offset() const noexcept { return offset_; }
  [[nodiscard]] std::uint64_t chunk_bytes() const noexcept { return chunk_bytes_; }
  [[nodiscard]] bool alone() const noexcept { return own_chunk_; }

 private:
  friend class Arena;
  RegionSpec spec_;
  PooledChunk* chunk_ = nullptr;
  std::uint64_t chunk_id_ = 0, offset_ = 0, chunk_bytes_ = 0, pointer_ = 0;
  std::byte* host_ = nullptr;
  bool own_chunk_ = false;
  StreamUses uses_;                       // of it (rule 11)
  std::list<Region>::iterator self_;      // in the arena's list
};

// What has to be told to the peer before a loan in the chunk.
struct Announcement {
  bool needed = false;
  std::uint64_t chunk = 0;
  std::uint64_t bytes = 0;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE;
  gpuloan_access access = GPULOAN_ACCESS_WRITE;
  UniqueFd fd; // a duplicate, the caller's
};

struct ArenaStats {
  std::uint64_t chunks = 0, live_bytes = 0, idle_bytes = 0, retired_bytes = 0, surrendered_bytes = 0;
};

class Arena {
 public:
  static constexpr std::uint64_t kGranularity = 2U << 20; // chunk rounding where the device names no larger one
  static constexpr std::uint64_t kOwnChunkBytes = 1U << 20;

  // `gpu` may be null: then only host memory can be had. `account` is charged for every chunk before it is made.
  Arena(std::shared_ptr<driver::Gpu> gpu, std::shared_ptr<Account> account, std::uint64_t idle_limit);
  // Drops every chunk and credits the account, also for what is surrendered: keep the arena until holders_gone() to keep
  // that count. Waits up to a second for work that still uses destroyed regions; chunks that are busy even then stay
  // mapped and charged until the process ends, with a warning.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // INVALID (alignment), LIMIT (the account; names what pins it), DEVICE_MEMORY (after idle chunks were given up and one
  // retry; with the size asked for and what is free), NO_MEMORY, PEER_LOST once retired, DRIVER, NO_DEVICE (device
  // memory without a device).
  [[nodiscard]] Result<Region*> create(const RegionSpec& spec);
  // The region object is invalid afterwards; its bytes are reused once the work now in its streams has passed.
  void destroy(Region* region) noexcept;
  // Remembers that `stream` uses the region (at most once each). The stream has to live until the region is destroyed; if
  // it is in capture then, until its capture has ended and the arena was swept. The per-thread stream is waited for by an
  // event in the legacy one.
  void used_on(Region* region, driver::Stream stream);
  // The live region that contains [pointer, pointer + bytes), or null. By exporter's device address, or host address.
  [[nodiscard]] Region* find(std::uint64_t pointer, std::uint64_t bytes) const noexcept;

  // Whether part of [pointer, pointer + bytes) lies in a chunk of this arena, in a region or not.
  [[nodiscard]] bool overlaps(std::uint64_t pointer, std::uint64_t bytes) const noexcept;

  // Whether the peer must be told of the region's chunk first. announced() says that the record is on its way; it must
  // not come later than the region's destroy(), since chunks that were not announced are dropped freely.
  [[nodiscard]] Result<Announcement> announcement(const Region* region);
  void announced(std::uint64_t chunk) noexcept;

  // Asks the peer to unmap the chunk of a live region: its number where the peer has to be told, else 0. mapped(): whether
  // the peer may still map it. Until then no loan in it can be made known (BUSY), afterwards it is made known again.
  [[nodiscard]] std::uint64_t begin_unmap(const Region* region) noexcept;
  [[nodiscard]] bool mapped(const Region* region) const noexcept;

  // Chunks that the peer should unmap, each named once: idle over the limit, or all idle ones when `everything`. Idle
  // chunks that were never announced are dropped at once instead.
  [[nodiscard]] std::vector<std::uint64_t> recall(bool everything = false);
  // The peer unmapped a chunk. false: it was not recalled (a peer that says so broke the protocol).
  [[nodiscard]] bool unmapped(std::uint64_t chunk) noexcept;

  // The peer is lost: no new regions; chunks without a region are dropped.
  void retire() noexcept;
  // The lost peer's holders are gone: surrendered bytes are no longer counted.
  void holders_gone() noexcept;
  // Frees what waited for streams; true while something still waits (false for what can never be proven to have passed).
  // Called from the loop's tick, and by create() before it makes a chunk.
  bool sweep() noexcept;

  [[nodiscard]] ArenaStats stats() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace gpuloan::memory
