// SPDX-License-Identifier: MIT
//
// What both sides of the script share: the fault, the notes of what failed, and the search for what stayed behind.
#pragma once

#include "interpose.hpp"
#include "plan.hpp"

#include <memory>

namespace fault {

using namespace loan_test;

inline constexpr std::uint32_t kStepMs = 6000;       // no step takes so long that goes well, nor one that fails
inline constexpr std::uint32_t kCanaryMs = 4000;
inline constexpr std::uint64_t kBytes = 100'003;
inline constexpr std::uint64_t kReadSeed = 1, kFirstSeed = 2, kSecondSeed = 3;

// A step did not succeed: the round is over.
struct Stopped {};

class SideBase {
 public:
  SideBase(const Plan& plan, Side side);
  SideBase(const SideBase&) = delete;
  SideBase& operator=(const SideBase&) = delete;

 protected:
  // The status of a call. Anything but OK is noted and ends the round; what no fault may lead to is a wrong.
  void step(gpuloan_status status, const char* what);
  void judge(gpuloan_status status, const char* what, const std::string& text);
  void wrong(const std::string& what);
  void make_context(gpuloan_role role);
  gpuloan_event next(gpuloan_event_type wanted, const char* what); // an event that ends the peer ends the round
  void same(std::uint64_t pointer, std::uint64_t seed, const char* what);
  template <typename Work>
  void own(Work work); // calls of the test's own, which the same fault may hit
  template <typename Play>
  bool round(Play play); // whether every step succeeded
  void begin();          // counts, and arms the fault of this side
  void first_over();     // whether the fault came in the first round
  void report_counts(const char* when);
  void finish(bool first, bool second); // prints the end
  void look_for_leaks(bool device);

  const Plan plan_;
  const Side side_;
  const bool mine_; // the fault is this side's
  std::unique_ptr<Gpu> gpu_;
  gpuloan_context* context_ = nullptr;
  bool fired_in_first_ = false;

 private:
  [[nodiscard]] bool fired() const;
  int index_ = -1;
  int wrongs_ = 0;
  bool own_failed_ = false;
  std::map<std::string, std::uint64_t> base_; // driver calls before the first round
  std::set<std::string> fds_;
  std::map<std::string, std::int64_t> live_;
  std::size_t maps_ = 0;
  std::uint64_t used_ = 0;
};

template <typename Work>
void SideBase::own(Work work) {
  try {
    work();
  } catch (const Failure& failure) {
    if (!mine_ || failure.text.find(" says ") == std::string::npos) throw;
    own_failed_ = true;
    std::printf("note %s own call: %s\n", mine_ ? "faulty" : "other", failure.text.c_str());
    throw Stopped();
  }
}

template <typename Play>
bool SideBase::round(Play play) {
  try {
    play();
    return true;
  } catch (const Stopped&) {
    return false;
  } catch (const Failure& failure) {
    wrong(failure.text);
    return false;
  }
}

} // namespace fault
