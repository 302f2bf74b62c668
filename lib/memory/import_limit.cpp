// SPDX-License-Identifier: MIT
#include <memory/import_limit.hpp>

#include <base/cache_file.hpp>
#include <base/log.hpp>

#include <charconv>
#include <cstdlib>
#include <memory>

namespace gpuloan::memory {
namespace {

std::string uuid_text(const driver::Uuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (std::size_t at = 0; at < sizeof uuid.bytes; ++at) {
    if (at == 4 || at == 6 || at == 8 || at == 10) text += '-';
    const unsigned char byte = uuid.bytes[at];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// The release is in the name of the file that libcuda.so.1 is a link to ("libcuda.so.580.159.04"); the version that the
// driver tells is CUDA's, which many releases share.
std::string driver_text(const driver::Driver& driver) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(driver.path().c_str(), nullptr), &std::free);
  const std::string path = real != nullptr ? real.get() : driver.path();
  return std::to_string(driver.version()) + " " + path.substr(path.rfind('/') + 1);
}

// The number in a line "limit N MiB", as bytes; 0 for "limit none", and where there is no such line.
std::uint64_t limit_in(const std::string& text) {
  constexpr std::string_view kLine = "\nlimit ";
  const std::size_t found = text.find(kLine);
  if (found == std::string::npos) return 0;
  std::uint64_t mebibytes = 0;
  const char* const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data() + found + kLine.size(), end, mebibytes);
  return error == std::errc() && mebibytes <= UINT64_MAX >> 20 ? mebibytes << 20 : 0;
}

bool plausible(std::uint64_t bytes, const driver::Floors& floors) { // 0 is: nothing can be imported
  return bytes % kImportLimitUnit == 0 && bytes <= floors.total_bytes;
}

} // namespace

const char* limit_source_text(gpuloan_limit_source source) noexcept {
  switch (source) {
    case GPULOAN_LIMIT_OPTION: return "the option pool_import_limit";
    case GPULOAN_LIMIT_MEASURED: return "measured on this device and driver";
    case GPULOAN_LIMIT_DEFAULT: break;
  }
  return "the default, which 'gpuloan probe --import-limit' replaces by a measured one";
}

std::string import_limit_name(const driver::Floors& floors) { return "pool-import-limit-" + uuid_text(floors.uuid); }

std::string import_limit_text(const driver::Driver& driver, const driver::Floors& floors, std::uint64_t bytes) {
  return "# Made by 'gpuloan probe --import-limit': the largest allocation of a memory pool that another process could import.\n"
         "# Safe to delete; " + std::to_string(kImportLimitDefault >> 20) + " MiB are taken then.\n"
         "format 1\n"
         "device " + uuid_text(floors.uuid) + "\n"
         "driver " + driver_text(driver) + "\n"
         "limit " + (bytes == 0 ? "none" : std::to_string(bytes >> 20) + " MiB") + "\n"
         "end\n";
}

ImportLimit find_import_limit(const driver::Driver& driver, const driver::Floors& floors) {
  const std::string path = cache_file_path(import_limit_name(floors));
  if (path.empty()) return {};
  const auto kept = read_cache_file(path);
  std::string why;
  if (kept) {
    if (!*kept) return {};
    const std::string& text = **kept;
    const std::uint64_t bytes = limit_in(text);
    if (plausible(bytes, floors) && text == import_limit_text(driver, floors, bytes)) return {bytes, GPULOAN_LIMIT_MEASURED};
    why = "it is damaged, or was made for another driver than " + driver_text(driver) + "; measure again, or delete it";
  } else {
    why = kept.error().text;
  }
  GPULOAN_LOG(GPULOAN_LOG_WARNING, "the measured import limit in " + path + " is not used: " + why);
  return {};
}

Result<std::string> remember_import_limit(const driver::Driver& driver, const driver::Floors& floors, std::uint64_t bytes) {
  const std::uint64_t kept = bytes - bytes % kImportLimitUnit;
  if ((kept == 0 && bytes != 0) || !plausible(kept, floors)) {
    return fail(GPULOAN_ERR_INVALID, "an import limit is from 2 MiB to what the device has, " + std::to_string(floors.total_bytes) +
                                         " bytes, or 0 where nothing can be imported");
  }
  const std::string path = cache_file_path(import_limit_name(floors));
  if (path.empty()) return fail(GPULOAN_ERR_SYSTEM, "the import limit cannot be kept: neither XDG_CACHE_HOME nor HOME is an absolute path");
  if (auto written = write_cache_file(path, import_limit_text(driver, floors, kept)); !written) {
    return fail(written.error().status, "the import limit cannot be kept in " + path + ": " + written.error().text);
  }
  return path;
}

} // namespace gpuloan::memory
