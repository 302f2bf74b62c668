// SPDX-License-Identifier: MIT
//
// The older way to share cuMemAlloc memory: a handle of 64 bytes, as measured on a real driver. A handle names the
// whole allocation, also when it was made from an address inside. Opening it again in a process is counted and gives
// the same address, even once the exporter has freed the memory; closing waits for the context's work, like cuMemFree.
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/context.hpp>
#include <sim/device.hpp>
#include <sim/named_file.hpp>

#include <bit>
#include <cstring>

namespace gpuloan::sim {
namespace {

struct HandleBytes {
  char magic[8];
  NamedFile name;
  std::uint64_t bytes; // of the allocation; the file has whole pages
  unsigned char rest[24];
};
static_assert(sizeof(HandleBytes) == sizeof(IpcMemHandle));

constexpr char kMagic[8] = {'s', 'i', 'm', 'm', 'e', 'm', 'r', 'y'};

// Two threads that open one handle get one mapping.
std::mutex& opening() {
  static auto* instance = new std::mutex;
  return *instance;
}

CuResult open(const HandleBytes& wanted, DevicePtr& out) {
  const ContextRef context = current_context();
  const std::lock_guard lock(opening());
  AddressSpace& space = AddressSpace::get();
  if (space.use_again(RangeKind::Opened, wanted.name.file, context->handle, out)) {
    if (!config().legacy_opens_once) return Success;
    static_cast<void>(space.free(out, RangeKind::Opened)); // the count of it
    return AlreadyMapped;
  }
  const Fd fd = wanted.name.open();
  if (!fd) return InvalidValue;
  Range range;
  if (const CuResult result = Chunk::import(fd.get(), range.chunk))
    return result == Unknown ? static_cast<CuResult>(InvalidValue) : result;
  if (wanted.bytes == 0 || wanted.bytes > range.chunk->size()) return InvalidValue;
  const int physical = range.chunk->physical();
  if (visible_device(physical) < 0) return InvalidDevice;
  if (!config().reaches(context->physical, physical)) return PeerAccessUnsupported;
  range.kind = RangeKind::Opened;
  range.size = wanted.bytes;
  range.context = context->handle;
  range.access[static_cast<std::size_t>(physical)] = AccessReadWrite;
  range.access[static_cast<std::size_t>(context->physical)] = AccessReadWrite; // opening enables it
  return space.allocate(std::move(range), out);
}

} // namespace

namespace api {

CuResult cuIpcGetMemHandle(IpcMemHandle* handle, DevicePtr pointer) {
  Range range;
  if (handle == nullptr || !AddressSpace::get().find(pointer, range)) return InvalidValue;
  if (range.kind != RangeKind::Allocated) return InvalidValue; // fact P11; VMM memory has handles of its own
  HandleBytes bytes = {};
  std::memcpy(bytes.magic, kMagic, sizeof kMagic);
  bytes.name = range.name;
  bytes.bytes = range.size;
  *handle = std::bit_cast<IpcMemHandle>(bytes);
  return Success;
}

CuResult cuIpcOpenMemHandle(DevicePtr* pointer, IpcMemHandle handle, unsigned flags) {
  if (pointer == nullptr || flags != IpcMemLazyPeerAccess) return InvalidValue;
  const auto bytes = std::bit_cast<HandleBytes>(handle);
  if (std::memcmp(bytes.magic, kMagic, sizeof kMagic) != 0) return InvalidValue;
  if (bytes.name.is_ours()) return InvalidContext;
  return open(bytes, *pointer);
}

CuResult cuIpcCloseMemHandle(DevicePtr pointer) {
  Range range;
  const bool found = AddressSpace::get().find(pointer, range);
  if (!found || range.kind != RangeKind::Opened || range.start != pointer) return InvalidValue;
  if (const CuResult result = synchronize_owner(range)) return result;
  return AddressSpace::get().free(pointer, RangeKind::Opened);
}

} // namespace api
} // namespace gpuloan::sim
