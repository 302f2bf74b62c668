// SPDX-License-Identifier: MIT
//
// Allocating and freeing in stream order. Memory is there when the call returns, which is sooner than the order
// promises; it goes when the stream gets to it, so that the work before may still use it. Neither is a node of a graph
// here: a capture does not survive an allocation, and memory freed in one is gone at once.
#include <sim/api.hpp>
#include <sim/capture.hpp>
#include <sim/pool_register.hpp>
#include <sim/stream.hpp>

namespace gpuloan::sim {
namespace {

class Return final : public Operation {
 public:
  explicit Return(std::shared_ptr<PoolMemory> memory) : memory_(std::move(memory)) {}
  CuResult run(StreamState&) override {
    memory_.reset();
    return Success;
  }

 private:
  std::shared_ptr<PoolMemory> memory_; // given back as well when the operation is dropped with its context
};

CuResult resolve_for_allocation(Stream stream, StreamRef& out) {
  if (const CuResult result = resolve_stream(stream, out)) return result;
  const std::lock_guard lock(out->context->mutex);
  return capture_forbids(*out);
}

CuResult allocate(PoolState& pool, std::size_t bytes, DevicePtr& out) {
  if (pool.origin == PoolState::Origin::Imported) return InvalidValue;
  if (bytes > config().memory_bytes) return OutOfMemory;
  if (bytes != 0) return pool.allocate(bytes, out);
  out = 0; // measured to succeed
  return Success;
}

} // namespace

namespace api {

CuResult cuMemAllocAsync(DevicePtr* pointer, std::size_t bytes, Stream stream) {
  StreamRef where;
  if (pointer == nullptr) return InvalidValue;
  if (const CuResult result = resolve_for_allocation(stream, where)) return result;
  return allocate(*current_pool(where->context->device), bytes, *pointer);
}

CuResult cuMemAllocFromPoolAsync(DevicePtr* pointer, std::size_t bytes, Pool pool, Stream stream) {
  StreamRef where;
  const PoolRef found = find_pool(pool);
  if (pointer == nullptr || !found) return InvalidValue;
  if (const CuResult result = resolve_for_allocation(stream, where)) return result;
  return allocate(*found, bytes, *pointer);
}

CuResult cuMemFreeAsync(DevicePtr pointer, Stream stream) {
  StreamRef where;
  if (const CuResult result = resolve_stream(stream, where)) return result;
  if (pointer == 0) return Success;
  const auto memory = take_pool_memory(pointer);
  if (!memory) return InvalidValue;
  const CuResult result = submit(where, std::make_unique<Return>(memory));
  if (result != Success) add_pool_memory(memory);
  return result;
}

} // namespace api
} // namespace gpuloan::sim
