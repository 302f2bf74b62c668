// SPDX-License-Identifier: MIT
//
// ChunkPool: the chunks of one peer, where the next region goes in them, and what they are charged as.
//
// A chunk with pieces (regions, or bytes that still wait for a stream) is used; without it is idle. Used chunks belong to
// one region or are shared by small ones; an idle chunk is neither and may become either. The states:
//
//   used <-> idle -> recalled -> dropped     in a live pool
//   used -> dropped                          in a retired pool, with the last piece
//
// Not locked: the arena's lock covers it. Nothing here waits for the GPU. Finding room for a region makes no driver call.
#pragma once

#include <memory/account.hpp>
#include <memory/chunk.hpp>
#include <memory/suballocator.hpp>

#include <list>
#include <mutex>
#include <map>
#include <optional>
#include <vector>

namespace gpuloan::memory {

struct PooledChunk {
  using Index = std::multimap<std::uint64_t, PooledChunk*>;
  using Order = std::list<PooledChunk*>;
  enum class State { Used, Idle, Recalled };

  PooledChunk(std::uint64_t number, Chunk made, gpuloan_access access_class)
      : id(number), access(access_class), chunk(std::move(made)) {}

  const std::uint64_t id;
  const gpuloan_access access;
  Chunk chunk;
  Account::Kind kind = Account::Kind::Chunk;
  State state = State::Idle;
  bool announced = false;
  bool unmapping = false;   // in use, and the peer was asked to unmap it
  bool shared = false;      // while used: by small regions
  std::uint32_t pieces = 0;
  Suballocator space;       // while shared
  // In at most one index: idle by size, or shared by its largest free range. The node is kept while in none, so that
  // changing places never allocates.
  Index* index = nullptr;
  Index::iterator place;
  Index::node_type node;
  Order::iterator order;    // in its state's list
  std::shared_ptr<Account> account; // only of an abandoned chunk, which goes on being charged
};

// What a region needs of a chunk.
struct Want {
  std::uint64_t bytes;     // not 0
  std::uint64_t alignment; // power of two, at most 2 MiB
  gpuloan_access access;
  gpuloan_memory memory;
  bool own;                // shares its chunk with nothing
};

struct Placement {
  PooledChunk* chunk;
  std::uint64_t offset;
};

class ChunkPool {
 public:
  ChunkPool(std::shared_ptr<driver::Gpu> gpu, std::shared_ptr<Account> account, std::uint64_t idle_limit)
      : gpu_(std::move(gpu)), account_(std::move(account)), idle_limit_(idle_limit) {}
  ~ChunkPool(); // drops all chunks and credits everything, surrendered bytes too
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;

  // Room in a chunk that exists.
  [[nodiscard]] std::optional<Placement> reuse(const Want& want);
  // Room in a new chunk. Errors as of Arena::create.
  [[nodiscard]] Result<Placement> grow(const Want& want);
  // `bytes` as wanted.
  void give_back(PooledChunk& chunk, std::uint64_t offset, std::uint64_t bytes) noexcept;
  // Never unmaps the chunk, because something may still use it: it stays as it is, charged, until the process ends.
  void abandon(PooledChunk& chunk) noexcept;

  [[nodiscard]] PooledChunk* find(std::uint64_t id) noexcept;
  [[nodiscard]] bool overlaps(std::uint64_t pointer, std::uint64_t bytes) const noexcept; // any chunk's addresses
  void announced(PooledChunk& chunk) noexcept;
  [[nodiscard]] std::vector<std::uint64_t> recall(bool everything);
  // Asks the peer of a chunk in use to unmap it: true when that is to be told to it.
  [[nodiscard]] bool begin_unmap(PooledChunk& chunk) noexcept;
  [[nodiscard]] bool unmapped(std::uint64_t id) noexcept;
  void retire() noexcept;
  [[nodiscard]] bool retired() const noexcept { return retired_; }
  void holders_gone() noexcept;

  [[nodiscard]] std::uint64_t chunks() const noexcept { return chunks_.size(); }
  // Recalled ones too, until they are unmapped.
  [[nodiscard]] std::uint64_t idle_bytes() const noexcept {
    return shelf(State::Idle).bytes + shelf(State::Recalled).bytes;
  }
  [[nodiscard]] std::uint64_t retired_bytes() const noexcept { return retired_ ? shelf(State::Used).bytes : 0; }
  [[nodiscard]] std::uint64_t surrendered_bytes() const noexcept { return surrendered_bytes_; }

 private:
  using State = PooledChunk::State;
  struct Shelf { // the chunks in one state, in the order they came into it
    PooledChunk::Order order;
    std::uint64_t bytes = 0;
  };
  struct Class {
    PooledChunk::Index idle;   // by bytes
    PooledChunk::Index shared; // by largest free range; full ones are in no index
  };
  [[nodiscard]] Shelf& shelf(State state) noexcept { return shelves_[static_cast<int>(state)]; }
  [[nodiscard]] const Shelf& shelf(State state) const noexcept { return shelves_[static_cast<int>(state)]; }
  void move_to(PooledChunk& chunk, State state) noexcept;
  [[nodiscard]] Class& class_of(gpuloan_memory memory, gpuloan_access access) noexcept;
  [[nodiscard]] Class& class_of(const PooledChunk& chunk) noexcept { return class_of(chunk.chunk.memory(), chunk.access); }
  [[nodiscard]] std::uint64_t granularity(gpuloan_memory memory) const noexcept;
  [[nodiscard]] std::uint64_t chunk_bytes(const Want& want) const noexcept; // 0: no chunk can be that large

  [[nodiscard]] std::optional<Placement> reuse_shared(Class& from, const Want& want);
  [[nodiscard]] std::optional<Placement> place_in(PooledChunk& chunk, const Want& want);
  [[nodiscard]] static PooledChunk* find_idle(Class& from, std::uint64_t bytes) noexcept;
  [[nodiscard]] Placement begin_use(PooledChunk& chunk, const Want& want);
  void index(PooledChunk& chunk, PooledChunk::Index& where, std::uint64_t key) noexcept;
  void unindex(PooledChunk& chunk) noexcept;

  [[nodiscard]] Result<void> check_possible(const Want& want, std::uint64_t bytes) const;
  [[nodiscard]] Result<void> charge(std::uint64_t bytes);
  [[nodiscard]] Result<Chunk> create_chunk(gpuloan_memory memory, std::uint64_t bytes);
  [[nodiscard]] Result<Chunk> create_charged(const Want& want, std::uint64_t bytes);
  [[nodiscard]] PooledChunk& adopt(Chunk chunk, gpuloan_access access);
  [[nodiscard]] Error out_of_memory(const Want& want, std::uint64_t bytes, const std::string& cause) const;
  [[nodiscard]] std::string mapped_idle_text() const;
  bool drop_unannounced() noexcept;
  void drop(PooledChunk& chunk, bool peer_unmapped) noexcept;
  void withdraw(PooledChunk& chunk) noexcept;
  void forget(PooledChunk& chunk) noexcept;

  const std::shared_ptr<driver::Gpu> gpu_;
  const std::shared_ptr<Account> account_;
  const std::uint64_t idle_limit_;
  std::map<std::uint64_t, PooledChunk> chunks_; // by id
  Shelf shelves_[3];                            // by State
  Class classes_[2][2];
  std::uint64_t last_id_ = 0;
  std::uint64_t surrendered_bytes_ = 0;
  bool retired_ = false;
  bool holders_gone_ = false;
};

} // namespace gpuloan::memory
