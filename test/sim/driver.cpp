// SPDX-License-Identifier: MIT
#include "driver.hpp"

#include "child.hpp"

#include <dlfcn.h>
#include <unistd.h>

namespace sim_test {
namespace {

template <typename Function>
void resolve(void* library, const char* name, Function& out) {
  void* address = ::dlsym(library, name);
  REQUIRE_MESSAGE(address != nullptr, "not exported: ", name);
  out = reinterpret_cast<Function>(address);
}

Driver load() {
  const char* path = std::getenv("GPULOAN_SIM_LIBRARY");
  REQUIRE_MESSAGE(path != nullptr, "GPULOAN_SIM_LIBRARY is not set");
  void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  REQUIRE_MESSAGE(library != nullptr, ::dlerror());
  Driver table;
#define GPULOAN_CUDA(need, since, group, name, exported, params) resolve(library, #exported, table.name);
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
#undef GPULOAN_CUDA
  resolve(library, "cuGetProcAddress_v2", table.get_proc_address);
  resolve(library, "gpuloan_sim_stream_delay", table.stream_delay);
  resolve(library, "gpuloan_sim_stream_hold", table.stream_hold);
  resolve(library, "gpuloan_sim_stream_release", table.stream_release);
  resolve(library, "gpuloan_sim_context_fail", table.context_fail);
  resolve(library, "gpuloan_sim_deinitialize", table.deinitialize);
  resolve(library, "gpuloan_sim_live", table.live);
  resolve(library, "gpuloan_sim_calls", table.calls);
  resolve(library, "gpuloan_sim_claim", table.claim);
  resolve(library, "gpuloan_sim_unclaim", table.unclaim);
  resolve(library, "gpuloan_sim_unclaim_all", table.unclaim_all);
  resolve(library, "gpuloan_sim_witness_reports", table.witness_reports);
  resolve(library, "gpuloan_sim_witness_report", table.witness_report);
  resolve(library, "gpuloan_sim_orphan_writer", table.orphan_writer);
  return table;
}

} // namespace

const Driver& driver() {
  static const Driver table = load();
  return table;
}

const Driver& start(Device device) {
  const Driver& cuda = driver();
  REQUIRE(cuda.cuInit(0) == Success);
  Context context = nullptr;
  REQUIRE(cuda.cuDevicePrimaryCtxRetain(&context, device) == Success);
  REQUIRE(cuda.cuCtxPushCurrent(context) == Success);
  return cuda;
}

AllocationProp exportable(Device device) {
  AllocationProp prop = {};
  prop.type = AllocationPinned;
  prop.requested_handle_types = HandlePosixFd;
  prop.location = {LocationDevice, device};
  return prop;
}

MemHandle create_chunk(std::size_t size, Device device) {
  MemHandle handle = 0;
  const AllocationProp prop = exportable(device);
  REQUIRE(driver().cuMemCreate(&handle, size, &prop, 0) == Success);
  return handle;
}

int export_fd(MemHandle handle) {
  int fd = -1;
  REQUIRE(driver().cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0) == Success);
  return fd;
}

MemHandle import_fd(int fd) {
  MemHandle handle = 0;
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  REQUIRE(driver().cuMemImportFromShareableHandle(&handle, shareable, HandlePosixFd) == Success);
  ::close(fd);
  return handle;
}

DevicePtr map_chunk(MemHandle handle, std::size_t size, int access, Device device) {
  const Driver& cuda = driver();
  DevicePtr address = 0;
  REQUIRE(cuda.cuMemAddressReserve(&address, size, 0, 0, 0) == Success);
  REQUIRE(cuda.cuMemMap(address, size, 0, handle, 0) == Success);
  const AccessDesc grant = {{LocationDevice, device}, access};
  REQUIRE(cuda.cuMemSetAccess(address, size, &grant, 1) == Success);
  return address;
}

void unmap_chunk(DevicePtr address, std::size_t size) {
  REQUIRE(driver().cuMemUnmap(address, size) == Success);
  REQUIRE(driver().cuMemAddressFree(address, size) == Success);
}

std::size_t used_bytes() {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  REQUIRE(driver().cuMemGetInfo(&free_bytes, &total) == Success);
  return total - free_bytes;
}

Stream make_stream(unsigned flags) {
  Stream stream = nullptr;
  REQUIRE(driver().cuStreamCreate(&stream, flags) == Success);
  return stream;
}

Event make_event(unsigned flags) {
  Event event = nullptr;
  REQUIRE(driver().cuEventCreate(&event, flags) == Success);
  return event;
}

std::uint32_t read_word(DevicePtr address) {
  const Driver& cuda = driver();
  const Stream stream = make_stream();
  std::uint32_t word = 0;
  REQUIRE(cuda.cuMemcpyDtoHAsync(&word, address, sizeof word, stream) == Success);
  REQUIRE(cuda.cuStreamSynchronize(stream) == Success);
  REQUIRE(cuda.cuStreamDestroy(stream) == Success);
  return word;
}

void write_word(DevicePtr address, std::uint32_t value) {
  const Driver& cuda = driver();
  const Stream stream = make_stream();
  REQUIRE(cuda.cuMemsetD32Async(address, value, 1, stream) == Success);
  REQUIRE(cuda.cuStreamSynchronize(stream) == Success);
  REQUIRE(cuda.cuStreamDestroy(stream) == Success);
}

} // namespace sim_test
