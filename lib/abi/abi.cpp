// SPDX-License-Identifier: MIT
#include <abi/abi.hpp>

namespace gpuloan::abi {
namespace {

std::string& error_slot() {
  thread_local std::string text;
  return text;
}

template <typename Derived, typename Base>
Result<std::shared_ptr<Derived>> narrow(Result<std::shared_ptr<Base>> base, const char* side) {
  if (!base) return forward(std::move(base.error()));
  if (auto derived = std::dynamic_pointer_cast<Derived>(*base)) return derived;
  return fail(GPULOAN_ERR_STATE, std::string("this call is for the ") + side + "'s side");
}

} // namespace

gpuloan_status keep_error(const Error& error) noexcept {
  try {
    error_slot() = error.text;
  } catch (...) { // no memory for the sentence: the status still says it
    error_slot().clear();
  }
  return error.status;
}

gpuloan_status keep_thrown(gpuloan_status status, const char* what, const char* why) noexcept {
  try {
    error_slot() = std::string(what) + why;
  } catch (...) {
    error_slot().clear();
  }
  return status;
}

Result<void> check_core(const loan::Context* core) {
  if (core == nullptr) return fail(GPULOAN_ERR_INVALID, "the handle is NULL");
  if (core->forked()) return fail(GPULOAN_ERR_FORKED, "the object belongs to the parent of this forked process; make a new context here, or start workers with exec");
  return {};
}

Result<std::shared_ptr<loan::Peer>> peer_of(gpuloan_peer* handle) {
  if (handle == nullptr) return fail(GPULOAN_ERR_INVALID, "the peer is NULL");
  auto* peer = reinterpret_cast<loan::Peer*>(handle);
  GPULOAN_TRY(check_core(peer->context.get()));
  return peer->shared_from_this();
}

Result<std::shared_ptr<loan::Loan>> loan_of(gpuloan_loan* handle) {
  if (handle == nullptr) return fail(GPULOAN_ERR_INVALID, "the loan is NULL");
  auto* loan = reinterpret_cast<loan::Loan*>(handle);
  GPULOAN_TRY(check_core(loan->peer->context.get()));
  return loan->shared_from_this();
}

Result<std::shared_ptr<loan::ExporterPeer>> exporter_peer(gpuloan_peer* handle) { return narrow<loan::ExporterPeer>(peer_of(handle), "exporter"); }
Result<std::shared_ptr<loan::ImporterPeer>> importer_peer(gpuloan_peer* handle) { return narrow<loan::ImporterPeer>(peer_of(handle), "importer"); }
Result<std::shared_ptr<loan::ExportLoan>> export_loan(gpuloan_loan* handle) { return narrow<loan::ExportLoan>(loan_of(handle), "exporter"); }
Result<std::shared_ptr<loan::ImportLoan>> import_loan(gpuloan_loan* handle) { return narrow<loan::ImportLoan>(loan_of(handle), "importer"); }

loan::Exporter& exporter_of(const loan::Peer& peer) noexcept { return static_cast<loan::Exporter&>(*peer.context); }
loan::Importer& importer_of(const loan::Peer& peer) noexcept { return static_cast<loan::Importer&>(*peer.context); }

gpuloan_loan* hand_out(const std::shared_ptr<loan::Loan>& loan) {
  const std::lock_guard lock(loan->peer->context->mutex());
  loan->peer->context->hold(loan->handle, loan);
  return handle_of(*loan);
}

gpuloan_peer* hand_out(const std::shared_ptr<loan::Peer>& peer) {
  const std::lock_guard lock(peer->context->mutex());
  if (peer->closed) return nullptr;
  if (!peer->handle.held()) peer->context->hold(peer->handle, peer);
  return reinterpret_cast<gpuloan_peer*>(peer.get());
}

gpuloan_request* hand_out(const std::shared_ptr<loan::Request>& request) {
  const std::lock_guard lock(request->exporter->mutex());
  request->exporter->hold(request->handle, request);
  return reinterpret_cast<gpuloan_request*>(request.get());
}

Result<std::span<const std::byte>> metadata_of(const void* data, std::size_t bytes) {
  if (bytes > GPULOAN_METADATA_MAX) return fail(GPULOAN_ERR_LIMIT, "metadata has " + std::to_string(bytes) + " bytes, the limit is " + std::to_string(GPULOAN_METADATA_MAX));
  if (data == nullptr && bytes != 0) return fail(GPULOAN_ERR_INVALID, "metadata is NULL and metadata_bytes is not 0");
  return std::span(static_cast<const std::byte*>(data), bytes);
}

} // namespace gpuloan::abi

extern "C" GPULOAN_API const char *gpuloan_error_text(void) { return gpuloan::abi::error_slot().c_str(); }
