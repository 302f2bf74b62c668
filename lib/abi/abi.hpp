// SPDX-License-Identifier: MIT
//
// What every C entry point needs: errors kept per thread, structs of any size, handles and objects.
#pragma once

#include <loan/exporter.hpp>
#include <loan/importer.hpp>

#include <cstring>
#include <new>
#include <system_error>

// The C handles. A context is this struct; the others are the internal objects themselves, kept alive by their Handle.
struct gpuloan_context {
  std::shared_ptr<gpuloan::loan::Context> core;
  std::shared_ptr<gpuloan::loan::Exporter> exporter; // one of the two
  std::shared_ptr<gpuloan::loan::Importer> importer;
};

namespace gpuloan::abi {

// Keeps the sentence for gpuloan_error_text and returns the status.
gpuloan_status keep_error(const Error& error) noexcept;
// The same where there may be no memory for a sentence.
gpuloan_status keep_thrown(gpuloan_status status, const char* what, const char* why) noexcept;

// Runs `body` (returning Result<void>) and turns whatever happens into one status.
template <typename Body>
gpuloan_status guard(Body&& body) noexcept {
  try {
    const Result<void> result = body();
    return result ? GPULOAN_OK : keep_error(result.error());
  } catch (const std::bad_alloc&) {
    return keep_thrown(GPULOAN_ERR_NO_MEMORY, "out of host memory", "");
  } catch (const std::system_error& refused) { // std::thread: a limit of processes or threads
    return keep_thrown(GPULOAN_ERR_SYSTEM, "no thread could be made: ", refused.what());
  } catch (const std::exception& unexpected) {
    return keep_thrown(GPULOAN_ERR_INTERNAL, "unexpected: ", unexpected.what());
  } catch (...) {
    return keep_thrown(GPULOAN_ERR_INTERNAL, "unexpected exception", "");
  }
}

// The same for calls without a context: `body` gets the driver that GPULOAN_DRIVER names, else the real one.
template <typename Body>
gpuloan_status on_driver(Body&& body) noexcept {
  return guard([&]() -> Result<void> {
    auto opened = driver::Driver::open(nullptr);
    if (!opened) return forward(std::move(opened.error()));
    return body(*opened);
  });
}

// A caller's options struct as this version knows it. Members that an older caller does not have are 0; a newer caller
// may have more, as long as they are 0.
template <typename Struct>
Result<Struct> read_struct(const Struct* in, const char* what) {
  if (in == nullptr) return fail(GPULOAN_ERR_INVALID, std::string(what) + " is NULL");
  if (in->size < sizeof(std::size_t)) return fail(GPULOAN_ERR_INVALID, std::string(what) + ".size is not set (GPULOAN_INIT does it)");
  const auto* bytes = reinterpret_cast<const unsigned char*>(in);
  for (std::size_t at = sizeof(Struct); at < in->size; ++at) {
    if (bytes[at] != 0) return fail(GPULOAN_ERR_UNSUPPORTED, std::string(what) + " uses members that this version of the library does not know");
  }
  Struct out = {};
  std::memcpy(&out, in, std::min(in->size, sizeof(Struct)));
  return out;
}

// Writes `value` into a caller's output struct, as much as it has room for.
template <typename Struct>
Result<void> write_struct(Struct* out, const Struct& value, const char* what) {
  if (out == nullptr) return fail(GPULOAN_ERR_INVALID, std::string(what) + " is NULL");
  if (out->size < sizeof(std::size_t)) return fail(GPULOAN_ERR_INVALID, std::string(what) + ".size is not set (GPULOAN_INIT does it)");
  const std::size_t size = std::min(out->size, sizeof(Struct));
  std::memcpy(out, &value, size);
  out->size = size;
  return {};
}

inline void copy_text(char* to, std::size_t room, std::string_view text) noexcept {
  to[text.copy(to, room - 1)] = '\0';
}

template <typename Object>
Object* object(void* handle) noexcept { return static_cast<Object*>(handle); }

// INVALID for NULL, FORKED in a child of the process that made the object.
[[nodiscard]] Result<void> check_core(const loan::Context* core);
[[nodiscard]] Result<std::shared_ptr<loan::Peer>> peer_of(gpuloan_peer* handle);
[[nodiscard]] Result<std::shared_ptr<loan::Loan>> loan_of(gpuloan_loan* handle);
[[nodiscard]] Result<std::shared_ptr<loan::ExporterPeer>> exporter_peer(gpuloan_peer* handle);
[[nodiscard]] Result<std::shared_ptr<loan::ImporterPeer>> importer_peer(gpuloan_peer* handle);
[[nodiscard]] Result<std::shared_ptr<loan::ExportLoan>> export_loan(gpuloan_loan* handle);
[[nodiscard]] Result<std::shared_ptr<loan::ImportLoan>> import_loan(gpuloan_loan* handle);
[[nodiscard]] loan::Exporter& exporter_of(const loan::Peer& peer) noexcept;
[[nodiscard]] loan::Importer& importer_of(const loan::Peer& peer) noexcept;

// The name of a loan that carries a reference of the caller's already.
[[nodiscard]] inline gpuloan_loan* handle_of(loan::Loan& loan) noexcept { return reinterpret_cast<gpuloan_loan*>(&loan); }
// A new reference for the caller.
[[nodiscard]] inline gpuloan_region* handle_of(loan::RegionHandle& region) noexcept { return reinterpret_cast<gpuloan_region*>(&region); }
[[nodiscard]] gpuloan_loan* hand_out(const std::shared_ptr<loan::Loan>& loan);
[[nodiscard]] gpuloan_peer* hand_out(const std::shared_ptr<loan::Peer>& peer); // held once per peer
[[nodiscard]] gpuloan_request* hand_out(const std::shared_ptr<loan::Request>& request);

[[nodiscard]] Result<std::span<const std::byte>> metadata_of(const void* data, std::size_t bytes);
[[nodiscard]] inline cuda::Stream stream_of(void* stream) noexcept { return static_cast<cuda::Stream>(stream); }

} // namespace gpuloan::abi
