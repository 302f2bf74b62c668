// SPDX-License-Identifier: MIT
//
// Questions to a CUDA driver, asked of the simulated and of the real one alike. Each section runs in a process of its
// own and writes lines "section.question answer", an answer being a CUresult or a number. What the real driver said is
// recorded beside this file; the simulated one has to say the same. A section is a list of questions in their order, so
// its function may be long.
#pragma once

#include <driver/types.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace answers {

using namespace gpuloan::cuda;

struct Driver {
#define GPULOAN_CUDA(need, since, group, name, exported, params) CuResult(*name) params = nullptr;
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
#undef GPULOAN_CUDA
  CuResult (*get_proc_address)(const char* symbol, void** function, int version, std::uint64_t flags,
                               int* status) = nullptr;
};

extern Driver cuda;

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

void say(const char* question, long long answer);
// Asks what must go well for the section to make sense; ends the section otherwise.
void need(CuResult result, const char* what);
// Initialises the driver and makes the primary context of device 0 current.
void start();
// Runs something in a thread: true when it ended within the time. What it uses must stay when it did not.
[[nodiscard]] bool ends_within_ms(int milliseconds, const std::function<void()>& body);
// How long something is watched that is said not to happen. ANSWERS_PATIENCE_MS changes it.
[[nodiscard]] int patience_ms();

[[nodiscard]] AllocationProp prop();
[[nodiscard]] MemHandle create(std::size_t bytes = 2 * kMiB);
[[nodiscard]] DevicePtr map(MemHandle handle, int access, std::size_t bytes = 2 * kMiB);
[[nodiscard]] CuResult give(DevicePtr address, std::size_t bytes, int access);
[[nodiscard]] Stream stream(unsigned flags = StreamNonBlocking);
[[nodiscard]] std::uint64_t* words(); // a registered page of zeros
void store(std::uint64_t* word, std::uint64_t value); // releasing
[[nodiscard]] Event event(unsigned flags);
inline constexpr unsigned kShared = EventDisableTiming | EventInterprocess;
// What a query answers in the end: success, or not ready for as long as we watch.
[[nodiscard]] CuResult later(Stream stream, int milliseconds = patience_ms());
[[nodiscard]] inline DevicePtr at(const void* host) { return reinterpret_cast<std::uintptr_t>(host); }

// foreign.cpp: pools of device 0.
[[nodiscard]] Pool make_pool(int handle_types);
[[nodiscard]] DevicePtr from_pool(Pool pool, std::size_t bytes);
[[nodiscard]] int export_pool(Pool pool);
[[nodiscard]] CuResult import_pool(int fd, Pool* pool);
void fill(DevicePtr at, unsigned value, std::size_t words = 1024);

void ask_startup();
void ask_no_context();
void ask_vmm();
void ask_export();
void ask_pointers();
void ask_copies();
void ask_read_only();
void ask_read_only_word();
void ask_no_access();
void ask_sticky();
void ask_plain();
void ask_events();
void ask_memops();
void ask_host();
void ask_capture();
void ask_unsafe();
void ask_pageable();
void ask_standing();
void ask_waits();
void ask_event_waits();
void ask_record_again();
void ask_unmap_under_work();
void ask_unregister_under_wait();
void ask_released();
void ask_fork();
void ask_devices();
void ask_peer();
void ask_blocks();
void ask_channels();
void ask_busy_channels();
void ask_first_fill();
void ask_other_context();
void ask_release_under_wait();
void ask_kinds();
void ask_legacy();
void ask_pools();
void ask_pool_import();
void ask_stranded();

} // namespace answers
