// SPDX-License-Identifier: MIT
//
// Which driver is opened, and what is said about one that cannot be used. Every case runs driver_show in a process of
// its own, on fake libraries (fake_libcuda.cpp); texts are checked by the words a reader acts on: path, number, remedy.
#include <doctest/doctest.h>

#include <gpuloan/gpuloan.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

namespace fs = std::filesystem;

namespace {

const std::string kFolder = FAKE_FOLDER; // of the fakes and of driver_show
const std::string kSim = SIM_LIBRARY;    // of the simulated driver, which need not be built

std::string fake(const std::string& name) { return kFolder + "/fake_" + name + ".so"; }

struct Shown {
  std::map<std::string, std::string> lines;
  std::vector<std::string> missing;
  [[nodiscard]] std::string operator[](const std::string& key) const {
    const auto found = lines.find(key);
    return found != lines.end() ? found->second : "";
  }
  [[nodiscard]] int status() const { return std::atoi((*this)["status"].c_str()); }
  [[nodiscard]] bool says(const std::string& words) const { return (*this)["text"].find(words) != std::string::npos; }
};

// `environment` as for env(1). The variables that the cases set are taken out first.
Shown show_with(const std::string& program, const std::string& environment, const std::string& arguments) {
  const std::string command = "env -u GPULOAN_DRIVER -u GPULOAN_SIM_LIBRARY -u LD_LIBRARY_PATH " + environment + " " +
                              program + " " + arguments;
  CAPTURE(command);
  FILE* pipe = ::popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Shown shown;
  char line[8192];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    std::string text = line;
    if (text.ends_with('\n')) text.pop_back();
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) continue;
    if (text.starts_with("missing=")) shown.missing.push_back(text.substr(equals + 1));
    shown.lines[text.substr(0, equals)] = text.substr(equals + 1);
  }
  CHECK(::pclose(pipe) == 0);
  INFO(shown["text"]);
  CHECK_FALSE(shown["status"].empty());
  return shown;
}

Shown show(const std::string& environment, const std::string& arguments) {
  return show_with(kFolder + "/driver_show", environment, arguments);
}

// A folder that goes away with the case.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/gpuloan-driver-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] std::string at(const std::string& name) const { return path_ + "/" + name; }
  [[nodiscard]] std::string in_library_path() const { return "LD_LIBRARY_PATH=" + path_; }

 private:
  std::string path_;
};

// Cases about a missing driver say nothing on a machine that has one.
bool machine_has_driver() {
  static const bool has = show("", "real").status() != GPULOAN_ERR_NO_DRIVER;
  return has;
}

} // namespace

// J4
TEST_CASE("a good library by path") {
  const Shown shown = show("", fake("full"));
  CHECK(shown.status() == GPULOAN_OK);
  CHECK(shown["version"] == "13000");
  CHECK(shown["simulated"] == "0");
  CHECK(shown["path"] == fake("full"));
  CHECK(shown["found_by"] == "caller's path");
  CHECK(shown["describe"] == "driver 13.0 at " + fake("full"));
  CHECK(shown.missing.empty());
  CHECK(shown["allowed"] == "1");
  CHECK(shown["allowed_at_exit"] == "0");
}

TEST_CASE("an error is in the driver's words, with number, path and remedy") {
  const std::string error = show("", fake("full"))["error"];
  CHECK(error.find("cuMemCreate: NAMED_BY_THE_DRIVER (2): words of the driver [driver 13.0 at " + fake("full") + "]") == 0);
  CHECK(error.find("free device memory") != std::string::npos);
}

TEST_CASE("the choice") {
  SUBCASE("by environment") { CHECK(show("GPULOAN_DRIVER=" + fake("full"), "-").status() == GPULOAN_OK); }
  SUBCASE("the argument wins") {
    CHECK(show("GPULOAN_DRIVER=" + fake("nothing"), fake("full")).status() == GPULOAN_OK);
  }
  SUBCASE("an unknown word") {
    const Shown shown = show("GPULOAN_DRIVER=nvidia", "-");
    CHECK(shown.status() == GPULOAN_ERR_INVALID);
    CHECK(shown.says("GPULOAN_DRIVER is \"nvidia\""));
    CHECK(shown.says("\"real\", \"sim\" or a path"));
  }
}

// J1
TEST_CASE("real: the library path, never the bare name libcuda.so") {
  const Folder folder;
  fs::create_symlink(fake("full"), folder.at("libcuda.so"));
  SUBCASE("libcuda.so.1 is there too") {
    fs::create_symlink(fake("sim"), folder.at("libcuda.so.1"));
    const Shown shown = show(folder.in_library_path() + " FAKE_INIT=0", "real");
    CHECK(shown.status() == GPULOAN_OK);
    CHECK(shown["path"] == fake("sim"));
    CHECK(shown["found_by"] == "libcuda.so.1");
    CHECK(shown["simulated"] == "1");
    CHECK(shown["describe"].find("simulated driver 13.0 at ") == 0);
  }
  SUBCASE("it is not") {
    if (machine_has_driver()) return;
    const Shown shown = show(folder.in_library_path(), "real");
    CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    CHECK(shown.says("libcuda.so.1"));
    CHECK(shown.says("install the NVIDIA driver"));
    CHECK(shown.says("GPULOAN_DRIVER=sim"));
  }
}

TEST_CASE("real: a libcuda that the process already has") {
  const Folder folder;
  fs::create_symlink(fake("sim"), folder.at("libcuda.so.1"));
  const Shown shown = show(folder.in_library_path(), "real preload=" + fake("full"));
  CHECK(shown.status() == GPULOAN_OK);
  CHECK(shown["path"] == fake("full"));
  CHECK(shown["found_by"] == "already loaded");
}

// J4
TEST_CASE("missing, dangling, broken") {
  const Folder folder;
  SUBCASE("missing path") {
    const Shown shown = show("", folder.at("none.so"));
    CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    CHECK(shown.says(folder.at("none.so")));
    CHECK(shown.says("No such file"));
  }
  SUBCASE("dangling path") {
    fs::create_symlink("/nowhere/libcuda.so.7", folder.at("libcuda.so.1"));
    const Shown shown = show("", folder.at("libcuda.so.1"));
    CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    CHECK(shown.says(folder.at("libcuda.so.1") + " is a dangling link to /nowhere/libcuda.so.7"));
  }
  SUBCASE("dangling in the library path") {
    if (machine_has_driver()) return;
    fs::create_symlink("/nowhere/libcuda.so.7", folder.at("libcuda.so.1"));
    const Shown shown = show(folder.in_library_path(), "real");
    CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    CHECK(shown.says("is a dangling link to /nowhere/libcuda.so.7"));
    CHECK(shown.says("install the driver again"));
  }
  SUBCASE("no library") {
    std::fclose(std::fopen(folder.at("text.so").c_str(), "w"));
    const Shown shown = show("", folder.at("text.so"));
    CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    CHECK(shown.says(folder.at("text.so")));
  }
  SUBCASE("a library that is no driver") {
    const Shown shown = show("", fake("nothing"));
    CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    CHECK(shown.says(fake("nothing") + " is no CUDA driver"));
  }
}

// J2, J3
TEST_CASE("cuInit fails") {
  struct Case {
    int code;
    gpuloan_status status;
    const char* words;
  };
  const Case cases[] = {
      {34, GPULOAN_ERR_STUB_DRIVER, "stub library"},
      {35, GPULOAN_ERR_OLD_DRIVER, "too old: install a newer one"},
      {36, GPULOAN_ERR_OLD_DRIVER, "too old: install a newer one"},
      {46, GPULOAN_ERR_DRIVER, "compute mode"},
      {100, GPULOAN_ERR_NO_DEVICE, "CUDA_VISIBLE_DEVICES"},
      {101, GPULOAN_ERR_NO_DEVICE, "MIG"},
      {304, GPULOAN_ERR_DRIVER, "permissions of /dev/nvidia"},
      {802, GPULOAN_ERR_DRIVER, "fabricmanager"},
      {803, GPULOAN_ERR_DRIVER_MISMATCH, "after a driver update reboot"},
      {804, GPULOAN_ERR_DRIVER_MISMATCH, "LD_LIBRARY_PATH"},
      {805, GPULOAN_ERR_DRIVER, "MPS"},
      {999, GPULOAN_ERR_DRIVER, "kernel log"},
  };
  for (const Case& row : cases) {
    CAPTURE(row.code);
    const Shown shown = show("FAKE_INIT=" + std::to_string(row.code), fake("full"));
    CHECK(shown.status() == row.status);
    CHECK(shown.says("cuInit: NAMED_BY_THE_DRIVER (" + std::to_string(row.code) + ")"));
    CHECK(shown.says("driver 13.0 at " + fake("full")));
    CHECK(shown.says(row.words));
  }
}

// J1
TEST_CASE("a stub answers every call with 34") {
  const Shown shown = show("FAKE_CODE=34", fake("full"));
  CHECK(shown.status() == GPULOAN_ERR_STUB_DRIVER);
  CHECK(shown.says("CUDA_ERROR_STUB_LIBRARY (34)"));
  CHECK(shown.says("[driver of unknown version at " + fake("full") + "]"));
  CHECK(shown.says("this is the CUDA toolkit's stub library"));
  SUBCASE("also an old one without today's symbols") {
    CHECK(show("FAKE_CODE=34", fake("bare")).status() == GPULOAN_ERR_STUB_DRIVER);
  }
}

// J3
TEST_CASE("a compat library is recognised by its folder") {
  const Folder folder;
  fs::create_directory(folder.at("compat"));
  fs::copy_file(fake("full"), folder.at("compat/libcuda.so.1"));
  const Shown shown = show("FAKE_INIT=803", folder.at("compat/libcuda.so.1"));
  CHECK(shown.status() == GPULOAN_ERR_DRIVER_MISMATCH);
  CHECK(shown.says("it is a compat library"));
}

// J5, R20
TEST_CASE("old drivers") {
  SUBCASE("bare names are an old ABI") {
    const Shown shown = show("FAKE_VERSION=3000", fake("bare"));
    CHECK(shown.status() == GPULOAN_ERR_OLD_DRIVER);
    CHECK(shown.says("driver 3.0 at " + fake("bare")));
    CHECK(shown.says("lacks cuDeviceGetUuid_v2, cuDeviceTotalMem_v2, "));
    CHECK(shown.says(" and 9 more"));
    CHECK(shown.says("for CUDA 11.4 or newer"));
  }
  SUBCASE("both: the newer ABI is taken") {
    const Shown shown = show("", fake("old_names"));
    CHECK(shown.status() == GPULOAN_OK);
    CHECK(shown["mem_get_info"] == "0");
  }
}

TEST_CASE("without an optional group") {
  const std::map<std::string, std::string> groups = {
      {"no_capture", "graph capture queries: cuStreamIsCapturing, cuThreadExchangeStreamCaptureMode"},
      {"no_vmm", "virtual memory management: cuMemGetAllocationGranularity, cuMemAddressReserve, cuMemAddressFree, cuMemCreate"},
      {"no_memops", "stream memory operations: cuStreamWriteValue64, cuStreamWaitValue64"},
      {"no_ipc_events", "interprocess events: cuIpcGetEventHandle, cuIpcOpenEventHandle"},
      {"no_host_register", "host memory registration: cuMemHostRegister, cuMemHostUnregister"},
      {"no_foreign_vmm", "export of VMM memory that others made: cuMemRetainAllocationHandle, cuMemGetAllocationPropertiesFromHandle"},
      {"no_ipc_memory", "legacy memory handles: cuIpcGetMemHandle, cuIpcOpenMemHandle, cuIpcCloseMemHandle"},
      {"no_pools", "memory pools: cuDeviceGetMemPool, cuDeviceSetMemPool"},
  };
  for (const auto& [library, words] : groups) {
    CAPTURE(library);
    const Shown shown = show("", fake(library));
    CHECK(shown.status() == GPULOAN_OK);
    REQUIRE(shown.missing.size() == 1);
    CHECK(shown.missing[0].find(words) == 0);
  }
}

// J5
TEST_CASE("by version, each symbol missing in turn") {
  struct Row {
    bool required;
    const char* name;
    const char* exported;
  };
  enum { Required = 1, Optional = 0 };
  const Row rows[] = {
#define GPULOAN_CUDA(need, since, group, name, exported, params) {need == Required, #name, #exported},
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
  };
  CHECK(show("", fake("by_version_1")).status() == GPULOAN_OK);
  CHECK(show("", fake("by_version_2")).status() == GPULOAN_OK);
  bool first = false;
  for (const Row& row : rows) {
    CAPTURE(row.name);
    first = !first; // half of them by each of the two functions
    const Shown shown = show("FAKE_LACKS=" + std::string(row.name), fake(first ? "by_version_1" : "by_version_2"));
    if (std::string(row.name) == "cuInit") {
      CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    } else if (row.required) {
      CHECK(shown.status() == GPULOAN_ERR_OLD_DRIVER);
      CHECK(shown.says(std::string("lacks ") + row.exported + ": install"));
    } else {
      CHECK(shown.status() == GPULOAN_OK);
      REQUIRE(shown.missing.size() == 1);
      CHECK(shown.missing[0].ends_with(std::string(": ") + row.name));
    }
  }
}

TEST_CASE("one Driver per library and process, none in a forked child") {
  SUBCASE("from many threads") { CHECK(show("", fake("full") + " threads")["same"] == "1"); }
  SUBCASE("after fork") {
    const Shown shown = show("", fake("full") + " fork");
    CHECK(shown["child_status"] == std::to_string(GPULOAN_ERR_FORKED));
    CHECK(shown["child_allowed"] == "0");
  }
  SUBCASE("after a fork of a process that found no driver") {
    const Shown shown = show("", "/nowhere/libcuda.so.1 fork");
    CHECK(shown["child_status"] == std::to_string(GPULOAN_ERR_NO_DRIVER));
    CHECK(shown["child_allowed"] == "1");
  }
}

TEST_CASE("sim: where it is looked for") {
  const Folder folder;
  const std::string program = folder.at("bin/driver_show");
  fs::create_directories(folder.at("bin"));
  fs::copy_file(kFolder + "/driver_show", program);
  SUBCASE("by environment") {
    const Shown shown = show("GPULOAN_SIM_LIBRARY=" + fake("sim"), "sim");
    CHECK(shown.status() == GPULOAN_OK);
    CHECK(shown["path"] == fake("sim"));
    CHECK(shown["found_by"] == "simulated");
    CHECK(shown["simulated"] == "1");
  }
  SUBCASE("by environment, and nowhere else when that fails") {
    const Shown shown = show("GPULOAN_SIM_LIBRARY=/nowhere/sim.so", "sim");
    CHECK(shown.status() == GPULOAN_ERR_NO_DRIVER);
    CHECK(shown.says("GPULOAN_SIM_LIBRARY: "));
    CHECK(shown.says("/nowhere/sim.so"));
  }
  SUBCASE("beside the program") {
    fs::copy_file(fake("sim"), folder.at("bin/libgpuloan-sim.so"));
    CHECK(show_with(program, "", "sim")["path"] == folder.at("bin/libgpuloan-sim.so"));
  }
  SUBCASE("in the build tree above it") {
    fs::create_directories(folder.at("lib/sim"));
    fs::copy_file(fake("sim"), folder.at("lib/sim/libgpuloan-sim.so"));
    CHECK(show_with(program, "", "sim")["path"] == folder.at("lib/sim/libgpuloan-sim.so"));
    if (::geteuid() != 0) return; // only root can give a file away
    REQUIRE(::chown(folder.at("lib/sim/libgpuloan-sim.so").c_str(), 65534, 65534) == 0);
    CHECK(show_with(program, "", "sim")["path"] != folder.at("lib/sim/libgpuloan-sim.so"));
  }
  SUBCASE("in this build tree") {
    if (!fs::exists(kSim)) return;
    const Shown shown = show("", "sim");
    CHECK(shown.status() == GPULOAN_OK);
    CHECK(shown["path"] == kSim);
    CHECK(shown["simulated"] == "1");
    CHECK(shown.missing.empty());
  }
}
