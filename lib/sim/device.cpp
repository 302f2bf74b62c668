// SPDX-License-Identifier: MIT
//
// What a device says about itself. The values are those of a data-centre card of compute capability 9.0; a feature that
// GPULOAN_SIM_WITHOUT takes away reads 0 here and its functions say CUDA_ERROR_NOT_SUPPORTED.
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/device.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace gpuloan::sim {

Uuid device_uuid(int physical) noexcept {
  Uuid uuid = {{'g', 'p', 'u', 'l', 'o', 'a', 'n', 0, 's', 'i', 'm', 0, 0, 0, 0, 0}};
  // First and last byte: a short prefix then already tells devices apart, as it does with real ones.
  uuid.bytes[0] = static_cast<unsigned char>(uuid.bytes[0] + physical * 16);
  uuid.bytes[15] = static_cast<unsigned char>(physical + 1);
  return uuid;
}

std::string uuid_text(const Uuid& uuid, bool slice) {
  std::string text = slice ? "MIG-" : "GPU-";
  for (int index = 0; index < 16; ++index) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(uuid.bytes[index]));
    text += digits;
    if (index == 3 || index == 5 || index == 7 || index == 9) text += '-';
  }
  return text;
}

bool is_device(Device device) { return device >= 0 && static_cast<std::size_t>(device) < config().visible.size(); }

int physical_device(Device device) { return config().visible[static_cast<std::size_t>(device)]; }

Device visible_device(int physical) {
  const auto& visible = config().visible;
  for (std::size_t index = 0; index < visible.size(); ++index) {
    if (visible[index] == physical) return static_cast<Device>(index);
  }
  return -1;
}

namespace {

int attribute_value(int attribute) {
  switch (attribute) {
    case AttrUnifiedAddressing: return 1;
    case AttrComputeMode: return config().compute_mode;
    case AttrIntegrated: return config().integrated ? 1 : 0;
    case AttrComputeCapabilityMajor: return 9;
    case AttrComputeCapabilityMinor: return 0;
    case AttrHostPointerForRegistered:
    case AttrHostRegister: return config().has(Group::HostRegister) ? 1 : 0;
    case AttrVmm:
    case AttrVmmPosixFd: return config().has(Group::Vmm) ? 1 : 0;
    case AttrMemOps64: return config().has(Group::MemOps) ? 1 : 0;
    case AttrIpcEvents: return config().has(Group::IpcEvents) ? 1 : 0;
    case AttrMemoryPools:
    case AttrPoolHandleTypes: return config().has(Group::Pools) ? 1 : 0; // 1: HandlePosixFd
    case AttrMpsEnabled: return config().mps;
    default: return 0;
  }
}

} // namespace

namespace api {

CuResult cuDeviceGetCount(int* count) {
  if (count == nullptr) return InvalidValue;
  *count = static_cast<int>(config().visible.size());
  return Success;
}

CuResult cuDeviceGet(Device* device, int ordinal) {
  if (device == nullptr) return InvalidValue;
  if (!is_device(ordinal)) return InvalidDevice;
  *device = ordinal;
  return Success;
}

CuResult cuDeviceGetName(char* name, int length, Device device) {
  if (name == nullptr || length <= 0) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  const int physical = physical_device(device);
  const int slices = config().slices;
  if (slices == 0) {
    std::snprintf(name, static_cast<std::size_t>(length), "gpuloan simulated device %d", physical);
  } else {
    std::snprintf(name, static_cast<std::size_t>(length), "gpuloan simulated device %d MIG %d/%d", physical / slices, physical % slices + 1, slices);
  }
  return Success;
}

CuResult cuDeviceGetUuid(Uuid* uuid, Device device) {
  if (uuid == nullptr) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  *uuid = device_uuid(physical_device(device));
  return Success;
}

CuResult cuDeviceGetAttribute(int* value, int attribute, Device device) {
  constexpr int kLast = 150; // a little above what driver 13.0 knows
  if (value == nullptr || attribute < 1 || attribute > kLast) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  const auto& unknown = config().unknown_attributes;
  if (std::find(unknown.begin(), unknown.end(), attribute) != unknown.end()) return InvalidValue;
  *value = attribute_value(attribute);
  return Success;
}

CuResult cuDeviceTotalMem(std::size_t* bytes, Device device) {
  if (bytes == nullptr) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  *bytes = config().memory_bytes;
  return Success;
}

// A device is no peer of itself.
CuResult cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  if (can == nullptr) return InvalidValue;
  if (!is_device(device) || !is_device(peer)) return InvalidDevice;
  *can = device != peer && config().reaches(physical_device(device), physical_device(peer)) ? 1 : 0;
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
