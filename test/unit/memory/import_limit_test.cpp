// SPDX-License-Identifier: MIT
//
// The import limit that is kept between runs: found again, and not believed where anything about its file is odd.
#include <doctest/doctest.h>

#include <base/log.hpp>
#include <memory/import_limit.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

using namespace gpuloan;
using namespace gpuloan::memory;

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// A cache folder and a log of its own.
class Home {
 public:
  Home() {
    std::string pattern = "/tmp/gpuloan-limit-XXXXXX";
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    folder = pattern;
    ::setenv("XDG_CACHE_HOME", folder.c_str(), 1);
    log_set([](void* user, gpuloan_log_level, const char* line) { static_cast<Home*>(user)->lines.emplace_back(line); }, this, GPULOAN_LOG_WARNING);
    driver = *driver::Driver::open(nullptr);
    floors = *driver::probe_floors(*driver, 0);
    path = folder / "gpuloan" / import_limit_name(floors);
  }
  Home(const Home&) = delete;
  Home& operator=(const Home&) = delete;
  ~Home() {
    log_set(nullptr, nullptr, GPULOAN_LOG_OFF);
    std::filesystem::remove_all(folder);
  }
  [[nodiscard]] ImportLimit find() {
    lines.clear();
    return find_import_limit(*driver, floors);
  }
  void put(const std::string& text) const {
    std::filesystem::remove_all(path);
    std::ofstream(path) << text;
    REQUIRE(::chmod(path.c_str(), 0600) == 0);
  }
  // Not believed, and that is said once.
  void refused(const char* why) {
    CAPTURE(why);
    const ImportLimit limit = find();
    CHECK(limit.bytes == kImportLimitDefault);
    CHECK(limit.source == GPULOAN_LIMIT_DEFAULT);
    REQUIRE(lines.size() == 1);
    CHECK(lines[0].find(path.string()) != std::string::npos);
    CHECK(lines[0].find(why) != std::string::npos);
  }

  std::filesystem::path folder, path;
  std::vector<std::string> lines;
  std::shared_ptr<const driver::Driver> driver;
  driver::Floors floors;
};

} // namespace

// What an H200 with driver 580.159.04 answered: base within a piece of 32 MiB, size, and whether the importer survived.
TEST_CASE("what an importer survives") {
  struct Row {
    std::uint64_t base_mib, mib;
    bool survives;
  };
  constexpr Row kRows[] = {{0, 5247, true}, {0, 5248, true}, {0, 5250, false}, {0, 6000, false}, {1, 5247, true},
                           {1, 5248, false}, {2, 5247, false}, {29, 5247, false}, {31, 5217, true}, {31, 5218, false},
                           {16, 5232, true}, {16, 5233, false}, {16, 2000, true}, {0, 1, true}};
  for (const Row& row : kRows) {
    CAPTURE(row.base_mib);
    CAPTURE(row.mib);
    CHECK(importable((4096 * kMiB) + row.base_mib * kMiB, row.mib * kMiB, kImportLimitDefault) == row.survives);
  }
  CHECK(import_pieces(0, 1) == 1);
  CHECK(import_pieces(32 * kMiB - 1, 2) == 2);
  CHECK_FALSE(importable(0, 5 * kMiB, 4 * kMiB)); // also where the limit is less than a piece
}

TEST_CASE("without a file the default is taken, silently") {
  Home home;
  const ImportLimit limit = home.find();
  CHECK(limit.bytes == 5248 * kMiB);
  CHECK(limit.source == GPULOAN_LIMIT_DEFAULT);
  CHECK(home.lines.empty());
  ::setenv("XDG_CACHE_HOME", "relative/path", 1);
  ::setenv("HOME", "", 1);
  CHECK(home.find().source == GPULOAN_LIMIT_DEFAULT);
  CHECK(home.lines.empty());
  CHECK(remember_import_limit(*home.driver, home.floors, 64 * kMiB).error().status == GPULOAN_ERR_SYSTEM);
}

TEST_CASE("what was measured is found again, in a private file that says what it is") {
  Home home;
  const auto kept = remember_import_limit(*home.driver, home.floors, 4097 * kMiB + 5);
  REQUIRE(kept);
  CHECK(*kept == home.path.string());
  const ImportLimit limit = home.find();
  CHECK(limit.bytes == 4096 * kMiB); // down to 2 MiB
  CHECK(limit.source == GPULOAN_LIMIT_MEASURED);
  CHECK(home.lines.empty());
  struct stat info = {};
  REQUIRE(::stat(kept->c_str(), &info) == 0);
  CHECK((info.st_mode & 07777) == 0600);
  REQUIRE(::stat((home.folder / "gpuloan").c_str(), &info) == 0);
  CHECK((info.st_mode & 07777) == 0700);
  std::ifstream file(*kept);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  CHECK(text.find("\nlimit 4096 MiB\n") != std::string::npos);
  CHECK(text.find(" libgpuloan-sim.so") != std::string::npos);
  REQUIRE(remember_import_limit(*home.driver, home.floors, 6 * kMiB)); // in the old one's place
  CHECK(home.find().bytes == 6 * kMiB);
  CHECK(std::distance(std::filesystem::directory_iterator(home.folder / "gpuloan"), {}) == 1);
}

TEST_CASE("a limit that cannot be is not kept") {
  Home home;
  for (const std::uint64_t bytes : {std::uint64_t{1}, 2 * kMiB - 1, home.floors.total_bytes + 2 * kMiB, UINT64_MAX}) {
    CAPTURE(bytes);
    CHECK(remember_import_limit(*home.driver, home.floors, bytes).error().status == GPULOAN_ERR_INVALID);
  }
  CHECK(!std::filesystem::exists(home.path));
}

TEST_CASE("that nothing can be imported takes the place of a larger limit") {
  Home home;
  REQUIRE(remember_import_limit(*home.driver, home.floors, 4096 * kMiB));
  REQUIRE(remember_import_limit(*home.driver, home.floors, 0));
  const ImportLimit limit = home.find();
  CHECK(limit.bytes == 0);
  CHECK(limit.source == GPULOAN_LIMIT_MEASURED);
  CHECK(home.lines.empty());
  std::ifstream file(home.path);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  CHECK(text.find("\nlimit none\n") != std::string::npos);
}

TEST_CASE("every cut and every changed byte of the file is noticed") {
  Home home;
  REQUIRE(remember_import_limit(*home.driver, home.floors, 4096 * kMiB));
  const std::string good = import_limit_text(*home.driver, home.floors, 4096 * kMiB);
  for (std::size_t length = 0; length < good.size(); ++length) {
    CAPTURE(length);
    home.put(good.substr(0, length));
    CHECK(home.find().source == GPULOAN_LIMIT_DEFAULT);
    CHECK(home.lines.size() == 1);
  }
  const std::size_t digits = good.find("4096");
  for (std::size_t at = 0; at < good.size(); ++at) {
    if (at >= digits && at < digits + 4) continue; // another number is another limit
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    home.put(bad);
    CAPTURE(at);
    CHECK(home.find().source == GPULOAN_LIMIT_DEFAULT);
  }
  home.put(good + "more\n");
  home.refused("damaged");
  home.put(std::string(100'000, '\n'));
  home.refused("longer");
}

TEST_CASE("a limit of another device, another driver, or out of range is not used") {
  Home home;
  REQUIRE(remember_import_limit(*home.driver, home.floors, 4096 * kMiB));
  const std::string good = import_limit_text(*home.driver, home.floors, 4096 * kMiB);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  driver::Floors other = home.floors;
  other.uuid.bytes[15] ^= 1;
  home.put(import_limit_text(*home.driver, other, 4096 * kMiB));
  home.refused("damaged, or was made for another driver");
  home.put(replaced("libgpuloan-sim.so", "libcuda.so.570.86.15"));
  home.refused("another driver than 13000 libgpuloan-sim.so");
  home.put(replaced("driver 13000", "driver 12080"));
  home.refused("another driver");
  for (const char* limit : {"0", "1", "4095", "-2", "04096", "16777216", "99999999999999999999"}) {
    home.put(replaced("limit 4096", std::string("limit ") + limit));
    home.refused("damaged");
  }
  home.put(good);
  CHECK(home.find().source == GPULOAN_LIMIT_MEASURED);
}

TEST_CASE("a file that is not private, or no file, is not used") {
  Home home;
  REQUIRE(remember_import_limit(*home.driver, home.floors, 4096 * kMiB));
  for (const ::mode_t mode : {0604U, 0640U, 0602U}) {
    REQUIRE(::chmod(home.path.c_str(), mode) == 0);
    home.refused("mode 0600");
  }
  REQUIRE(::chmod(home.path.c_str(), 0600) == 0);
  CHECK(home.find().source == GPULOAN_LIMIT_MEASURED);
  std::filesystem::rename(home.path, home.folder / "elsewhere");
  std::filesystem::create_symlink(home.folder / "elsewhere", home.path);
  home.refused("open");
  std::filesystem::remove(home.path);
  REQUIRE(::mkfifo(home.path.c_str(), 0600) == 0);
  home.refused("not a regular file");
  std::filesystem::remove(home.path);
  std::filesystem::create_directory(home.path);
  home.refused("not a regular file");
}
