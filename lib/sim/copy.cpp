// SPDX-License-Identifier: MIT
//
// Copies and fills. What can be seen at the call is refused there: addresses that nothing lies behind, or not with the
// access that is needed. What shows only when the work runs is a device fault that fails the context: memory unmapped
// or access taken away meanwhile.
//
// Host memory that is not registered is pageable: a copy from it has read it, and a copy into it has written it, when
// the call returns.
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/host_memory.hpp>
#include <sim/raw_copy.hpp>
#include <sim/stream.hpp>
#include <sim/witness.hpp>

#include <algorithm>
#include <cstring>

namespace gpuloan::sim {
namespace {

constexpr std::size_t kSlice = std::size_t{4} << 20; // how long an unmap may have to wait
constexpr std::size_t kStagingMax = std::size_t{1} << 20; // larger pageable sources are read in stream order instead

// One end of a copy: an address the device knows, or pageable host memory.
struct Side {
  DevicePtr address = 0;
  std::byte* pageable = nullptr;
};

// Opens the part of a side that a slice at `offset` can use; `out_size` comes in as the wish.
CuResult open_side(const Side& side, std::size_t offset, int access, int physical, Pin& pin, std::byte*& out_data,
                   std::size_t& out_size) {
  if (side.pageable != nullptr) {
    out_data = side.pageable + offset;
    return Success;
  }
  if (const CuResult result = AddressSpace::get().pin(side.address + offset, out_size, access, physical, pin))
    return result;
  out_data = pin.data();
  out_size = pin.size();
  return Success;
}

class Copy final : public Operation {
 public:
  Copy(Side to, Side from, std::size_t bytes) : to_(to), from_(from), bytes_(bytes) {}

  // Reads the source now.
  void stage() {
    staged_.assign(from_.pageable, from_.pageable + bytes_);
    from_.pageable = staged_.data();
  }

  CuResult run(StreamState& stream) override {
    const ContextState& context = *stream.context;
    for (std::size_t done = 0; done < bytes_ && !context.cancelled();) {
      Pin read;
      Pin write;
      std::byte* source = nullptr;
      std::byte* target = nullptr;
      std::size_t size = std::min(bytes_ - done, kSlice);
      if (const CuResult result = open_side(from_, done, AccessRead, context.physical, read, source, size))
        return result;
      if (const CuResult result = open_side(to_, done, AccessReadWrite, context.physical, write, target, size))
        return result;
      witness(read, size, Touch::Read);
      witness(write, size, Touch::Write);
      raw_copy(target, source, size);
      witness(read, size, Touch::Read);
      witness(write, size, Touch::Write);
      done += size;
    }
    return Success;
  }

 private:
  const Side to_;
  Side from_;
  const std::size_t bytes_;
  std::vector<std::byte> staged_;
};

class Fill final : public Operation {
 public:
  Fill(DevicePtr to, std::uint32_t pattern, std::size_t width, std::size_t bytes)
      : to_(to), pattern_(pattern), width_(width), bytes_(bytes) {}

  CuResult run(StreamState& stream) override {
    const ContextState& context = *stream.context;
    for (std::size_t done = 0; done < bytes_ && !context.cancelled();) {
      Pin write;
      const std::size_t wish = std::min(bytes_ - done, kSlice);
      if (const CuResult result = AddressSpace::get().pin(to_ + done, wish, AccessReadWrite, context.physical, write)) {
        return result;
      }
      const std::size_t size = write.size() / width_ * width_;
      if (size == 0) return IllegalAddress; // a word across the end of registered memory
      witness(write, size, Touch::Write);
      raw_fill(write.data(), pattern_, size);
      witness(write, size, Touch::Write);
      done += size;
    }
    return Success;
  }

 private:
  const DevicePtr to_;
  const std::uint32_t pattern_; // repeated to four bytes
  const std::size_t width_;
  const std::size_t bytes_;
};

enum class Expect { Device, Any };

CuResult make_side(DevicePtr address, std::size_t bytes, Expect expect, int access, int physical, Side& out) {
  if (AddressSpace::get().covers(address, bytes, access, physical)) {
    out.address = address;
    return Success;
  }
  void* host = reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
  if (expect == Expect::Device || !is_host_memory(host, bytes)) return InvalidValue;
  out.pageable = static_cast<std::byte*>(host);
  return Success;
}

CuResult copy(DevicePtr to, Expect to_what, DevicePtr from, Expect from_what, std::size_t bytes, Stream stream) {
  StreamRef where;
  if (const CuResult result = resolve_stream(stream, where)) return result;
  if (bytes == 0) return Success;
  Side target;
  Side source;
  const int physical = where->context->physical;
  if (const CuResult result = make_side(to, bytes, to_what, AccessReadWrite, physical, target)) return result;
  if (const CuResult result = make_side(from, bytes, from_what, AccessRead, physical, source)) return result;
  auto operation = std::make_unique<Copy>(target, source, bytes);
  const bool reads_pageable = source.pageable != nullptr;
  if (reads_pageable && bytes <= kStagingMax) operation->stage();
  if (target.pageable != nullptr || (reads_pageable && bytes > kStagingMax)) {
    return submit_and_wait(where, std::move(operation));
  }
  return submit(where, std::move(operation));
}

CuResult fill(DevicePtr to, std::uint32_t pattern, std::size_t width, std::size_t count, Stream stream) {
  StreamRef where;
  if (const CuResult result = resolve_stream(stream, where)) return result;
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, width, &bytes) || to % width != 0) return InvalidValue;
  if (bytes == 0) return Success;
  if (!AddressSpace::get().covers(to, bytes, AccessReadWrite, where->context->physical)) return InvalidValue;
  return submit(where, std::make_unique<Fill>(to, pattern, width, bytes));
}

DevicePtr address_of(const void* host) noexcept { return reinterpret_cast<std::uintptr_t>(host); }

} // namespace

namespace api {

CuResult cuMemcpyAsync(DevicePtr to, DevicePtr from, std::size_t bytes, Stream stream) {
  return copy(to, Expect::Any, from, Expect::Any, bytes, stream);
}

CuResult cuMemcpyHtoDAsync(DevicePtr to, const void* from, std::size_t bytes, Stream stream) {
  return copy(to, Expect::Device, address_of(from), Expect::Any, bytes, stream);
}

CuResult cuMemcpyDtoHAsync(void* to, DevicePtr from, std::size_t bytes, Stream stream) {
  return copy(address_of(to), Expect::Any, from, Expect::Device, bytes, stream);
}

CuResult cuMemcpyDtoDAsync(DevicePtr to, DevicePtr from, std::size_t bytes, Stream stream) {
  return copy(to, Expect::Device, from, Expect::Device, bytes, stream);
}

CuResult cuMemsetD8Async(DevicePtr to, unsigned char value, std::size_t bytes, Stream stream) {
  return fill(to, value * 0x01010101U, 1, bytes, stream);
}

CuResult cuMemsetD32Async(DevicePtr to, unsigned value, std::size_t words, Stream stream) {
  return fill(to, value, 4, words, stream);
}

} // namespace api
} // namespace gpuloan::sim
