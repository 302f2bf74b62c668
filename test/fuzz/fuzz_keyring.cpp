// SPDX-License-Identifier: MIT
//
// Keys minted, claimed, given back and spent in any order, against a list of what became of each; with keys in between that
// are wrong by one bit or were never minted.
#include "fuzz.hpp"

#include <channel/handshake.hpp>

#include <algorithm>
#include <vector>

using namespace gpuloan;

namespace {

struct Minted {
  gpuloan_key key = {};
  std::string account;
  enum class State { Free, Claimed, Spent } state = State::Free;
};

class Run {
 public:
  void mint(const std::string& account) {
    const auto key = ring_.mint(account);
    FUZZ_REQUIRE(key.has_value() == (account.size() <= 63));
    if (!key) {
      FUZZ_REQUIRE(key.error().status == GPULOAN_ERR_INVALID);
      return;
    }
    for (const Minted& other : minted_) FUZZ_REQUIRE(std::memcmp(other.key.bytes, key->bytes, sizeof key->bytes) != 0);
    minted_.push_back({*key, account, Minted::State::Free});
  }
  void claim(std::size_t which) {
    Minted& minted = minted_[which];
    const auto account = ring_.claim(minted.key.bytes);
    FUZZ_REQUIRE(account.has_value() == (minted.state == Minted::State::Free));
    if (account) {
      FUZZ_REQUIRE(*account == minted.account);
      minted.state = Minted::State::Claimed;
      return;
    }
    FUZZ_REQUIRE(account.error().status == GPULOAN_ERR_KEY);
    const char* why = minted.state == Minted::State::Claimed ? "in use" : "used before";
    FUZZ_REQUIRE(account.error().text.find(why) != std::string::npos);
  }
  void give_back(std::size_t which) {
    ring_.give_back(minted_[which].key.bytes);
    if (minted_[which].state == Minted::State::Claimed) minted_[which].state = Minted::State::Free;
  }
  void spend(std::size_t which) {
    ring_.spend(minted_[which].key.bytes);
    minted_[which].state = Minted::State::Spent;
  }
  void claim_wrong(std::size_t which, unsigned bit) {
    gpuloan_key key = minted_[which].key;
    key.bytes[bit / 8 % sizeof key.bytes] ^= static_cast<unsigned char>(1U << bit % 8);
    FUZZ_REQUIRE(!ring_.claim(key.bytes));
    ring_.give_back(key.bytes);
    ring_.spend(key.bytes);
  }
  void claim_unknown(std::span<const std::uint8_t> bytes) {
    gpuloan_key key = {};
    if (!bytes.empty()) std::memcpy(key.bytes, bytes.data(), std::min(bytes.size(), sizeof key.bytes));
    FUZZ_REQUIRE(!ring_.claim(key.bytes));
  }
  void check() const {
    const auto left = std::count_if(minted_.begin(), minted_.end(), [](const Minted& minted) { return minted.state != Minted::State::Spent; });
    FUZZ_REQUIRE(ring_.outstanding() == static_cast<std::size_t>(left));
  }
  [[nodiscard]] std::size_t count() const { return minted_.size(); }

 private:
  channel::KeyRing ring_;
  std::vector<Minted> minted_;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kMost = 200; // fewer than the spent keys that are remembered
  fuzz::Input input(data, size);
  Run run;
  while (!input.empty()) {
    const std::uint8_t operation = input.byte() % 8;
    if (operation < 2 || run.count() == 0) {
      if (run.count() < kMost) run.mint(input.text(input.byte() % 80U));
    } else if (operation == 7) {
      run.claim_unknown(input.bytes(input.byte() % 40U));
    } else {
      const std::size_t which = input.byte() % run.count();
      if (operation < 4) run.claim(which);
      else if (operation == 4) run.give_back(which);
      else if (operation == 5) run.spend(which);
      else run.claim_wrong(which, input.byte());
    }
    run.check();
  }
  return 0;
}
