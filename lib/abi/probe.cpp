// SPDX-License-Identifier: MIT
//
// What the driver and its devices can do, without a context.
#include <abi/abi.hpp>

#include <base/log.hpp>

using namespace gpuloan;
using namespace gpuloan::abi;

namespace {

Result<void> probe_driver(const char *choice, gpuloan_driver_info *out_info) {
  auto opened = driver::Driver::open(choice);
  if (!opened) return forward(std::move(opened.error()));
  const driver::Driver &found = **opened;
  gpuloan_driver_info info = {};
  int devices = 0;
  GPULOAN_TRY(GPULOAN_CU(found, cuDeviceGetCount, &devices));
  info.version = found.version();
  info.simulated = found.simulated() ? 1 : 0;
  info.devices = static_cast<std::uint32_t>(devices);
  copy_text(info.path, sizeof info.path, found.path());
  copy_text(info.found_by, sizeof info.found_by, found.found_by());
  return write_struct(out_info, info, "out_info");
}

Result<void> probe_device(const char *choice, int ordinal, gpuloan_device_info *out_info) {
  auto opened = driver::Driver::open(choice);
  if (!opened) return forward(std::move(opened.error()));
  auto floors = driver::probe_floors(**opened, ordinal);
  if (!floors) return forward(std::move(floors.error()));
  gpuloan_device_info info = {};
  info.ordinal = ordinal;
  info.floors = floors->bits;
  info.missing = floors->missing;
  info.compute_mode = floors->compute_mode;
  info.integrated = static_cast<std::uint32_t>(floors->integrated);
  info.mps = floors->mps ? 1 : 0;
  info.total_bytes = floors->total_bytes;
  info.granularity = floors->granularity;
  std::memcpy(info.uuid, floors->uuid.bytes, sizeof info.uuid);
  copy_text(info.name, sizeof info.name, floors->name);
  for (const driver::Neighbour& other : floors->neighbours) {
    if (other.reachable && other.ordinal < 64) info.peers |= std::uint64_t{1} << other.ordinal;
  }
  copy_text(info.floor_reason, sizeof info.floor_reason, floors->reason);
  if (floors->has(GPULOAN_FLOOR_POOLS)) {
    const memory::ImportLimit limit = memory::find_import_limit(**opened, *floors);
    info.pool_import_limit = limit.bytes;
    info.pool_import_limit_source = limit.source;
  }
  return write_struct(out_info, info, "out_info");
}

Result<void> remember_limit(const char *choice, int ordinal, std::uint64_t bytes) {
  auto opened = driver::Driver::open(choice);
  if (!opened) return forward(std::move(opened.error()));
  auto floors = driver::probe_floors(**opened, ordinal);
  if (!floors) return forward(std::move(floors.error()));
  if (!floors->has(GPULOAN_FLOOR_POOLS)) return fail(GPULOAN_ERR_UNSUPPORTED, "this device has no pools that could be imported: " + floors->reason);
  auto path = memory::remember_import_limit(**opened, *floors, bytes);
  if (!path) return forward(std::move(path.error()));
  GPULOAN_LOG(GPULOAN_LOG_INFO, "the import limit of pool allocations, " + std::to_string(bytes) + " bytes, is kept in " + *path);
  return {};
}

} // namespace

extern "C" {

gpuloan_status gpuloan_driver_probe(const char *driver, gpuloan_driver_info *out_info) {
  return guard([&] { return probe_driver(driver, out_info); });
}

gpuloan_status gpuloan_device_probe(const char *driver, int32_t ordinal, gpuloan_device_info *out_info) {
  return guard([&] { return probe_device(driver, ordinal, out_info); });
}

gpuloan_status gpuloan_import_limit_remember(const char *driver, int32_t ordinal, uint64_t bytes) {
  return guard([&] { return remember_limit(driver, ordinal, bytes); });
}

} // extern "C"
