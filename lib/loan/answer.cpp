// SPDX-License-Identifier: MIT
//
// What the importer's library says of itself: a request for a result, and the answer to a canary.
#include <loan/trial.hpp>
#include <loan/importer.hpp>

#include <cstring>
#include <new>

namespace gpuloan::loan {

Result<std::shared_ptr<ImportLoan>> Importer::request(const std::shared_ptr<ImporterPeer>& peer, const RequestOptions& options) {
  const Lock lock(mutex_);
  if (peer->lost) return fail(GPULOAN_ERR_PEER_LOST, "the exporter is gone: " + peer->loss.text);
  auto loan = std::make_shared<ImportLoan>(peer);
  loan->request = peer->next_request++;
  loan->bytes = options.bytes;
  loan->access = GPULOAN_ACCESS_WRITE;
  loan->memory = options.memory;
  channel::Record record = channel::make_record(channel::Type::Request);
  record.request.request = loan->request;
  record.request.bytes = options.bytes;
  record.request.alignment = options.alignment;
  record.request.memory = gpu_ ? options.memory : GPULOAN_MEMORY_HOST;
  record.request.onward = options.onward ? 1 : 0;
  ++loans_total_;
  peer->requests.emplace(loan->request, loan);
  hold(loan->handle, loan); // before anybody can hear of it
  send(*peer, record, options.metadata);
  return loan;
}

Result<void> Importer::work_canary(const std::shared_ptr<ImportLoan>& loan, const View& view) {
  if (loan->bytes == 0 || loan->bytes > kCanaryMaxBytes) return fail(GPULOAN_ERR_PROTOCOL, "a canary has at most " + std::to_string(kCanaryMaxBytes) + " bytes");
  // The host rung brings bytes one way only: what is to be written holds none of the exporter's.
  const bool writes = loan->access == GPULOAN_ACCESS_WRITE, reads = !writes || loan->rung != GPULOAN_RUNG_HOST;
  const auto unseen = [] { return fail(GPULOAN_ERR_FAILED, "the importer does not see the exporter's bytes"); };
  const auto answer = canary_pattern(loan->bytes, true);
  if (view.host != nullptr) {
    const auto pattern = canary_pattern(loan->bytes, false);
    if (reads && std::memcmp(view.host, pattern.data(), pattern.size()) != 0) return unseen();
    if (writes) std::memcpy(view.host, answer.data(), answer.size());
    return done(loan, reinterpret_cast<cuda::Stream>(GPULOAN_STREAM_CPU));
  }
  if (view.pointer == 0) return fail(GPULOAN_ERR_NO_DEVICE, "the canary is device memory, and this context has no device");
  auto stream = driver::OwnedStream::create(gpu_);
  if (!stream) return forward(std::move(stream.error()));
  driver::Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  if (reads) {
    std::vector<std::byte> bytes(loan->bytes);
    GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyDtoHAsync, bytes.data(), view.pointer, bytes.size(), stream->get()));
    GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuStreamSynchronize, stream->get()));
    if (bytes != canary_pattern(loan->bytes, false)) return unseen();
  }
  if (writes) GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyHtoDAsync, view.pointer, answer.data(), answer.size(), stream->get()));
  Result<void> posted = done(loan, stream->get());
  GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuStreamSynchronize, stream->get())); // `answer` must outlive the copy
  return posted;
}

void Importer::answer_canary(const std::shared_ptr<ImportLoan>& loan) {
  // A caller-driven context runs this from its own dispatch, where it must not wait.
  auto view = acquire(loan, false, nullptr, options_.loop_thread ? 100 : 0);
  if (!view && view.error().status == GPULOAN_ERR_TIMEOUT) { // READY is on its way
    completion_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), loan] { self->answer_canary(loan); });
    return;
  }
  if (!view) return; // it has ended, with the reason
  Result<void> worked;
  try {
    worked = work_canary(loan, *view);
  } catch (const std::bad_alloc&) {
    worked = fail(GPULOAN_ERR_FAILED, "out of memory");
  }
  if (!worked) static_cast<void>(give_back(loan, GPULOAN_ERR_FAILED, worked.error().text));
}

} // namespace gpuloan::loan
