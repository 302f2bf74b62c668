// SPDX-License-Identifier: MIT
//
// The unified address space of this process: which addresses a simulated device can reach, what lies behind them, and
// with which access. A Range is a mapped chunk (VMM), an allocation or an import that is no VMM (a chunk in a
// reservation of its own), or registered host memory. One lock guards the tables; it is never held while bytes are
// moved.
//
// A device operation works in slices. It pins the range for one slice, so an unmap waits for that slice only and the
// next one finds the address gone: the operation then fails like a device fault, and the process does not crash. After
// an unmap returned nothing is written any more.
#pragma once

#include <sim/chunk.hpp>
#include <sim/config.hpp>
#include <sim/named_file.hpp>
#include <sim/rows.hpp>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace gpuloan::sim {

enum class RangeKind {
  Mapped,    // cuMemMap
  Allocated, // cuMemAlloc
  Managed,   // cuMemAllocManaged
  Opened,    // cuIpcOpenMemHandle
  Pooled,    // from a pool of this process
  Imported,  // cuMemPoolImportPointer
  Host,
};

struct Range {
  RangeKind kind = RangeKind::Host;
  DevicePtr start = 0;
  std::size_t size = 0;
  std::byte* data = nullptr; // where the bytes are, for the simulated device
  std::shared_ptr<Chunk> chunk; // none for host memory
  std::array<int, kMaxDevices> access{}; // AccessFlags by physical device; host memory is open to all
  std::uint64_t buffer_id = 0;
  std::uint64_t context = 0; // the context it belongs to; 0 for VMM and pools
  std::uint64_t pool = 0; // the handle of its pool
  int handle_types = 0; // HandleType bits
  NamedFile name; // of the chunk's memfd, for handles that carry no descriptor; not for VMM
  unsigned uses = 1; // how often free() has to be called
  int physical = 0;
  bool owned = false; // host memory made by cuMemAllocHost
  unsigned pins = 0;

  [[nodiscard]] DevicePtr end() const noexcept { return start + size; }
};

// Waits for the work of the context that a range belongs to, as the driver does before it takes memory away (fact S10).
[[nodiscard]] CuResult synchronize_owner(const Range& range);

// Access to the part of one range that a slice needs, for as long as it lives.
class Pin {
 public:
  Pin() noexcept = default;
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const Chunk* chunk() const noexcept { return range_ ? range_->chunk.get() : nullptr; } // none for host memory

 private:
  friend class AddressSpace;
  std::shared_ptr<Range> range_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

class AddressSpace {
 public:
  [[nodiscard]] static AddressSpace& get() noexcept; // never destroyed

  // Reservations: addresses without memory.
  [[nodiscard]] CuResult reserve(std::size_t bytes, std::size_t alignment, DevicePtr& out);
  [[nodiscard]] CuResult unreserve(DevicePtr start, std::size_t bytes);

  [[nodiscard]] CuResult map(DevicePtr start, std::size_t bytes, std::shared_ptr<Chunk> chunk);
  [[nodiscard]] CuResult unmap(DevicePtr start, std::size_t bytes);
  [[nodiscard]] CuResult set_access(DevicePtr start, std::size_t bytes, int physical, int access);

  // Gives `range`, whose chunk and properties the caller filled in, an address of its own.
  [[nodiscard]] CuResult allocate(Range range, DevicePtr& out);
  // Undoes one use of a range of this kind that starts there.
  [[nodiscard]] CuResult free(DevicePtr start, RangeKind kind);
  // Uses a range of these properties once more, if there is one.
  [[nodiscard]] bool use_again(RangeKind kind, FileIdentity file, std::uint64_t context, DevicePtr& out);
  // The steps of those two, for pools, which keep an address for the memory that they reuse. Whoever set an address
  // aside may place a range there, which is a new buffer each time; withdraw() takes the range away, not the address.
  [[nodiscard]] CuResult set_aside(std::size_t bytes, DevicePtr& out, std::size_t alignment = 0);
  [[nodiscard]] bool withdraw(DevicePtr start, RangeKind kind);
  void place(Range range);
  void forsake(DevicePtr start) noexcept;
  // What access a device has to everything of a pool that is there now.
  void set_pool_access(std::uint64_t pool, int physical, int access);

  [[nodiscard]] CuResult add_host(void* start, std::size_t bytes, std::uint64_t context, int physical, bool owned);
  // The range must start there, and be `owned` or not as said.
  [[nodiscard]] CuResult remove_host(const void* start, bool owned);

  // Frees what belongs to a context that ends.
  void forget_context(std::uint64_t context);

  // A copy of what is known about the range around an address, without its chunk; false when there is none.
  [[nodiscard]] bool find(DevicePtr address, Range& out) const;
  // The chunk of the one range that all of [address, address + bytes) lies in, and where in it; null for other memory.
  [[nodiscard]] std::shared_ptr<Chunk> chunk_behind(DevicePtr address, std::size_t bytes, std::size_t& out_offset) const;
  // The chunk that is mapped (VMM) at an address; null for other memory.
  [[nodiscard]] std::shared_ptr<Chunk> mapped_chunk(DevicePtr address) const;
  // Whether ranges without a gap lie behind all of [address, address + bytes), all with this access.
  [[nodiscard]] bool covers(DevicePtr address, std::size_t bytes, int access, int physical) const;
  // The reservation around an address; false when there is none.
  [[nodiscard]] bool find_reservation(DevicePtr address, DevicePtr& out_start, std::size_t& out_bytes) const;
  [[nodiscard]] bool touches_reservation(DevicePtr address, std::size_t bytes) const;
  // Pins up to `bytes` from `address` on. IllegalAddress where nothing is, LaunchFailed where the access is not
  // granted: the faults that a real device was seen to report.
  [[nodiscard]] CuResult pin(DevicePtr address, std::size_t bytes, int access, int physical, Pin& out);

  struct Counts {
    std::size_t reservations; // the caller's own
    std::size_t reserved_bytes; // of all, allocations too
    std::size_t mapped, allocated, imported, host;
  };
  [[nodiscard]] Counts counts() const;

 private:
  friend class Pin;
  struct Reservation {
    std::size_t bytes;
    bool owned; // by an allocation: not for cuMemAddressFree or cuMemMap
  };
  using RangeMap = std::map<DevicePtr, std::shared_ptr<Range>>;

  [[nodiscard]] std::shared_ptr<Range> lookup(DevicePtr address) const;
  [[nodiscard]] std::vector<std::shared_ptr<Range>> exactly(DevicePtr start, std::size_t bytes) const;
  [[nodiscard]] std::vector<std::shared_ptr<Range>> overlapping(DevicePtr start, std::size_t bytes) const;
  [[nodiscard]] bool inside_reservation(DevicePtr start, std::size_t bytes) const;
  void insert(Range range);
  // Takes the ranges out and waits until nothing is pinned. Their chunks end when the caller drops them, unlocked.
  void remove(std::unique_lock<std::mutex>& lock, const std::vector<std::shared_ptr<Range>>& ranges);

  mutable std::mutex mutex_;
  std::condition_variable unpinned_;
  RangeMap ranges_;
  std::map<DevicePtr, Reservation> reservations_;
  std::uint64_t next_buffer_id_ = 1;
};

} // namespace gpuloan::sim
