// SPDX-License-Identifier: MIT
//
// Stream memory operations: a 64-bit word that a stream writes with release order after all its earlier work, or waits
// for with acquire order before all its later work. The word may be written by the CPU of any process that shares the
// page, which is how a stuck wait is released (fact S6).
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/stream.hpp>

#include <atomic>

namespace gpuloan::sim {
namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);

std::atomic_ref<std::uint64_t> word_at(std::byte* data) noexcept {
  return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(data));
}

class WriteValue final : public Operation {
 public:
  WriteValue(DevicePtr address, std::uint64_t value) : address_(address), value_(value) {}
  CuResult run(StreamState& stream) override {
    Pin pin;
    const int physical = stream.context->physical;
    if (const CuResult result = AddressSpace::get().pin(address_, kWord, AccessReadWrite, physical, pin)) return result;
    if (pin.size() < kWord) return IllegalAddress;
    word_at(pin.data()).store(value_, std::memory_order_release);
    return Success;
  }

 private:
  const DevicePtr address_;
  const std::uint64_t value_;
};

class WaitValue final : public Operation {
 public:
  WaitValue(DevicePtr address, std::uint64_t value, unsigned flags) : address_(address), value_(value), flags_(flags) {}

  bool is_wait() const noexcept override { return true; }
  CuResult run(StreamState& stream) override {
    const ContextState& context = *stream.context;
    bool satisfied = false;
    for (Backoff backoff; !context.cancelled(); backoff.pause()) {
      if (const CuResult result = look(context.physical, satisfied)) return result;
      if (satisfied) break;
    }
    return Success;
  }

 private:
  [[nodiscard]] CuResult look(int physical, bool& satisfied) const {
    Pin pin;
    if (const CuResult result = AddressSpace::get().pin(address_, kWord, AccessRead, physical, pin)) return result;
    if (pin.size() < kWord) return IllegalAddress;
    const std::uint64_t seen = word_at(pin.data()).load(std::memory_order_acquire);
    switch (flags_) {
      case WaitEq: satisfied = seen == value_; break;
      default: satisfied = static_cast<std::int64_t>(seen - value_) >= 0; break; // cyclic
    }
    return Success;
  }

  const DevicePtr address_;
  const std::uint64_t value_;
  const unsigned flags_;
};

CuResult check(Stream stream, DevicePtr address, StreamRef& out) {
  if (const CuResult result = resolve_stream(stream, out)) return result;
  // That a word to be written is mapped for reading only shows when the work runs.
  const bool there = AddressSpace::get().covers(address, kWord, AccessRead, out->context->physical);
  return there && address % kWord == 0 ? Success : InvalidValue;
}

} // namespace

namespace api {

CuResult cuStreamWriteValue64(Stream stream, DevicePtr address, std::uint64_t value, unsigned flags) {
  StreamRef where;
  if (const CuResult result = check(stream, address, where)) return result;
  if (flags != WriteDefault) return InvalidValue;
  return submit(where, std::make_unique<WriteValue>(address, value));
}

CuResult cuStreamWaitValue64(Stream stream, DevicePtr address, std::uint64_t value, unsigned flags) {
  StreamRef where;
  if (const CuResult result = check(stream, address, where)) return result;
  if (flags != WaitGeq && flags != WaitEq) return InvalidValue;
  return submit(where, std::make_unique<WaitValue>(address, value, flags));
}

} // namespace api
} // namespace gpuloan::sim
