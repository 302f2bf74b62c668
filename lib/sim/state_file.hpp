// SPDX-License-Identifier: MIT
//
// The state file is the simulated machine: what all processes that use the same path share about its devices.
//
// Its tables of allocations and interprocess events are plain memory, mapped by everyone and changed only under Guard
// (that of claims is another matter: witness.hpp).
// Who holds an entry is not in the tables, since a killed process could not take itself out again, but in locks: every
// process opens the file once and keeps a shared lock on one byte per entry it holds (bytes far behind the file's end).
// These are locks of the open file description, so the kernel drops them when its last duplicate is gone: at once when
// a plain process dies, and only with its last forked child when there are some. That is how long a real driver keeps
// the memory of a dead process (facts V12 and S13). A lock is not counted by the kernel, so the process counts here.
//
// Guard is an in-process mutex plus a lock that belongs to the process (not to the description: a forked child must not
// keep the machine locked when its parent is killed inside). Both vanish with the process, so a table may be found in
// the middle of a change: an entry is filled before its state says Used, and a Used entry that nobody holds is swept.
#pragma once

#include <sim/fd.hpp>
#include <sim/file_identity.hpp>
#include <sim/rows.hpp>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <sys/types.h>

namespace gpuloan::sim {

inline constexpr std::uint32_t kMaxAllocations = 65536;
inline constexpr std::uint32_t kMaxEvents = 4096;
inline constexpr std::uint32_t kMaxClaims = 4096;
inline constexpr std::uint32_t kMaxWitnessReports = 64; // whose text is kept
inline constexpr std::size_t kWitnessText = 256;

enum class EntryState : std::uint32_t {
  Free,
  Used,
  Ghost, // an allocation that nobody holds, but a descriptor of it may still be on its way: importing brings it back
};

struct AllocationEntry {
  EntryState state;
  std::uint32_t device; // physical
  std::uint64_t size;
  std::uint64_t dev; // of the memfd
  std::uint64_t ino;
  off_t pool; // pool_byte() of the pool that a pointer of it was exported from, else 0: it is taken as long as that is held (P8)
};

struct EventEntry {
  EntryState state;
  std::uint32_t generation;
  std::uint64_t recorded; // atomic: records made so far
  std::uint64_t completed; // atomic: the newest record whose work is done
};

// Of the witness (witness.hpp). All words are atomic.
struct ClaimEntry {
  std::uint64_t sequence; // odd: being changed
  std::uint64_t bytes;    // 0: no claim
  std::uint64_t dev;      // of the chunk's memfd
  std::uint64_t ino;
  std::uint64_t offset;
  std::uint64_t writers; // two processes
  std::uint64_t reader;  // a process
  std::uint64_t owner;  // process that made it
  std::uint64_t note;
};

struct StateLayout {
  std::uint64_t magic;
  std::uint64_t allocation_limit; // entries at and above were never used
  std::uint64_t event_limit;
  std::uint64_t pools; // that were exported so far
  AllocationEntry allocations[kMaxAllocations];
  EventEntry events[kMaxEvents];
  std::uint64_t claim_limit; // entries at and above were never used
  ClaimEntry claims[kMaxClaims];
  std::uint64_t witness_reports;
  char witness_text[kMaxWitnessReports][kWitnessText];
};

class StateFile {
 public:
  class Guard {
   public:
    explicit Guard(StateFile& file);
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard();

   private:
    StateFile& file_;
    std::lock_guard<std::mutex> lock_;
  };

  // Opens the machine of this process, creating it if need be. Complains and fails when the file is not safe to use.
  // Called by cuInit; the result stays for the life of the process.
  [[nodiscard]] static CuResult open(const std::string& path);
  [[nodiscard]] static StateFile& get() noexcept { return *instance_; }

  [[nodiscard]] StateLayout& layout() noexcept { return *layout_; }
  [[nodiscard]] FileIdentity identity() const noexcept { return identity_; }

  // Under Guard. A byte is held by this process once or more, and perhaps by others.
  void hold(off_t byte);
  void drop(off_t byte) noexcept;
  [[nodiscard]] bool held(off_t byte) const noexcept; // by anyone
  // Another description of the file, at offset `byte`, that holds that byte: until its last duplicate is closed, wherever that is.
  [[nodiscard]] Fd make_holder(off_t byte) const;
  [[nodiscard]] bool held_by_others(off_t byte) const noexcept;

  [[nodiscard]] static off_t allocation_byte(std::uint32_t id) noexcept { return (off_t{1} << 40) + id; }
  [[nodiscard]] static off_t event_byte(std::uint32_t slot) noexcept { return (off_t{1} << 41) + slot; }
  [[nodiscard]] static off_t event_creator_byte(std::uint32_t slot) noexcept { return (off_t{1} << 42) + slot; }
  [[nodiscard]] static off_t pool_byte(std::uint64_t number, int physical) noexcept {
    return (off_t{5} << 40) + static_cast<off_t>(number) * 8 + physical;
  }
  // The device of such a byte; -1 of another.
  [[nodiscard]] static int pool_device(off_t byte) noexcept { return byte >= off_t{5} << 40 && byte < off_t{6} << 40 ? static_cast<int>(byte % 8) : -1; }
  [[nodiscard]] static off_t context_byte(int physical) noexcept { return (off_t{3} << 41) + physical; }

 private:
  StateFile(Fd fd, FileIdentity identity, StateLayout* layout) noexcept
      : fd_(std::move(fd)), identity_(identity), layout_(layout) {}
  [[nodiscard]] const char* prepare();

  static StateFile* instance_; // never destroyed
  Fd fd_;
  FileIdentity identity_;
  StateLayout* layout_;
  std::mutex mutex_;
  std::map<off_t, unsigned> counts_; // guarded by Guard
};

} // namespace gpuloan::sim
