// SPDX-License-Identifier: MIT
//
// The allocator that PyTorch takes from this library by name. It has no status to return, so a failure is said in the log.
#include <abi/abi.hpp>

#include <base/log.hpp>
#include <memory/torch_memory.hpp>

using namespace gpuloan;
using namespace gpuloan::abi;

namespace {

// Not in a forked child: another thread of the parent may have had the log's lock.
void log_failure(const char* function) noexcept {
  if (!driver::calls_allowed()) return;
  try {
    GPULOAN_LOG(GPULOAN_LOG_ERROR, std::string(function) + ": " + gpuloan_error_text());
  } catch (...) { // no memory for the line
  }
}

} // namespace

extern "C" {

void *gpuloan_torch_malloc(size_t bytes, int device, void *) {
  if (bytes == 0) return nullptr;
  cuda::DevicePtr pointer = 0;
  const gpuloan_status status = on_driver([&](const auto& driver) -> Result<void> {
    auto made = memory::torch_allocate(driver, bytes, device);
    if (!made) return forward(std::move(made.error()));
    pointer = *made;
    return {};
  });
  if (status != GPULOAN_OK) log_failure("gpuloan_torch_malloc");
  return reinterpret_cast<void*>(pointer); // NOLINT(performance-no-int-to-ptr): PyTorch wants it as a pointer
}

void gpuloan_torch_free(void *pointer, size_t, int, void *stream) {
  if (pointer == nullptr || !driver::calls_allowed()) return;
  const gpuloan_status status = guard([&] { return memory::torch_release(reinterpret_cast<cuda::DevicePtr>(pointer), stream_of(stream)); });
  if (status != GPULOAN_OK) log_failure("gpuloan_torch_free");
}

} // extern "C"
