// SPDX-License-Identifier: MIT
//
// cuPointerGetAttributes: what the driver knows about an address. An unknown one is no error: its attributes are zero,
// except for start and size of its range, which are not written at all. A reservation without memory has a range.
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/device.hpp>
#include <sim/handles.hpp>

namespace gpuloan::sim {
namespace {

constexpr int kNoDevice = -2; // CU_DEVICE_INVALID

struct Known {
  bool has_memory = false;
  Range memory;
  bool has_range = false;
  DevicePtr start = 0;
  std::size_t size = 0;
};

Known look_up(DevicePtr pointer) {
  Known known;
  const AddressSpace& space = AddressSpace::get();
  known.has_memory = space.find(pointer, known.memory);
  known.has_range = known.has_memory || space.find_reservation(pointer, known.start, known.size);
  // Of VMM memory it is the range of the reservation, as measured: only cuMemGetAddressRange tells the chunks apart.
  if (known.has_memory && known.memory.kind == RangeKind::Mapped) {
    known.has_range = space.find_reservation(pointer, known.start, known.size);
  } else if (known.has_memory) {
    known.start = known.memory.start;
    known.size = known.memory.size;
  }
  return known;
}

bool is_kind(const Range* range, RangeKind kind) { return range != nullptr && range->kind == kind; }

CuResult write_attribute(int attribute, void* out, const Known& known) {
  const Range* range = known.has_memory ? &known.memory : nullptr;
  switch (attribute) {
    case PointerContext:
      *static_cast<Context*>(out) = range != nullptr ? to_handle<Context>(range->context) : nullptr;
      return Success;
    case PointerMemoryType: {
      unsigned type = 0;
      if (range != nullptr) type = range->kind == RangeKind::Host ? MemoryHost : MemoryDevice;
      *static_cast<unsigned*>(out) = type;
      return Success;
    }
    case PointerBufferId: *static_cast<std::uint64_t*>(out) = range != nullptr ? range->buffer_id : 0; return Success;
    // Four bytes, as measured, although the attributes are called booleans.
    case PointerIsManaged: *static_cast<unsigned*>(out) = is_kind(range, RangeKind::Managed); return Success;
    case PointerLegacyIpcCapable:
      *static_cast<unsigned*>(out) = is_kind(range, RangeKind::Allocated) && config().has(Group::IpcMemory);
      return Success;
    case PointerMapped: *static_cast<unsigned*>(out) = range != nullptr; return Success;
    case PointerAllowedHandleTypes:
      *static_cast<std::uint64_t*>(out) = range != nullptr ? static_cast<std::uint64_t>(range->handle_types) : 0;
      return Success;
    case PointerMemPool:
      *static_cast<Pool*>(out) = range != nullptr ? to_handle<Pool>(range->pool) : nullptr;
      return Success;
    case PointerDeviceOrdinal:
      *static_cast<int*>(out) = range != nullptr ? visible_device(range->physical) : kNoDevice;
      return Success;
    case PointerRangeStart:
      if (known.has_range) *static_cast<DevicePtr*>(out) = known.start;
      return Success;
    case PointerRangeSize:
      if (known.has_range) *static_cast<std::size_t*>(out) = known.size;
      return Success;
    default: return InvalidValue;
  }
}

} // namespace

namespace api {

CuResult cuPointerGetAttributes(unsigned count, const int* attributes, void** data, DevicePtr pointer) {
  if (count == 0 || attributes == nullptr || data == nullptr) return InvalidValue;
  const Known known = look_up(pointer);
  for (unsigned index = 0; index < count; ++index) {
    if (data[index] == nullptr) return InvalidValue;
    if (const CuResult result = write_attribute(attributes[index], data[index], known)) return result;
  }
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
