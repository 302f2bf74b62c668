// SPDX-License-Identifier: MIT
//
// The deleters of DLPack tensors that a Python module made. Who drops a tensor may be on any thread, without the interpreter's lock or with
// an exception under way, and then nothing that is written in Python may be called: what was deleted is chained up, and the module
// takes the chain when it can. No memory is needed and no lock is taken, so this is safe in a forked child too.
#include <abi/abi.hpp>

#include <atomic>

using namespace gpuloan;
using namespace gpuloan::abi;

namespace {

// As DLPack 1.1 lays them out (dlpack.h). Only the field that is for the maker's use is touched.
struct Managed {
  unsigned char tensor[48];
  void* manager_ctx;
};
struct ManagedVersioned {
  std::uint32_t major, minor;
  void* manager_ctx;
};

// Never freed: another thread may still read the former one.
struct Interpreter {
  gpuloan_dlpack_python calls;
  const Interpreter* former;
};

std::atomic<const Interpreter*> current{nullptr};
const Interpreter* latest = nullptr;
std::atomic<void*> chain{nullptr};
std::atomic<bool> asked{false}; // the interpreter, to call the module soon

void add(void* managed, void*& next) noexcept {
  void* first = chain.load(std::memory_order_relaxed);
  do next = first;
  while (!chain.compare_exchange_weak(first, managed, std::memory_order_release, std::memory_order_relaxed));
  const Interpreter* python = current;
  if (python == nullptr) return;
  if (python->calls.holds_lock() != 0 && python->calls.exception() == nullptr) {
    static_cast<void>(python->calls.take_all(nullptr));
  } else if (!asked.exchange(true) && python->calls.call_soon(python->calls.take_all, nullptr) != 0) {
    asked = false; // its queue is full; the next one asks again
  }
}

} // namespace

extern "C" {

gpuloan_status gpuloan_dlpack_python_set(const gpuloan_dlpack_python *functions) {
  return guard([&]() -> Result<void> {
    if (functions == nullptr) {
      current = nullptr;
      return {};
    }
    auto calls = read_struct(functions, "functions");
    if (!calls) return forward(std::move(calls.error()));
    const bool whole = calls->holds_lock && calls->exception && calls->call_soon && calls->capsule_is_valid && calls->capsule_pointer && calls->take_all;
    if (!whole) return fail(GPULOAN_ERR_INVALID, "one of the functions of the interpreter is NULL");
    current = latest = new Interpreter{*calls, latest};
    return {};
  });
}

void gpuloan_dlpack_delete(void *managed) {
  if (managed != nullptr) add(managed, static_cast<Managed*>(managed)->manager_ctx);
}

void gpuloan_dlpack_delete_versioned(void *managed) {
  if (managed != nullptr) add(managed, static_cast<ManagedVersioned*>(managed)->manager_ctx);
}

void gpuloan_dlpack_capsule_free(void *capsule) {
  const Interpreter* python = current;
  if (python == nullptr) return;
  const auto& calls = python->calls;
  if (calls.capsule_is_valid(capsule, "dltensor") != 0) gpuloan_dlpack_delete(calls.capsule_pointer(capsule, "dltensor"));
  else if (calls.capsule_is_valid(capsule, "dltensor_versioned") != 0) gpuloan_dlpack_delete_versioned(calls.capsule_pointer(capsule, "dltensor_versioned"));
}

void *gpuloan_dlpack_take(void) {
  asked = false;
  return chain.exchange(nullptr, std::memory_order_acquire);
}

} // extern "C"
