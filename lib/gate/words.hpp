// SPDX-License-Identifier: MIT
//
// Control words: the shared page through which one side tells the other's GPU or CPU that a turn is ready or done.
//
// One memfd per peer, made by the exporter with all slots, mapped by both, then sealed so that neither side can replace
// a page under the other (S14). Each loan owns one slot while it is out. A word is (generation << 32 | turn); it only
// orders streams. Whatever it says, memory moves on ACK or contract rule 5 alone, so a peer that scribbles here can only
// spoil its own data.
#pragma once

#include <base/mapping.hpp>
#include <driver/handles.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

namespace gpuloan::gate {

struct alignas(64) Line { // a cache line, which one side looks at and the other one, or its device, writes
  std::uint64_t word;
  std::uint64_t watched; // it looks all the time: whoever stores the word owes no record
  std::uint64_t reserved[6];
};
struct Slot { // see docs/protocol.md
  Line ready, done;
};
static_assert(sizeof(Slot) == 128);

enum class Word { Ready, Done };

[[nodiscard]] constexpr std::uint64_t word_value(std::uint32_t generation, std::uint32_t turn) noexcept {
  return (std::uint64_t{generation} << 32) | turn;
}
// Cyclic, as the driver's GEQ: also true for every later value.
[[nodiscard]] constexpr bool reached(std::uint64_t word, std::uint64_t wanted) noexcept {
  return static_cast<std::int64_t>(word - wanted) >= 0;
}

class Words {
 public:
  Words() noexcept = default;
  // Exporter: makes the memfd; the descriptor is kept until sealed() (it has to be sent first).
  [[nodiscard]] static Result<Words> create(std::uint32_t slots);
  // Importer: maps what came; the descriptor is kept until it was found sealed.
  [[nodiscard]] static Result<Words> adopt(UniqueFd fd, std::uint64_t bytes, std::uint32_t slots);

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] Result<void> seal();       // exporter, after the peer mapped
  [[nodiscard]] Result<void> check_seal(); // importer
  // Registers the page with the device, once; any thread.
  [[nodiscard]] Result<void> register_with(const std::shared_ptr<driver::Gpu>& gpu);

  [[nodiscard]] std::uint32_t slots() const noexcept { return slots_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return mapping_ ? mapping_->size() : 0; }
  [[nodiscard]] explicit operator bool() const noexcept { return mapping_ != nullptr; }

  // Words and watches are stored and loaded in one order that both sides agree on. So, of a side that stores a word and then
  // finds it not watched, and one that ends its watch and then looks once more, one at least sees the other.
  [[nodiscard]] std::uint64_t load(std::uint32_t slot, Word word) const noexcept { return at(slot, word).load(std::memory_order_seq_cst); }
  void store(std::uint32_t slot, Word word, std::uint64_t value) const noexcept { at(slot, word).store(value, std::memory_order_seq_cst); }
  void watch(std::uint32_t slot, Word word, bool on) const noexcept { watch_at(slot, word).store(on ? 1 : 0, std::memory_order_seq_cst); }
  [[nodiscard]] bool watched(std::uint32_t slot, Word word) const noexcept { return watch_at(slot, word).load(std::memory_order_seq_cst) != 0; }
  // One word for who looks at it without the lock that guards these: its page stays mapped for as long.
  class Look {
   public:
    Look() noexcept = default;
    Look(std::shared_ptr<const Mapping> page, std::atomic_ref<std::uint64_t> word) noexcept : page_(std::move(page)), word_(word) {}
    [[nodiscard]] std::uint64_t load() const noexcept { return word_ ? word_->load(std::memory_order_acquire) : 0; }

   private:
    std::shared_ptr<const Mapping> page_;
    std::optional<std::atomic_ref<std::uint64_t>> word_;
  };
  [[nodiscard]] Look look(std::uint32_t slot, Word word) const noexcept { return mapping_ ? Look(mapping_, at(slot, word)) : Look(); }
  // The word's address for the device; valid after register_with.
  [[nodiscard]] cuda::DevicePtr device(std::uint32_t slot, Word word) const noexcept {
    return registration_.device_pointer() + std::uint64_t{slot} * sizeof(Slot) + (word == Word::Ready ? 0 : sizeof(Line));
  }
  [[nodiscard]] bool registered() const noexcept { return static_cast<bool>(registration_); }

 private:
  [[nodiscard]] Line& line(std::uint32_t slot, Word word) const noexcept {
    Slot& target = reinterpret_cast<Slot*>(mapping_->data())[slot];
    return word == Word::Ready ? target.ready : target.done;
  }
  [[nodiscard]] std::atomic_ref<std::uint64_t> at(std::uint32_t slot, Word word) const noexcept {
    return std::atomic_ref<std::uint64_t>(line(slot, word).word);
  }
  [[nodiscard]] std::atomic_ref<std::uint64_t> watch_at(std::uint32_t slot, Word word) const noexcept {
    return std::atomic_ref<std::uint64_t>(line(slot, word).watched);
  }
  UniqueFd fd_;
  std::shared_ptr<const Mapping> mapping_;
  driver::HostRegistration registration_; // before mapping_ goes
  std::uint32_t slots_ = 0;
};

} // namespace gpuloan::gate
