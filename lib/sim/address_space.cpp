// SPDX-License-Identifier: MIT
//
// Ordered maps of ranges and of reservations. A chunk's last owner takes other locks when it ends, so ranges that are
// taken out are kept until our lock is released.
#include <sim/address_space.hpp>

#include <algorithm>
#include <sys/mman.h>

namespace gpuloan::sim {
namespace {

constexpr std::size_t kAlignment = std::size_t{2} << 20; // of every reservation: the granularity of a real device

void* host_address(DevicePtr address) noexcept { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

} // namespace

Pin::~Pin() {
  if (!range_) return;
  AddressSpace& space = AddressSpace::get();
  const std::lock_guard lock(space.mutex_);
  if (--range_->pins == 0) space.unpinned_.notify_all();
}

AddressSpace& AddressSpace::get() noexcept {
  static AddressSpace* instance = new AddressSpace;
  return *instance;
}

CuResult AddressSpace::reserve(std::size_t bytes, std::size_t alignment, DevicePtr& out) {
  const std::size_t step = std::max(alignment, kAlignment);
  std::size_t total = 0;
  if (__builtin_add_overflow(bytes, step, &total)) return OutOfMemory;
  void* address = ::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return OutOfMemory;
  const DevicePtr first = reinterpret_cast<std::uintptr_t>(address);
  const DevicePtr start = (first + step - 1) / step * step;
  if (start > first) ::munmap(address, start - first);
  ::munmap(host_address(start + bytes), first + total - (start + bytes));
  const std::lock_guard lock(mutex_);
  reservations_[start] = {bytes, false};
  out = start;
  return Success;
}

CuResult AddressSpace::unreserve(DevicePtr start, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(start);
  if (found == reservations_.end() || found->second.bytes != bytes || found->second.owned) return InvalidValue;
  if (!overlapping(start, bytes).empty()) return InvalidValue;
  reservations_.erase(found);
  ::munmap(host_address(start), bytes);
  return Success;
}

CuResult AddressSpace::map(DevicePtr start, std::size_t bytes, std::shared_ptr<Chunk> chunk) {
  const std::lock_guard lock(mutex_);
  if (!inside_reservation(start, bytes) || !overlapping(start, bytes).empty()) return InvalidValue;
  Range range;
  range.kind = RangeKind::Mapped;
  range.start = start;
  range.size = bytes;
  range.data = chunk->data();
  range.physical = chunk->physical();
  range.handle_types = chunk->fd() >= 0 ? HandlePosixFd : HandleNone;
  range.chunk = std::move(chunk);
  insert(std::move(range));
  return Success;
}

CuResult AddressSpace::unmap(DevicePtr start, std::size_t bytes) {
  std::vector<std::shared_ptr<Range>> ranges; // outlives the lock: a chunk's end takes other locks
  std::unique_lock lock(mutex_);
  if (!inside_reservation(start, bytes)) return InvalidValue;
  ranges = overlapping(start, bytes);
  for (const auto& range : ranges) {
    if (range->start < start || range->end() > start + bytes) return InvalidValue;
  }
  remove(lock, ranges); // perhaps nothing, which is no error
  lock.unlock();
  return Success;
}

CuResult AddressSpace::set_access(DevicePtr start, std::size_t bytes, int physical, int access) {
  const std::lock_guard lock(mutex_);
  const auto ranges = exactly(start, bytes);
  if (ranges.empty()) return InvalidValue;
  for (const auto& range : ranges) {
    if (access != AccessNone && !config().reaches(physical, range->physical)) return InvalidDevice;
  }
  for (const auto& range : ranges) range->access[static_cast<std::size_t>(physical)] = access;
  return Success;
}

CuResult AddressSpace::allocate(Range range, DevicePtr& out) {
  if (const CuResult result = set_aside(range.chunk->size(), range.start)) return result;
  out = range.start;
  place(std::move(range));
  return Success;
}

CuResult AddressSpace::free(DevicePtr start, RangeKind kind) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(start);
    if (found == ranges_.end() || found->second->kind != kind) return InvalidValue;
    if (found->second->uses == 0) return InvalidValue; // another thread is at it
    if (--found->second->uses > 0) return Success;
  }
  if (!withdraw(start, kind)) return InvalidValue;
  forsake(start);
  return Success;
}

bool AddressSpace::use_again(RangeKind kind, FileIdentity file, std::uint64_t context, DevicePtr& out) {
  const std::lock_guard lock(mutex_);
  for (const auto& [start, range] : ranges_) {
    if (range->kind != kind || range->context != context || range->uses == 0 || range->name.file != file) continue;
    ++range->uses;
    out = start;
    return true;
  }
  return false;
}

CuResult AddressSpace::set_aside(std::size_t bytes, DevicePtr& out, std::size_t alignment) {
  if (const CuResult result = reserve(bytes, std::max<std::size_t>(alignment, kAlignment), out)) return result;
  const std::lock_guard lock(mutex_);
  reservations_[out].owned = true;
  return Success;
}

bool AddressSpace::withdraw(DevicePtr start, RangeKind kind) {
  std::vector<std::shared_ptr<Range>> ranges;
  std::unique_lock lock(mutex_);
  const auto found = ranges_.find(start);
  if (found == ranges_.end() || found->second->kind != kind) return false;
  ranges.push_back(found->second);
  remove(lock, ranges);
  lock.unlock();
  return true;
}

void AddressSpace::place(Range range) {
  const std::lock_guard lock(mutex_);
  range.data = range.chunk->data();
  range.physical = range.chunk->physical();
  range.name = name_file(range.chunk->fd(), range.chunk->file());
  insert(std::move(range));
}

void AddressSpace::forsake(DevicePtr start) noexcept {
  const std::lock_guard lock(mutex_);
  const auto reservation = reservations_.find(start);
  ::munmap(host_address(start), reservation->second.bytes);
  reservations_.erase(reservation);
}

void AddressSpace::set_pool_access(std::uint64_t pool, int physical, int access) {
  const std::lock_guard lock(mutex_);
  for (const auto& [start, range] : ranges_) {
    if (range->pool == pool) range->access[static_cast<std::size_t>(physical)] = access;
  }
}

CuResult AddressSpace::add_host(void* start, std::size_t bytes, std::uint64_t context, int physical, bool owned) {
  const std::lock_guard lock(mutex_);
  const DevicePtr address = reinterpret_cast<std::uintptr_t>(start);
  for (const auto& other : overlapping(address, bytes))
    return other->owned ? InvalidValue : HostMemoryAlreadyRegistered;
  Range range;
  range.kind = RangeKind::Host;
  range.start = address;
  range.size = bytes;
  range.data = static_cast<std::byte*>(start);
  range.physical = physical;
  range.context = context;
  range.owned = owned;
  range.access.fill(AccessReadWrite);
  insert(std::move(range));
  return Success;
}

CuResult AddressSpace::remove_host(const void* start, bool owned) {
  std::unique_lock lock(mutex_);
  const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(start));
  if (found == ranges_.end() || found->second->kind != RangeKind::Host || found->second->owned != owned) {
    return InvalidValue;
  }
  const std::vector<std::shared_ptr<Range>> ranges{found->second};
  remove(lock, ranges);
  return Success;
}

void AddressSpace::forget_context(std::uint64_t context) {
  std::vector<std::shared_ptr<Range>> ranges;
  std::unique_lock lock(mutex_);
  for (const auto& [start, range] : ranges_) {
    if (range->context == context) ranges.push_back(range);
  }
  remove(lock, ranges);
  for (const auto& range : ranges) {
    if (range->kind == RangeKind::Host) {
      if (range->owned) ::munmap(host_address(range->start), range->size);
      continue;
    }
    const auto reservation = reservations_.find(range->start);
    ::munmap(host_address(range->start), reservation->second.bytes);
    reservations_.erase(reservation);
  }
  lock.unlock();
}

bool AddressSpace::find(DevicePtr address, Range& out) const {
  const std::lock_guard lock(mutex_);
  const auto range = lookup(address);
  if (range) {
    out = *range;
    out.chunk.reset(); // the caller becomes no second owner of the memory
  }
  return range != nullptr;
}

std::shared_ptr<Chunk> AddressSpace::mapped_chunk(DevicePtr address) const {
  const std::lock_guard lock(mutex_);
  const auto range = lookup(address);
  return range && range->kind == RangeKind::Mapped ? range->chunk : nullptr;
}

std::shared_ptr<Chunk> AddressSpace::chunk_behind(DevicePtr address, std::size_t bytes, std::size_t& out_offset) const {
  const std::lock_guard lock(mutex_);
  const auto range = lookup(address);
  if (!range || !range->chunk || bytes == 0 || bytes > range->end() - address) return nullptr;
  out_offset = static_cast<std::size_t>(range->data - range->chunk->data()) + (address - range->start);
  return range->chunk;
}

bool AddressSpace::covers(DevicePtr address, std::size_t bytes, int access, int physical) const {
  const std::lock_guard lock(mutex_);
  while (bytes > 0) {
    const auto range = lookup(address);
    if (!range || (range->access[static_cast<std::size_t>(physical)] & access) != access) return false;
    const std::size_t here = std::min<std::size_t>(bytes, range->end() - address);
    address += here;
    bytes -= here;
  }
  return true;
}

bool AddressSpace::find_reservation(DevicePtr address, DevicePtr& out_start, std::size_t& out_bytes) const {
  const std::lock_guard lock(mutex_);
  const auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin()) return false;
  const auto& [start, reservation] = *std::prev(next);
  if (address - start >= reservation.bytes) return false;
  out_start = start;
  out_bytes = reservation.bytes;
  return true;
}

bool AddressSpace::touches_reservation(DevicePtr address, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  auto next = reservations_.upper_bound(address);
  if (next != reservations_.end() && next->first < address + bytes) return true;
  return next != reservations_.begin() && (--next)->first + next->second.bytes > address;
}

CuResult AddressSpace::pin(DevicePtr address, std::size_t bytes, int access, int physical, Pin& out) {
  const std::lock_guard lock(mutex_);
  const auto range = lookup(address);
  if (!range) return IllegalAddress;
  if ((range->access[static_cast<std::size_t>(physical)] & access) != access) return LaunchFailed;
  const std::size_t offset = address - range->start;
  ++range->pins;
  out.range_ = range;
  out.data_ = range->data + offset;
  out.size_ = std::min(bytes, range->size - offset);
  return Success;
}

AddressSpace::Counts AddressSpace::counts() const {
  const std::lock_guard lock(mutex_);
  Counts counts{};
  for (const auto& [start, reservation] : reservations_) {
    counts.reservations += reservation.owned ? 0U : 1U;
    counts.reserved_bytes += reservation.bytes;
  }
  for (const auto& [start, range] : ranges_) {
    switch (range->kind) {
      case RangeKind::Mapped: ++counts.mapped; break;
      case RangeKind::Allocated:
      case RangeKind::Managed:
      case RangeKind::Pooled: ++counts.allocated; break;
      case RangeKind::Opened:
      case RangeKind::Imported: ++counts.imported; break;
      case RangeKind::Host: ++counts.host; break;
    }
  }
  return counts;
}

std::shared_ptr<Range> AddressSpace::lookup(DevicePtr address) const {
  const auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return nullptr;
  const auto& range = std::prev(next)->second;
  return address < range->end() ? range : nullptr;
}

// The mapped chunks that make up [start, start + bytes) without a gap and without a rest; empty when they don't.
std::vector<std::shared_ptr<Range>> AddressSpace::exactly(DevicePtr start, std::size_t bytes) const {
  std::vector<std::shared_ptr<Range>> found;
  DevicePtr at = start;
  for (auto next = ranges_.find(start); at < start + bytes; ++next) {
    if (next == ranges_.end() || next->first != at || next->second->kind != RangeKind::Mapped) return {};
    found.push_back(next->second);
    at = next->second->end();
  }
  if (at != start + bytes) return {};
  return found;
}

std::vector<std::shared_ptr<Range>> AddressSpace::overlapping(DevicePtr start, std::size_t bytes) const {
  std::vector<std::shared_ptr<Range>> found;
  if (const auto first = lookup(start)) found.push_back(first);
  for (auto next = ranges_.upper_bound(start); next != ranges_.end() && next->first < start + bytes; ++next) {
    found.push_back(next->second);
  }
  return found;
}

bool AddressSpace::inside_reservation(DevicePtr start, std::size_t bytes) const {
  const auto next = reservations_.upper_bound(start);
  if (next == reservations_.begin()) return false;
  const auto& [first, reservation] = *std::prev(next);
  return !reservation.owned && start - first <= reservation.bytes && bytes <= reservation.bytes - (start - first);
}

void AddressSpace::insert(Range range) {
  range.buffer_id = next_buffer_id_++;
  auto shared = std::make_shared<Range>(std::move(range));
  const DevicePtr start = shared->start;
  ranges_[start] = std::move(shared);
}

void AddressSpace::remove(std::unique_lock<std::mutex>& lock, const std::vector<std::shared_ptr<Range>>& ranges) {
  for (const auto& range : ranges) ranges_.erase(range->start);
  unpinned_.wait(lock, [&] { return std::ranges::all_of(ranges, [](const auto& range) { return range->pins == 0; }); });
}

} // namespace gpuloan::sim
