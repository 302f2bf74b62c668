// SPDX-License-Identifier: MIT
#include <sim/state_file.hpp>
#include <sim/witness.hpp>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <unistd.h>

namespace gpuloan::sim {
namespace {

std::atomic_ref<std::uint64_t> shared(std::uint64_t& word) noexcept { return std::atomic_ref(word); }

struct Piece {
  FileIdentity file;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// An entry as it was at one moment; bytes are 0 where there is no claim, or none that can be read.
struct Claim {
  std::uint64_t sequence = 0, bytes = 0, dev = 0, ino = 0, offset = 0, writers = 0, reader = 0, owner = 0, note = 0;
  [[nodiscard]] std::uint32_t writer() const noexcept { return static_cast<std::uint32_t>(writers >> 32); }
  [[nodiscard]] std::uint32_t second_writer() const noexcept { return static_cast<std::uint32_t>(writers); }
};

Claim look(ClaimEntry& entry) noexcept {
  for (int attempt = 0; attempt < 64; ++attempt) {
    Claim seen;
    seen.sequence = shared(entry.sequence).load(std::memory_order_acquire);
    if (seen.sequence % 2 != 0) continue;
    seen.bytes = shared(entry.bytes).load(std::memory_order_acquire);
    seen.dev = shared(entry.dev).load(std::memory_order_acquire);
    seen.ino = shared(entry.ino).load(std::memory_order_acquire);
    seen.offset = shared(entry.offset).load(std::memory_order_acquire);
    seen.writers = shared(entry.writers).load(std::memory_order_acquire);
    seen.reader = shared(entry.reader).load(std::memory_order_acquire);
    seen.owner = shared(entry.owner).load(std::memory_order_acquire);
    seen.note = shared(entry.note).load(std::memory_order_acquire);
    if (shared(entry.sequence).load(std::memory_order_acquire) == seen.sequence) return seen;
  }
  return {};
}

// Replaces what was seen; false when somebody else was quicker.
bool change(ClaimEntry& entry, const Claim& seen, const Claim& wanted) noexcept {
  std::uint64_t sequence = seen.sequence;
  if (!shared(entry.sequence).compare_exchange_strong(sequence, sequence + 1)) return false;
  shared(entry.bytes).store(wanted.bytes);
  shared(entry.dev).store(wanted.dev);
  shared(entry.ino).store(wanted.ino);
  shared(entry.offset).store(wanted.offset);
  shared(entry.writers).store(wanted.writers);
  shared(entry.reader).store(wanted.reader);
  shared(entry.owner).store(wanted.owner);
  shared(entry.note).store(wanted.note);
  shared(entry.sequence).store(sequence + 2);
  return true;
}

bool overlaps(const Claim& claim, const Piece& piece) noexcept {
  return claim.bytes != 0 && claim.ino == piece.file.ino && claim.dev == piece.file.dev && claim.offset < piece.offset + piece.bytes &&
         piece.offset < claim.offset + claim.bytes;
}

bool same(const Claim& claim, const Piece& piece) noexcept {
  return overlaps(claim, piece) && claim.offset == piece.offset && claim.bytes == piece.bytes;
}

bool allowed(const Claim& claim, Touch touch, std::uint32_t process) noexcept {
  const auto names = [process](std::uint64_t who) { return who == process || who == kAnybody; };
  return names(claim.writer()) || names(claim.second_writer()) || (touch == Touch::Read && names(claim.reader));
}

void report(const Claim& claim, const Piece& piece, Touch touch, std::uint32_t process) noexcept {
  StateLayout& layout = StateFile::get().layout();
  const std::uint64_t index = shared(layout.witness_reports).fetch_add(1);
  if (index >= kMaxWitnessReports) return;
  char (&text)[kWitnessText] = layout.witness_text[index];
  std::snprintf(text, sizeof text,
                "process %u %s [%llu, +%llu) of chunk %llu, of which process %llu had claimed [%llu, +%llu) for writers %u and %u, reader %llu (note %llu)",
                process, touch == Touch::Write ? "wrote" : "read", static_cast<unsigned long long>(piece.offset),
                static_cast<unsigned long long>(piece.bytes), static_cast<unsigned long long>(piece.file.ino),
                static_cast<unsigned long long>(claim.owner), static_cast<unsigned long long>(claim.offset),
                static_cast<unsigned long long>(claim.bytes), claim.writer(), claim.second_writer(), static_cast<unsigned long long>(claim.reader),
                static_cast<unsigned long long>(claim.note));
}

void judge(const Piece& piece, Touch touch, std::uint32_t process) noexcept {
  StateLayout& layout = StateFile::get().layout();
  const std::uint64_t limit = std::min<std::uint64_t>(shared(layout.claim_limit).load(std::memory_order_acquire), kMaxClaims);
  for (std::uint64_t index = 0; index < limit; ++index) {
    const Claim claim = look(layout.claims[index]);
    if (overlaps(claim, piece) && !allowed(claim, touch, process)) report(claim, piece, touch, process);
  }
}

// What lies at an address of this process, if it is device memory of one chunk.
bool find_piece(DevicePtr start, std::size_t bytes, Piece& out) noexcept {
  std::size_t offset = 0;
  const std::shared_ptr<Chunk> chunk = AddressSpace::get().chunk_behind(start, bytes, offset);
  if (chunk) out = {chunk->file(), offset, bytes};
  return chunk != nullptr;
}

} // namespace

void witness(const Pin& pin, std::size_t bytes, Touch touch) noexcept {
  const Chunk* chunk = pin.chunk();
  if (chunk == nullptr || shared(StateFile::get().layout().claim_limit).load(std::memory_order_relaxed) == 0) return;
  witness(*chunk, static_cast<std::size_t>(pin.data() - chunk->data()), bytes, touch, static_cast<std::uint32_t>(::getpid()));
}

void witness(const Chunk& chunk, std::size_t offset, std::size_t bytes, Touch touch, std::uint32_t process) noexcept {
  judge({chunk.file(), offset, bytes}, touch, process);
}

CuResult claim(DevicePtr start, std::size_t bytes, const Rights& rights, std::uint64_t note) noexcept {
  Piece piece;
  if (!find_piece(start, bytes, piece)) return InvalidValue;
  StateLayout& layout = StateFile::get().layout();
  const std::uint64_t writers = std::uint64_t{rights.writer} << 32 | rights.second_writer;
  const Claim wanted{0, bytes, piece.file.dev, piece.file.ino, piece.offset, writers, rights.reader, static_cast<std::uint64_t>(::getpid()), note};
  const std::uint64_t limit = std::min<std::uint64_t>(shared(layout.claim_limit).load(), kMaxClaims);
  for (std::uint64_t index = 0; index < limit; ++index) {
    const Claim seen = look(layout.claims[index]);
    if (same(seen, piece) && seen.owner == wanted.owner) return change(layout.claims[index], seen, wanted) ? Success : InvalidValue;
    if (overlaps(seen, piece)) return InvalidValue;
  }
  for (std::uint64_t index = 0; index < kMaxClaims; ++index) {
    const Claim seen = look(layout.claims[index]);
    if (seen.bytes != 0 || !change(layout.claims[index], seen, wanted)) continue;
    for (std::uint64_t known = shared(layout.claim_limit).load(); known <= index;) {
      if (shared(layout.claim_limit).compare_exchange_weak(known, index + 1)) break;
    }
    return Success;
  }
  return OutOfMemory;
}

CuResult unclaim(DevicePtr start, std::size_t bytes) noexcept {
  Piece piece;
  if (!find_piece(start, bytes, piece)) return InvalidValue;
  const auto self = static_cast<std::uint64_t>(::getpid());
  for (ClaimEntry& entry : StateFile::get().layout().claims) {
    const Claim seen = look(entry);
    if (same(seen, piece) && seen.owner == self) return change(entry, seen, {}) ? Success : InvalidValue;
  }
  return InvalidValue;
}

void unclaim_all(std::uint32_t process) noexcept {
  for (ClaimEntry& entry : StateFile::get().layout().claims) {
    const Claim seen = look(entry);
    if (seen.bytes != 0 && seen.owner == process) static_cast<void>(change(entry, seen, {}));
  }
}

std::uint64_t witness_reports() noexcept { return shared(StateFile::get().layout().witness_reports).load(); }

std::string witness_report(std::uint64_t index) {
  if (index >= std::min<std::uint64_t>(witness_reports(), kMaxWitnessReports)) return {};
  return StateFile::get().layout().witness_text[index];
}

} // namespace gpuloan::sim
