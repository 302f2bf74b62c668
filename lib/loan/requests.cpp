// SPDX-License-Identifier: MIT
//
// Requests: a peer asks for a buffer to write a result into; the caller grants it, which makes a region of the arena and
// lends it for write, or denies it.
#include <loan/exporter.hpp>

#include <new>

namespace gpuloan::loan {

Result<void> Exporter::on_request(const std::shared_ptr<ExporterPeer>& peer, const channel::Received& received) {
  const channel::Request& wire = received.record->request;
  if (wire.request == 0) return fail(GPULOAN_ERR_PROTOCOL, "a request has the number 0");
  if (peer->requests >= ExporterPeer::kRequestsMax) {
    channel::Record record = channel::make_record(channel::Type::Denied);
    record.denied.request = wire.request;
    record.denied.status = GPULOAN_ERR_LIMIT;
    send_text(*peer, record, std::to_string(ExporterPeer::kRequestsMax) + " requests of this peer are not answered yet");
    return {};
  }
  auto request = std::make_shared<Request>();
  request->exporter = std::static_pointer_cast<Exporter>(shared_from_this());
  request->peer = peer;
  request->id = wire.request;
  request->bytes = wire.bytes;
  request->alignment = wire.alignment;
  request->memory = wire.memory == GPULOAN_MEMORY_HOST ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
  request->onward = wire.onward != 0;
  request->metadata.assign(received.tail.begin(), received.tail.end());
  ++peer->requests;
  push_event({GPULOAN_EVENT_REQUEST, GPULOAN_OK, peer, nullptr, std::move(request), ""});
  return {};
}

Result<Exporter::Grant> Exporter::grant(Request& request, LendOptions options) {
  memory::RegionSpec spec;
  spec.bytes = request.bytes;
  spec.alignment = request.alignment;
  spec.access = GPULOAN_ACCESS_WRITE;
  spec.memory = gpu_ ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST;
  spec.own_chunk = request.onward;
  auto region = create_region(request.peer, spec);
  if (!region) return forward(std::move(region.error()));
  const memory::Region& made = *(*region)->region;
  const std::uint64_t base = made.pointer() != 0 ? made.pointer() : reinterpret_cast<std::uint64_t>(made.host());
  Result<std::shared_ptr<ExportLoan>> loan = forward(out_of_memory());
  try {
    loan = grant_with(request, base, std::move(options));
  } catch (const std::bad_alloc&) {
  }
  if (!loan) {
    static_cast<void>(destroy_region(**region));
    const Lock lock(mutex_);
    static_cast<void>(drop((*region)->handle)); // not the last: *region is
    return forward(std::move(loan.error()));
  }
  return Grant{std::move(*region), std::move(*loan)};
}

// With memory of the caller's own.
Result<std::shared_ptr<ExportLoan>> Exporter::grant_with(Request& request, std::uint64_t pointer, LendOptions options) {
  {
    const Lock lock(mutex_);
    if (request.answered) return fail(GPULOAN_ERR_STATE, "the request was answered already");
  }
  options.access = GPULOAN_ACCESS_WRITE;
  options.request = request.id;
  options.memory = request.memory;
  if (options.metadata.empty()) options.metadata = request.metadata;
  auto loan = lend(request.peer, pointer, request.bytes, options);
  if (!loan) return loan;
  const Lock lock(mutex_);
  request.answered = true;
  --request.peer->requests;
  return loan;
}

Result<void> Exporter::deny(Request& request, std::string_view reason) {
  const Lock lock(mutex_);
  if (request.answered) return fail(GPULOAN_ERR_STATE, "the request was answered already");
  request.answered = true;
  --request.peer->requests;
  channel::Record record = channel::make_record(channel::Type::Denied);
  record.denied.request = request.id;
  record.denied.status = GPULOAN_ERR_DENIED;
  send_text(*request.peer, record, reason.empty() ? "the exporter denied the request" : reason);
  return {};
}

} // namespace gpuloan::loan
