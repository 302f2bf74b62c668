// SPDX-License-Identifier: MIT
//
// KeyRing: keys minted and not yet spent.
//
//   mint -> free -> claim -> claimed -> spend -> gone (remembered by a fingerprint, for a better sentence)
//                     ^---- give_back ----'
//
// One thread. Entries wipe their key when they are destroyed, also when the vector moves them. A search looks at every
// byte of every key, so its time says how many keys are out and nothing else.
#include <channel/handshake.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/random.h>

namespace gpuloan::channel {
namespace {

constexpr std::size_t kAccountMax = 63;

// 0 when equal. The accumulator is volatile so that no compiler turns the loop into one that stops early.
unsigned difference(const unsigned char (&a)[GPULOAN_KEY_BYTES], const unsigned char (&b)[GPULOAN_KEY_BYTES]) noexcept {
  volatile unsigned char sum = 0;
  for (std::size_t i = 0; i < GPULOAN_KEY_BYTES; ++i) sum = static_cast<unsigned char>(sum | (a[i] ^ b[i]));
  return sum;
}

// Never 0, which marks an empty place.
std::uint64_t fingerprint(const unsigned char (&key)[GPULOAN_KEY_BYTES]) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, key, sizeof(value));
  return value | 1U;
}

Result<void> fill_random(gpuloan_key& key) {
  std::size_t done = 0;
  while (done < sizeof(key.bytes)) {
    const ssize_t count = ::getrandom(key.bytes + done, sizeof(key.bytes) - done, 0);
    if (count > 0) {
      done += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      return fail_errno("getrandom", errno);
    }
  }
  return {};
}

} // namespace

KeyRing::Entry::~Entry() { ::explicit_bzero(&key, sizeof(key)); }

std::size_t KeyRing::find(const unsigned char (&key)[GPULOAN_KEY_BYTES]) const noexcept {
  std::size_t found = entries_.size();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (difference(entries_[i].key.bytes, key) == 0) found = i;
  }
  return found;
}

Result<gpuloan_key> KeyRing::mint(std::string_view account) {
  if (account.size() > kAccountMax) {
    return fail(GPULOAN_ERR_INVALID, "the account name has " + std::to_string(account.size()) + " bytes, the limit is " +
                                         std::to_string(kAccountMax));
  }
  if (entries_.size() >= kMaxKeys) {
    return fail(GPULOAN_ERR_LIMIT, std::to_string(kMaxKeys) + " keys are out and not spent: start their workers first");
  }
  Entry entry;
  entry.account = account;
  GPULOAN_TRY(fill_random(entry.key));
  entries_.push_back(std::move(entry));
  return entries_.back().key;
}

Result<std::string> KeyRing::claim(const unsigned char (&key)[GPULOAN_KEY_BYTES]) {
  const std::size_t at = find(key);
  if (at < entries_.size()) {
    Entry& entry = entries_[at];
    if (entry.claimed) return fail(GPULOAN_ERR_KEY, "the key is in use by another connection");
    entry.claimed = true;
    return entry.account;
  }
  if (std::find(spent_.begin(), spent_.end(), fingerprint(key)) != spent_.end()) {
    return fail(GPULOAN_ERR_KEY, "the key was used before: one key starts one peer, mint another");
  }
  return fail(GPULOAN_ERR_KEY, "the key is unknown to this exporter");
}

void KeyRing::give_back(const unsigned char (&key)[GPULOAN_KEY_BYTES]) noexcept {
  const std::size_t at = find(key);
  if (at < entries_.size()) entries_[at].claimed = false;
}

void KeyRing::spend(const unsigned char (&key)[GPULOAN_KEY_BYTES]) noexcept {
  const std::size_t at = find(key);
  if (at == entries_.size()) return;
  spent_[spent_next_] = fingerprint(key);
  spent_next_ = (spent_next_ + 1) % spent_.size();
  if (at + 1 != entries_.size()) entries_[at] = std::move(entries_.back());
  entries_.pop_back();
}

std::size_t KeyRing::outstanding() const noexcept { return entries_.size(); }

} // namespace gpuloan::channel
