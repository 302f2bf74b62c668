// SPDX-License-Identifier: MIT
//
// Three counters under one lock. A charge is checked against their sum, so bytes that a crashed worker left behind count
// against the next worker of the same slot. An Account lives as long as something that charged it holds it.
#include <memory/account.hpp>

#include <cassert>

namespace gpuloan::memory {
namespace {

std::string limit_text(const std::string& name, std::uint64_t limit, std::uint64_t asked) {
  return "account \"" + name + "\": " + std::to_string(asked) + " more bytes would pass its limit of " +
         std::to_string(limit);
}

} // namespace

std::uint64_t& Account::counter(Kind kind) noexcept {
  return kind == Kind::Chunk ? chunk_ : kind == Kind::Retired ? retired_ : surrendered_;
}

Result<void> Account::charge(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t total = chunk_ + retired_ + surrendered_;
  const std::uint64_t limit = limit_ == 0 ? UINT64_MAX : limit_;
  if (bytes > limit || total > limit - bytes) {
    return fail(GPULOAN_ERR_LIMIT, limit_text(name_, limit, bytes) + ": " + std::to_string(chunk_) +
                                       " bytes in chunks, " + std::to_string(retired_) +
                                       " in retired chunks whose regions still live, " + std::to_string(surrendered_) +
                                       " given up but maybe still mapped by a lost worker");
  }
  chunk_ += bytes;
  return {};
}

void Account::move(Kind from, Kind to, std::uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  assert(counter(from) >= bytes);
  counter(from) -= bytes;
  counter(to) += bytes;
}

void Account::credit(Kind kind, std::uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  assert(counter(kind) >= bytes);
  counter(kind) -= bytes;
}

std::uint64_t Account::pinned() const noexcept {
  const std::lock_guard lock(mutex_);
  return chunk_ + retired_ + surrendered_;
}

std::shared_ptr<Account> Accounts::get(const std::string& name) {
  const std::lock_guard lock(mutex_);
  // Names come from the caller without end (one per job, say): forget those that nothing is charged to.
  std::erase_if(accounts_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Account>& known = accounts_[name];
  std::shared_ptr<Account> account = known.lock();
  if (account == nullptr) {
    account = std::make_shared<Account>(name, limit_);
    known = account;
  }
  return account;
}

} // namespace gpuloan::memory
