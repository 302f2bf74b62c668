// SPDX-License-Identifier: MIT
//
// The functions of sim.h. They pass no gate: faults on demand are for the driver's own functions.
#include <sim/address_space.hpp>
#include <sim/event.hpp>
#include <sim/faults.hpp>
#include <sim/host_memory.hpp>
#include <sim/memory.hpp>
#include <sim/pool_register.hpp>
#include <sim/process.hpp>
#include <sim/sim.h>
#include <sim/raw_copy.hpp>
#include <sim/stream.hpp>
#include <sim/witness.hpp>

#include <algorithm>
#include <cstring>
#include <unistd.h>

#define GPULOAN_SIM_PUBLIC extern "C" __attribute__((visibility("default")))

namespace gpuloan::sim {
namespace {

class Delay final : public Operation {
 public:
  explicit Delay(unsigned microseconds) : length_(microseconds) {}
  CuResult run(StreamState& stream) override {
    const auto end = Clock::now() + length_;
    std::unique_lock lock(stream.context->mutex);
    stream.context->progress.wait_until(lock, end, [&] { return stream.context->cancelled(); });
    return Success;
  }

 private:
  const std::chrono::microseconds length_;
};

CuResult find_stream(void* handle, StreamRef& out) {
  if (const CuResult result = process_state()) return result;
  if (!current_context()) return InvalidContext;
  return resolve_stream(static_cast<Stream>(handle), out);
}

std::int64_t live(std::string_view what) {
  const auto counts = AddressSpace::get().counts();
  const std::pair<std::string_view, std::size_t> all[] = {
      {"contexts", live_contexts()},     {"streams", live_streams()},
      {"events", live_events()},         {"handles", live_memory_handles()},
      {"mappings", counts.mapped},       {"reservations", counts.reservations},
      {"allocations", counts.allocated}, {"imports", counts.imported},
      {"host", counts.host},             {"waits", live_waits()},
      {"pools", live_pools()},           {"reserved-bytes", counts.reserved_bytes},
  };
  const auto* found =
      std::find_if(std::begin(all), std::end(all), [&](const auto& entry) { return entry.first == what; });
  return found != std::end(all) ? static_cast<std::int64_t>(found->second) : -1;
}

// In the child: no lock, no allocation, no driver call.
[[noreturn]] void write_as_orphan(const Chunk& chunk, std::size_t offset, std::size_t bytes, std::uint32_t value, unsigned milliseconds, pid_t parent) {
  const auto pause = [] {
    const timespec time = {0, 100'000};
    ::nanosleep(&time, nullptr);
  };
  const auto born = Clock::now();
  while (::getppid() == parent) {
    if (Clock::now() - born > std::chrono::seconds(10)) ::_exit(0);
    pause();
  }
  const auto process = static_cast<std::uint32_t>(parent);
  for (const auto end = Clock::now() + std::chrono::milliseconds(milliseconds); Clock::now() < end; pause()) {
    witness(chunk, offset, bytes, Touch::Write, process);
    raw_fill(chunk.data() + offset, value, bytes);
  }
  ::_exit(0);
}

} // namespace
} // namespace gpuloan::sim

using namespace gpuloan::sim;

GPULOAN_SIM_PUBLIC int gpuloan_sim_stream_delay(void* stream, unsigned microseconds) {
  StreamRef found;
  if (const CuResult result = find_stream(stream, found)) return result;
  return submit(found, std::make_unique<Delay>(microseconds));
}

GPULOAN_SIM_PUBLIC int gpuloan_sim_stream_hold(void* stream) {
  StreamRef found;
  if (const CuResult result = find_stream(stream, found)) return result;
  hold_stream(found, true);
  return Success;
}

GPULOAN_SIM_PUBLIC int gpuloan_sim_stream_release(void* stream) {
  StreamRef found;
  if (const CuResult result = find_stream(stream, found)) return result;
  hold_stream(found, false);
  return Success;
}

GPULOAN_SIM_PUBLIC int gpuloan_sim_context_fail(int result) {
  if (const CuResult state = process_state()) return state;
  const ContextRef context = current_context();
  if (!context) return InvalidContext;
  fail_context(*context, result);
  return Success;
}

GPULOAN_SIM_PUBLIC void gpuloan_sim_pin_limit(std::uint64_t bytes) { set_pin_limit(bytes); }

GPULOAN_SIM_PUBLIC void gpuloan_sim_deinitialize() { deinitialize(); }

GPULOAN_SIM_PUBLIC std::int64_t gpuloan_sim_live(const char* what) { return live(what); }

GPULOAN_SIM_PUBLIC std::int64_t gpuloan_sim_calls(const char* function) {
  const Row row = row_by_name(function);
  return row != Row::Count ? static_cast<std::int64_t>(calls_so_far(row)) : -1;
}

GPULOAN_SIM_PUBLIC int gpuloan_sim_claim(std::uint64_t pointer, std::uint64_t bytes, std::uint32_t writer, std::uint32_t second_writer,
                                         std::uint32_t reader, std::uint64_t note) {
  if (const CuResult result = process_state()) return result;
  return claim(pointer, bytes, {writer, second_writer, reader}, note);
}

GPULOAN_SIM_PUBLIC int gpuloan_sim_unclaim(std::uint64_t pointer, std::uint64_t bytes) {
  if (const CuResult result = process_state()) return result;
  return unclaim(pointer, bytes);
}

GPULOAN_SIM_PUBLIC void gpuloan_sim_unclaim_all(std::uint32_t process) {
  if (process_state() == Success) unclaim_all(process);
}

GPULOAN_SIM_PUBLIC std::int64_t gpuloan_sim_witness_reports() {
  return process_state() == Success ? static_cast<std::int64_t>(witness_reports()) : -1;
}

GPULOAN_SIM_PUBLIC int gpuloan_sim_witness_report(std::uint64_t index, char* out_text, std::uint64_t room) {
  if (process_state() != Success || room == 0) return 0;
  const std::string text = witness_report(index);
  if (text.empty()) return 0;
  const std::size_t length = std::min<std::size_t>(text.size(), room - 1);
  std::memcpy(out_text, text.data(), length);
  out_text[length] = '\0';
  return 1;
}

GPULOAN_SIM_PUBLIC int gpuloan_sim_orphan_writer(std::uint64_t pointer, std::uint64_t bytes, std::uint32_t value, unsigned milliseconds) {
  if (process_state() != Success) return -1;
  std::size_t offset = 0;
  const std::shared_ptr<Chunk> chunk = AddressSpace::get().chunk_behind(pointer, bytes, offset);
  if (!chunk) return -1;
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) write_as_orphan(*chunk, offset, bytes, value, milliseconds, parent);
  return child;
}
