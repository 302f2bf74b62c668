// SPDX-License-Identifier: MIT
//
// What an account counts, what it refuses and what it says then; that one name is one account while it is in use.
#include <doctest/doctest.h>

#include <memory/account.hpp>

#include <thread>
#include <vector>

using gpuloan::memory::Account;
using gpuloan::memory::Accounts;
using Kind = gpuloan::memory::Account::Kind;

TEST_CASE("a charge up to the limit passes, one byte more does not") {
  Account account("worker-1", 100);
  CHECK(account.charge(60));
  CHECK(account.charge(40));
  CHECK_FALSE(account.charge(1));
  CHECK(account.charge(0));
  account.credit(Kind::Chunk, 1);
  CHECK(account.charge(1));
  CHECK(account.pinned() == 100);
}

TEST_CASE("what a crash left behind counts against the next worker") {
  Account account("worker-1", 100);
  REQUIRE(account.charge(60));
  account.move(Kind::Chunk, Kind::Retired, 60);
  CHECK_FALSE(account.charge(50));
  account.move(Kind::Retired, Kind::Surrendered, 60);
  CHECK_FALSE(account.charge(50));
  account.credit(Kind::Surrendered, 60);
  CHECK(account.charge(100));
}

TEST_CASE("a refusal names the account, the limit and what pins it") {
  Account account("worker-7", 1000);
  REQUIRE(account.charge(100));
  REQUIRE(account.charge(20));
  REQUIRE(account.charge(3));
  account.move(Kind::Chunk, Kind::Retired, 20);
  account.move(Kind::Chunk, Kind::Surrendered, 3);
  const auto refused = account.charge(900);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().status == GPULOAN_ERR_LIMIT);
  for (const char* part : {"worker-7", "1000", "900", "100 bytes in chunks", "20 in retired", "3 given up"}) {
    CAPTURE(part);
    CHECK(refused.error().text.find(part) != std::string::npos);
  }
  CHECK(account.pinned() == 123);
}

TEST_CASE("sums never wrap") {
  Account account("a", 100);
  REQUIRE(account.charge(1));
  CHECK_FALSE(account.charge(UINT64_MAX));
  Account unlimited("b", 0);
  REQUIRE(unlimited.charge(UINT64_MAX));
  CHECK_FALSE(unlimited.charge(1));
  CHECK(unlimited.pinned() == UINT64_MAX);
}

TEST_CASE("one name is one account as long as somebody holds it") {
  Accounts accounts(100);
  auto first = accounts.get("a");
  REQUIRE(first->charge(80));
  CHECK(accounts.get("a") == first);
  CHECK(accounts.get("b") != first);
  first.reset();
  CHECK(accounts.get("a")->pinned() == 0);
  CHECK_FALSE(accounts.get("a")->charge(101));
}

TEST_CASE("threads that charge and credit never pass the limit") {
  Account account("a", 1000);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&account] {
      for (int round = 0; round < 2000; ++round) {
        if (account.charge(300)) account.credit(Kind::Chunk, 300);
      }
    });
  }
  for (int look = 0; look < 1000; ++look) CHECK(account.pinned() <= 1000);
  for (std::thread& thread : threads) thread.join();
  CHECK(account.pinned() == 0);
}
