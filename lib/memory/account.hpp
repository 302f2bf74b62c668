// SPDX-License-Identifier: MIT
//
// Account: what one worker slot pins in the exporter, over all processes that were ever started for it. Every chunk is
// charged before it is made; a chunk that was surrendered stays charged until its holders are proven gone.
#pragma once

#include <base/status.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace gpuloan::memory {

class Account {
 public:
  enum class Kind { Chunk, Retired, Surrendered };
  Account(std::string name, std::uint64_t limit) : name_(std::move(name)), limit_(limit) {} // limit 0: none

  // LIMIT names the account, its limit, what was asked for and how much is pinned in each kind.
  [[nodiscard]] Result<void> charge(std::uint64_t bytes);
  void move(Kind from, Kind to, std::uint64_t bytes) noexcept;
  void credit(Kind kind, std::uint64_t bytes) noexcept;
  [[nodiscard]] std::uint64_t pinned() const noexcept;
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

 private:
  [[nodiscard]] std::uint64_t& counter(Kind kind) noexcept;

  const std::string name_;
  const std::uint64_t limit_;
  mutable std::mutex mutex_;
  std::uint64_t chunk_ = 0, retired_ = 0, surrendered_ = 0;
};

// One Account per name, kept as long as anything is charged to it.
class Accounts {
 public:
  explicit Accounts(std::uint64_t limit) : limit_(limit) {}
  [[nodiscard]] std::shared_ptr<Account> get(const std::string& name);

 private:
  const std::uint64_t limit_;
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Account>> accounts_;
};

} // namespace gpuloan::memory
