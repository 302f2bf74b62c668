// SPDX-License-Identifier: MIT
//
// The driver under test, loaded by path (GPULOAN_SIM_LIBRARY): every function of the project's symbol table as a member
// of its base name, and the hooks of sim.h.
#pragma once

#include <driver/types.hpp>

#include <cstdint>

namespace sim_test {

using namespace gpuloan::cuda;

struct Driver {
#define GPULOAN_CUDA(need, since, group, name, exported, params) CuResult(*name) params = nullptr;
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
#undef GPULOAN_CUDA
  CuResult (*get_proc_address)(const char* symbol, void** function, int version, std::uint64_t flags,
                               int* status) = nullptr;
  CuResult (*stream_delay)(void* stream, unsigned microseconds) = nullptr;
  CuResult (*stream_hold)(void* stream) = nullptr;
  CuResult (*stream_release)(void* stream) = nullptr;
  CuResult (*context_fail)(int result) = nullptr;
  void (*deinitialize)() = nullptr;
  std::int64_t (*live)(const char* what) = nullptr;
  std::int64_t (*calls)(const char* function) = nullptr;
  CuResult (*claim)(std::uint64_t pointer, std::uint64_t bytes, std::uint32_t writer, std::uint32_t second_writer, std::uint32_t reader, std::uint64_t note) = nullptr;
  CuResult (*unclaim)(std::uint64_t pointer, std::uint64_t bytes) = nullptr;
  void (*unclaim_all)(std::uint32_t process) = nullptr;
  std::int64_t (*witness_reports)() = nullptr;
  int (*witness_report)(std::uint64_t index, char* out_text, std::uint64_t room) = nullptr;
  int (*orphan_writer)(std::uint64_t pointer, std::uint64_t bytes, std::uint32_t value, unsigned milliseconds) = nullptr;
};

// Loads the library into this process at the first call. Only ever called in the child processes of a test.
[[nodiscard]] const Driver& driver();
// driver(), initialised, with the primary context of a device current.
const Driver& start(Device device = 0);

// A chunk of VMM memory with a mapping; freed by the process's end unless told otherwise.
struct Mapped {
  MemHandle handle = 0;
  DevicePtr address = 0;
  std::size_t size = 0;
};
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;

[[nodiscard]] AllocationProp exportable(Device device = 0);
[[nodiscard]] MemHandle create_chunk(std::size_t size, Device device = 0);
[[nodiscard]] int export_fd(MemHandle handle);
[[nodiscard]] MemHandle import_fd(int fd); // closes fd
[[nodiscard]] DevicePtr map_chunk(MemHandle handle, std::size_t size, int access = AccessReadWrite, Device device = 0);
void unmap_chunk(DevicePtr address, std::size_t size);
[[nodiscard]] std::size_t used_bytes();
[[nodiscard]] Stream make_stream(unsigned flags = StreamNonBlocking);
[[nodiscard]] Event make_event(unsigned flags = EventDisableTiming);

// Reads or writes one word of device memory and waits for it, on a stream of its own.
[[nodiscard]] std::uint32_t read_word(DevicePtr address);
void write_word(DevicePtr address, std::uint32_t value);

} // namespace sim_test
