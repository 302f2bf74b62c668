// SPDX-License-Identifier: MIT
//
// KeyRing: each state of a key and each thing that can happen to it.
#include "support.hpp"

#include <channel/handshake.hpp>

#include <set>

using namespace gpuloan;
using namespace gpuloan::channel;

namespace {

gpuloan_key mint(KeyRing& ring, std::string_view account = "worker") {
  auto key = ring.mint(account);
  REQUIRE(key.has_value());
  return *key;
}

} // namespace

TEST_CASE("a key is claimed, given back, claimed again and spent") {
  KeyRing ring;
  const gpuloan_key key = mint(ring, "account 7");
  CHECK(ring.outstanding() == 1);
  auto account = ring.claim(key.bytes);
  REQUIRE(account.has_value());
  CHECK(*account == "account 7");
  ring.give_back(key.bytes);
  CHECK(ring.outstanding() == 1);
  CHECK(ring.claim(key.bytes).has_value());
  ring.spend(key.bytes);
  CHECK(ring.outstanding() == 0);
}

TEST_CASE("unknown, claimed and spent keys have three sentences") {
  KeyRing ring;
  const gpuloan_key key = mint(ring);
  gpuloan_key other = key;
  other.bytes[GPULOAN_KEY_BYTES - 1] ^= 1;
  check_fails(ring.claim(other.bytes), GPULOAN_ERR_KEY, "unknown");
  check_fails(ring.claim(gpuloan_key{}.bytes), GPULOAN_ERR_KEY, "unknown");
  REQUIRE(ring.claim(key.bytes).has_value());
  check_fails(ring.claim(key.bytes), GPULOAN_ERR_KEY, "in use by another connection");
  ring.spend(key.bytes);
  check_fails(ring.claim(key.bytes), GPULOAN_ERR_KEY, "used before");
}

TEST_CASE("a key that differs in any one byte is another key") {
  KeyRing ring;
  const gpuloan_key key = mint(ring);
  for (unsigned char bit = 1; bit != 0; bit = static_cast<unsigned char>(bit << 1)) {
    for (std::size_t i = 0; i < GPULOAN_KEY_BYTES; ++i) {
      gpuloan_key other = key;
      other.bytes[i] ^= bit;
      CHECK_FALSE(ring.claim(other.bytes).has_value());
    }
  }
  CHECK(ring.claim(key.bytes).has_value());
}

TEST_CASE("a spent key stays spent, and others are not touched") {
  KeyRing ring;
  std::vector<gpuloan_key> keys;
  for (int i = 0; i < 5; ++i) keys.push_back(mint(ring, std::to_string(i)));
  REQUIRE(ring.claim(keys[1].bytes).has_value());
  ring.spend(keys[1].bytes);
  ring.spend(keys[1].bytes);
  ring.give_back(keys[1].bytes);
  CHECK_FALSE(ring.claim(keys[1].bytes).has_value());
  CHECK(ring.outstanding() == 4);
  for (const std::size_t i : {0U, 2U, 3U, 4U}) {
    const auto account = ring.claim(keys[i].bytes);
    REQUIRE(account.has_value());
    CHECK(*account == std::to_string(i));
  }
}

TEST_CASE("giving back or spending what was never minted changes nothing") {
  KeyRing ring;
  const gpuloan_key key = mint(ring);
  ring.give_back(gpuloan_key{}.bytes);
  ring.spend(gpuloan_key{}.bytes);
  CHECK(ring.outstanding() == 1);
  CHECK(ring.claim(key.bytes).has_value());
}

TEST_CASE("keys differ") {
  KeyRing ring;
  std::set<std::vector<unsigned char>> seen;
  for (int i = 0; i < 200; ++i) {
    const gpuloan_key key = mint(ring);
    seen.emplace(std::begin(key.bytes), std::end(key.bytes));
  }
  CHECK(seen.size() == 200);
}

TEST_CASE("limits: the account's name and the number of keys") {
  KeyRing ring;
  CHECK(ring.mint("").has_value());
  CHECK(ring.mint(std::string(63, 'a')).has_value());
  check_fails(ring.mint(std::string(64, 'a')), GPULOAN_ERR_INVALID, "64 bytes, the limit is 63");
  while (ring.outstanding() < KeyRing::kMaxKeys) static_cast<void>(mint(ring));
  check_fails(ring.mint(""), GPULOAN_ERR_LIMIT, "4096");
  CHECK(ring.outstanding() == KeyRing::kMaxKeys);
}

TEST_CASE("spent keys are forgotten in time and are then unknown") {
  KeyRing ring;
  const gpuloan_key first = mint(ring);
  ring.spend(first.bytes);
  check_fails(ring.claim(first.bytes), GPULOAN_ERR_KEY, "used before");
  for (int i = 0; i < 1000; ++i) ring.spend(mint(ring).bytes);
  check_fails(ring.claim(first.bytes), GPULOAN_ERR_KEY, "unknown");
}
