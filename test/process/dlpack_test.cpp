// SPDX-License-Identifier: MIT
//
// Deleters of DLPack tensors: what is deleted by many threads is given to the taker once each, and the interpreter is entered where it may be.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <gpuloan/gpuloan.h>

#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Managed {
  unsigned char tensor[48];
  void* manager_ctx;
  void* deleter;
};
struct Versioned {
  std::uint32_t major, minor;
  void* manager_ctx;
  void* deleter;
  std::uint64_t flags;
  unsigned char tensor[48];
};
struct Capsule {
  std::string name;
  void* pointer;
};

// A stand-in for the interpreter.
std::atomic<int> has_lock, asked, taken;
std::atomic<bool> raises, full;
int exception_object;

int take_all(void*) {
  ++taken;
  return 0;
}

gpuloan_dlpack_python stand_in() {
  gpuloan_dlpack_python calls = {};
  calls.size = sizeof calls;
  calls.holds_lock = [] { return has_lock.load(); };
  calls.exception = []() -> void* { return raises ? &exception_object : nullptr; };
  calls.call_soon = [](int (*function)(void*), void*) {
    CHECK((function == take_all));
    ++asked;
    return full ? -1 : 0;
  };
  calls.capsule_is_valid = [](void* capsule, const char* name) -> int { return static_cast<Capsule*>(capsule)->name == name; };
  calls.capsule_pointer = [](void* capsule, const char*) { return static_cast<Capsule*>(capsule)->pointer; };
  calls.take_all = take_all;
  return calls;
}

struct Interpreter {
  Interpreter() {
    has_lock = asked = taken = 0;
    raises = full = false;
    const auto calls = stand_in();
    REQUIRE(gpuloan_dlpack_python_set(&calls) == GPULOAN_OK);
  }
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  ~Interpreter() {
    gpuloan_dlpack_python_set(nullptr);
    gpuloan_dlpack_take();
  }
};

} // namespace

TEST_CASE("a function that is missing is refused") {
  auto calls = stand_in();
  calls.take_all = nullptr;
  CHECK(gpuloan_dlpack_python_set(&calls) == GPULOAN_ERR_INVALID);
  calls = stand_in();
  calls.size = 0;
  CHECK(gpuloan_dlpack_python_set(&calls) == GPULOAN_ERR_INVALID);
}

TEST_CASE("what many threads delete is taken once each") {
  const Interpreter python;
  constexpr int kThreads = 4, kEach = 2000;
  std::vector<Managed> managed(kThreads * kEach);
  std::set<void*> seen;
  const auto take = [&] {
    for (void* next = gpuloan_dlpack_take(); next != nullptr; next = static_cast<Managed*>(next)->manager_ctx) CHECK(seen.insert(next).second);
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kEach; ++i) gpuloan_dlpack_delete(&managed[static_cast<std::size_t>(thread * kEach + i)]);
    });
  }
  for (int i = 0; i < 1000; ++i) take();
  for (auto& thread : threads) thread.join();
  take();
  CHECK(seen.size() == managed.size());
  CHECK(asked > 0);
}

TEST_CASE("the interpreter is entered where it may be, else asked once") {
  const Interpreter python;
  Managed one = {}, two = {};
  Versioned three = {};
  gpuloan_dlpack_delete(nullptr);
  gpuloan_dlpack_delete(&one); // without the lock
  CHECK((taken == 0 && asked == 1));
  has_lock = 1;
  raises = true; // with the lock, and an exception under way
  gpuloan_dlpack_delete(&two);
  CHECK((taken == 0 && asked == 1)); // it knows
  raises = false;
  gpuloan_dlpack_delete_versioned(&three);
  CHECK((taken == 1 && asked == 1));
  CHECK(gpuloan_dlpack_take() == &three);
  CHECK((three.manager_ctx == &two && two.manager_ctx == &one && one.manager_ctx == nullptr));
  CHECK(gpuloan_dlpack_take() == nullptr);
  has_lock = 0;
  full = true;
  gpuloan_dlpack_delete(&one);
  gpuloan_dlpack_delete(&two);
  CHECK(asked == 3); // the first was in vain
}

TEST_CASE("a capsule that nobody consumed is deleted with its tensor") {
  const Interpreter python;
  Managed plain = {};
  Versioned versioned = {};
  for (Capsule capsule : {Capsule{"used_dltensor", &plain}, Capsule{"other", &plain}}) gpuloan_dlpack_capsule_free(&capsule);
  CHECK(gpuloan_dlpack_take() == nullptr);
  Capsule capsule = {"dltensor", &plain};
  gpuloan_dlpack_capsule_free(&capsule);
  CHECK(gpuloan_dlpack_take() == &plain);
  capsule = {"dltensor_versioned", &versioned};
  gpuloan_dlpack_capsule_free(&capsule);
  CHECK(gpuloan_dlpack_take() == &versioned);
  gpuloan_dlpack_python_set(nullptr); // the interpreter has ended
  gpuloan_dlpack_capsule_free(&capsule);
  gpuloan_dlpack_delete(&plain);
  CHECK(gpuloan_dlpack_take() == &plain);
  CHECK((asked == 2 && taken == 0));
}
