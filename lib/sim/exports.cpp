// SPDX-License-Identifier: MIT
//
// The C symbols of the library, made from entries.inc, and cuGetProcAddress over them. The checks at the end prove that
// each row of the project's symbol table is exported with exactly its parameters; a row without an entry does not
// compile.
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/entry.hpp>

#include <algorithm>
#include <cstring>
#include <type_traits>

#define GPULOAN_SIM_PUBLIC extern "C" __attribute__((visibility("default")))

using namespace gpuloan::cuda;

#define GPULOAN_SIM_ENTRY(need, capture, name, exported, params, arguments)                                            \
  GPULOAN_SIM_PUBLIC CuResult exported params;                                                                         \
  CuResult exported params {                                                                                           \
    using namespace gpuloan::sim;                                                                                      \
    return enter(Row::name, Need::need, Capture::capture, [&] { return api::name arguments; });                        \
  }
#include <sim/entries.inc>
#undef GPULOAN_SIM_ENTRY

#define GPULOAN_CUDA(need, since, group, name, exported, params)                                                       \
  static_assert(std::is_same_v<decltype(::exported), CuResult params>, #exported " is not as in the symbol table");
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
#undef GPULOAN_CUDA

namespace gpuloan::sim {
namespace {

#define GPULOAN_CUDA(need, since, group, name, exported, params) reinterpret_cast<void*>(&::exported),
void* const kAddresses[] = {
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
};
#undef GPULOAN_CUDA

enum QueryStatus : int { Found = 0, SymbolNotFound = 1, VersionNotSufficient = 2 };

QueryStatus look_up(std::string_view name, int version, void*& out) {
  out = nullptr;
  const Config& settings = config();
  const Row row = row_by_name(name);
  if (row == Row::Count || row_info(row).since > settings.version) return SymbolNotFound;
  if (std::find(settings.hidden.begin(), settings.hidden.end(), row) != settings.hidden.end()) return SymbolNotFound;
  // Older ABIs of a function are not simulated, so an older version asks for what is not there.
  if (row_info(row).since > version) return VersionNotSufficient;
  out = kAddresses[static_cast<int>(row)];
  return Found;
}

} // namespace
} // namespace gpuloan::sim

// The name without a version is an ABI of long ago, which does not take a context of today (R20).
GPULOAN_SIM_PUBLIC CuResult cuMemGetAddressRange(unsigned* base, unsigned* bytes, unsigned pointer);
CuResult cuMemGetAddressRange(unsigned*, unsigned*, unsigned) { return InvalidContext; }

GPULOAN_SIM_PUBLIC CuResult cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t flags,
                                                int* status);
GPULOAN_SIM_PUBLIC CuResult cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags);

CuResult cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t, int* status) {
  using namespace gpuloan::sim;
  if (symbol == nullptr || function == nullptr || version > config().version) return InvalidValue;
  QueryStatus found = Found;
  if (std::strcmp(symbol, "cuGetProcAddress") == 0) {
    *function = version >= 12000 ? reinterpret_cast<void*>(&::cuGetProcAddress_v2)
                                 : reinterpret_cast<void*>(&::cuGetProcAddress);
  } else {
    found = look_up(symbol, version, *function);
  }
  if (status != nullptr) *status = found;
  return Success; // that nothing was found is said by the null pointer and the status
}

CuResult cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
