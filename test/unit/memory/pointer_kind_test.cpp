// SPDX-License-Identifier: MIT
//
// What classify() makes of the simulated driver's answers, which are those of a real one (test/sim/answers, "kinds").
#include <doctest/doctest.h>

#include <memory/pointer_kind.hpp>

#include <array>
#include <cstdlib>
#include <optional>
#include <string>

using namespace gpuloan;
using memory::PointerInfo;
using memory::PointerKind;

namespace {

constexpr std::uint64_t kChunk = 2U << 20;

const std::shared_ptr<driver::Gpu>& gpu() {
  static const std::shared_ptr<driver::Gpu> opened = [] {
    ::setenv("GPULOAN_SIM_DEVICES", "2", 1);
    auto driver = driver::Driver::open("sim");
    if (!driver) FAIL(driver.error().text);
    auto made = driver::Gpu::open(*driver, 0);
    if (!made) FAIL(made.error().text);
    return *made;
  }();
  return opened;
}

const driver::Table& call() { return gpu()->driver().call; }

PointerInfo classified(std::uint64_t pointer, std::uint64_t bytes) {
  auto info = memory::classify(*gpu(), pointer, bytes);
  if (!info) FAIL(info.error().text);
  return *info;
}

// The sentence of the refusal; its status has to be INVALID.
std::string refused(std::uint64_t pointer, std::uint64_t bytes) {
  const auto info = memory::classify(*gpu(), pointer, bytes);
  REQUIRE_FALSE(info);
  CHECK(info.error().status == GPULOAN_ERR_INVALID);
  return info.error().text;
}

struct Block {
  explicit Block(std::size_t bytes) : scope(*gpu()) { REQUIRE(call().cuMemAlloc(&pointer, bytes) == cuda::Success); }
  ~Block() { call().cuMemFree(pointer); }
  driver::Gpu::Scope scope;
  cuda::DevicePtr pointer = 0;
};

// Four chunks' worth of addresses; each has memory with or without a handle, of the other device, or none.
enum class Chunk { None, Shareable, Private, Elsewhere };
struct Chunks {
  explicit Chunks(const std::array<Chunk, 4>& wanted) : scope(*gpu()), what(wanted) {
    REQUIRE(call().cuMemAddressReserve(&pointer, 4 * kChunk, 0, 0, 0) == cuda::Success);
    for (std::size_t index = 0; index < what.size(); ++index) {
      if (what[index] != Chunk::None) map(pointer + index * kChunk, what[index]);
    }
  }
  ~Chunks() {
    for (std::size_t index = 0; index < what.size(); ++index) {
      if (what[index] != Chunk::None) call().cuMemUnmap(pointer + index * kChunk, kChunk);
    }
    call().cuMemAddressFree(pointer, 4 * kChunk);
  }
  static void map(cuda::DevicePtr at, Chunk kind) {
    cuda::AllocationProp prop = {};
    prop.type = cuda::AllocationPinned;
    prop.requested_handle_types = kind == Chunk::Private ? cuda::HandleNone : cuda::HandlePosixFd;
    prop.location = {cuda::LocationDevice, kind == Chunk::Elsewhere ? 1 : 0};
    cuda::MemHandle handle = 0;
    REQUIRE(call().cuMemCreate(&handle, kChunk, &prop, 0) == cuda::Success);
    REQUIRE(call().cuMemMap(at, kChunk, 0, handle, 0) == cuda::Success);
    call().cuMemRelease(handle);
  }
  driver::Gpu::Scope scope;
  std::array<Chunk, 4> what;
  cuda::DevicePtr pointer = 0;
};
constexpr Chunk S = Chunk::Shareable, P = Chunk::Private, E = Chunk::Elsewhere, N = Chunk::None;

} // namespace

TEST_CASE("a cuMemAlloc block is one allocation, wherever the range lies in it") {
  const Block block(3 * kChunk + 5);
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{1}, kChunk, 3 * kChunk + 4}) {
    const PointerInfo info = classified(block.pointer + offset, 1);
    CHECK(info.kind == PointerKind::Alloc);
    CHECK(info.base == block.pointer);
    CHECK(info.bytes == 3 * kChunk + 5);
    CHECK(info.pieces == 1);
    CHECK(info.buffer_id == classified(block.pointer, 3 * kChunk + 5).buffer_id);
  }
}

TEST_CASE("a range that leaves its allocation is refused") {
  const Block block(1000);
  for (const auto& [offset, bytes] : {std::pair<std::uint64_t, std::uint64_t>{0, 1001}, {1, 1000}, {999, 2}, {0, UINT64_MAX}}) {
    CHECK(refused(block.pointer + offset, bytes).find("is no range of one device allocation") != std::string::npos);
  }
}

TEST_CASE("two blocks are two buffers, also at one address") {
  std::optional<Block> block(std::in_place, 1000);
  const PointerInfo first = classified(block->pointer, 1000);
  block.reset();
  block.emplace(1000);
  CHECK(classified(block->pointer, 1000).buffer_id != first.buffer_id);
}

TEST_CASE("VMM memory is told by its chunks") {
  const Chunks chunks({S, S, S, N});
  const PointerInfo one = classified(chunks.pointer + kChunk + 7, kChunk - 7);
  CHECK(one.kind == PointerKind::VmmShareable);
  CHECK(one.base == chunks.pointer + kChunk);
  CHECK(one.bytes == kChunk);
  CHECK(one.pieces == 1);
  const PointerInfo seam = classified(chunks.pointer + kChunk - 1, 2);
  CHECK(seam.base == chunks.pointer);
  CHECK(seam.bytes == 2 * kChunk);
  CHECK(seam.pieces == 2);
  const PointerInfo all = classified(chunks.pointer, 3 * kChunk);
  CHECK(all.pieces == 3);
  CHECK(all.bytes == 3 * kChunk);
}

TEST_CASE("a chunk without a handle makes the whole range private") {
  const Chunks chunks({S, P, S, N});
  CHECK(classified(chunks.pointer, kChunk).kind == PointerKind::VmmShareable);
  CHECK(classified(chunks.pointer + kChunk, 1).kind == PointerKind::VmmPrivate);
  const PointerInfo mixed = classified(chunks.pointer, 3 * kChunk);
  CHECK(mixed.kind == PointerKind::VmmPrivate);
  CHECK(mixed.pieces == 3);
}

// G4
TEST_CASE("memory of another device is refused") {
  const Chunks chunks({S, E, N, S});
  CHECK(classified(chunks.pointer, kChunk).kind == PointerKind::VmmShareable);
  for (const auto& [offset, bytes] : {std::pair<std::uint64_t, std::uint64_t>{kChunk, 1}, {0, kChunk + 1}}) {
    CHECK(refused(chunks.pointer + offset, bytes).find("is memory of device 1, the context works on device 0 (GPU-6770756c-") != std::string::npos);
  }
  auto other = driver::Gpu::open(*driver::Driver::open("sim"), 1, true);
  REQUIRE(other);
  cuda::DevicePtr pointer = 0;
  {
    const driver::Gpu::Scope scope(**other);
    REQUIRE(call().cuMemAlloc(&pointer, 1000) == cuda::Success);
  }
  CHECK(refused(pointer, 1000).find("is memory of device 1, ") != std::string::npos);
  CHECK(memory::classify(**other, pointer, 1000)->kind == PointerKind::Alloc);
  call().cuMemFree(pointer);
}

TEST_CASE("a gap in a mapping is refused, memory before and behind it is not") {
  const Chunks chunks({S, N, S, N});
  CHECK(refused(chunks.pointer, 3 * kChunk).find("has a gap in its mapping") != std::string::npos);
  CHECK(refused(chunks.pointer + kChunk - 1, 2).find("has a gap in its mapping") != std::string::npos);
  CHECK(refused(chunks.pointer + 3 * kChunk - 1, 2).find("has a gap in its mapping") != std::string::npos);
  CHECK(classified(chunks.pointer, kChunk).kind == PointerKind::VmmShareable);
  CHECK(classified(chunks.pointer + 2 * kChunk, kChunk).kind == PointerKind::VmmShareable);
}

TEST_CASE("addresses without memory are unknown") {
  const Chunks chunks({N, S, N, N});
  CHECK(classified(chunks.pointer, 1).kind == PointerKind::Unknown);
  CHECK(classified(chunks.pointer + 2 * kChunk, 1).kind == PointerKind::Unknown);
  int local = 0;
  CHECK(classified(reinterpret_cast<std::uintptr_t>(&local), sizeof local).kind == PointerKind::Unknown);
  CHECK(classified(64, 1).kind == PointerKind::Unknown);
}

TEST_CASE("retained chunks keep their memory when the owner unmaps it") {
  std::optional<Chunks> chunks(std::in_place, std::array{S, S, S, N});
  auto handles = memory::retain_chunks(gpu(), chunks->pointer + kChunk - 1, kChunk + 2);
  REQUIRE(handles);
  CHECK(handles->size() == 3);
  chunks.reset();
  for (const driver::VmmHandle& handle : *handles) {
    CHECK(handle.bytes() == kChunk);
    CHECK(handle.export_fd());
  }
}
