// SPDX-License-Identifier: MIT
//
// The importer's calls, and what both sides do with a loan.
#include <abi/abi.hpp>

#include <algorithm>

using namespace gpuloan;
using namespace gpuloan::abi;

namespace {

Result<void> acquire(gpuloan_loan *loan, bool on_stream, void *stream, std::uint32_t timeout_ms, gpuloan_view *out_view) {
  GPULOAN_TRY(write_struct(out_view, gpuloan_view{}, "out_view")); // checks it before the turn is taken
  auto borrowed = import_loan(loan);
  if (!borrowed) return forward(std::move(borrowed.error()));
  auto view = importer_of(*(*borrowed)->peer).acquire(*borrowed, on_stream, stream_of(stream), timeout_ms);
  if (!view) return forward(std::move(view.error()));
  gpuloan_view out = {};
  out.pointer = view->pointer;
  out.host = view->host;
  out.bytes = (*borrowed)->bytes;
  out.access = (*borrowed)->access;
  out.turn = view->turn;
  out.metadata = (*borrowed)->metadata.data();
  out.metadata_bytes = (*borrowed)->metadata.size();
  return write_struct(out_view, out, "out_view");
}

Result<void> give_back(gpuloan_loan *loan, gpuloan_status status, const char *reason) {
  auto borrowed = import_loan(loan);
  if (!borrowed) return forward(std::move(borrowed.error()));
  return importer_of(*(*borrowed)->peer).give_back(*borrowed, status, reason != nullptr ? reason : "");
}

} // namespace

extern "C" {

gpuloan_status gpuloan_request_send(gpuloan_peer *peer, const gpuloan_request_options *options, gpuloan_loan **out_loan) {
  return guard([&]() -> Result<void> {
    auto from = importer_peer(peer);
    if (!from) return forward(std::move(from.error()));
    auto given = read_struct(options, "options");
    if (!given) return forward(std::move(given.error()));
    if (out_loan == nullptr) return fail(GPULOAN_ERR_INVALID, "out_loan is NULL");
    if (given->memory > GPULOAN_MEMORY_HOST) return fail(GPULOAN_ERR_INVALID, "options.memory is no gpuloan_memory");
    if ((given->alignment & (given->alignment - 1)) != 0 || given->alignment > (2U << 20)) return fail(GPULOAN_ERR_INVALID, "options.alignment is no power of two up to 2 MiB");
    auto metadata = metadata_of(given->metadata, given->metadata_bytes);
    if (!metadata) return forward(std::move(metadata.error()));
    loan::RequestOptions wanted;
    wanted.bytes = given->bytes;
    wanted.alignment = given->alignment;
    wanted.memory = static_cast<gpuloan_memory>(given->memory);
    wanted.onward = given->onward != 0;
    wanted.metadata = *metadata;
    auto loan = importer_of(**from).request(*from, wanted);
    if (!loan) return forward(std::move(loan.error()));
    *out_loan = handle_of(**loan);
    return {};
  });
}

gpuloan_status gpuloan_loan_acquire(gpuloan_loan *loan, uint32_t timeout_ms, gpuloan_view *out_view) {
  return guard([&] { return acquire(loan, false, nullptr, timeout_ms, out_view); });
}

gpuloan_status gpuloan_loan_acquire_on(gpuloan_loan *loan, void *stream, uint32_t timeout_ms, gpuloan_view *out_view) {
  return guard([&] { return acquire(loan, true, stream, timeout_ms, out_view); });
}

gpuloan_status gpuloan_loan_used_on(gpuloan_loan *loan, void *stream) {
  return guard([&]() -> Result<void> {
    auto borrowed = import_loan(loan);
    if (!borrowed) return forward(std::move(borrowed.error()));
    return importer_of(*(*borrowed)->peer).used_on(*borrowed, stream_of(stream));
  });
}

gpuloan_status gpuloan_loan_done(gpuloan_loan *loan, void *stream) {
  return guard([&]() -> Result<void> {
    auto borrowed = import_loan(loan);
    if (!borrowed) return forward(std::move(borrowed.error()));
    return importer_of(*(*borrowed)->peer).done(*borrowed, stream_of(stream));
  });
}

gpuloan_status gpuloan_loan_done_many(gpuloan_loan *const *loans, uint32_t count, void *stream, uint32_t *out_count) {
  if (out_count != nullptr) *out_count = 0;
  return guard([&]() -> Result<void> {
    if (out_count == nullptr) return fail(GPULOAN_ERR_INVALID, "out_count is NULL");
    if (count > 0 && loans == nullptr) return fail(GPULOAN_ERR_INVALID, "loans is NULL");
    std::vector<std::shared_ptr<loan::ImportLoan>> borrowed;
    borrowed.reserve(count);
    for (uint32_t at = 0; at < count; ++at) {
      auto one = import_loan(loans[at]);
      if (!one) return forward(std::move(one.error()));
      if (!borrowed.empty() && (*one)->peer->context != borrowed.front()->peer->context) return fail(GPULOAN_ERR_INVALID, "the loans are of several contexts");
      borrowed.push_back(std::move(*one));
    }
    if (count == 0) return {};
    auto done = importer_of(*borrowed.front()->peer).done_many(borrowed, stream_of(stream), *out_count);
    const auto refused = borrowed.begin() + *out_count;
    if (!done && refused != borrowed.end() && std::find(borrowed.begin(), refused, *refused) != refused) {
      return fail(done.error().status, "loans[" + std::to_string(*out_count) + "] is in the list twice: " + done.error().text);
    }
    return done;
  });
}

gpuloan_status gpuloan_loan_return(gpuloan_loan *loan) {
  return guard([&] { return give_back(loan, GPULOAN_OK, nullptr); });
}

gpuloan_status gpuloan_loan_fail(gpuloan_loan *loan, const char *reason) {
  return guard([&] { return give_back(loan, GPULOAN_ERR_FAILED, reason); });
}

// ---- Both sides ----

gpuloan_status gpuloan_loan_wait_done(gpuloan_loan *loan, uint32_t timeout_ms) {
  return guard([&]() -> Result<void> {
    auto base = loan_of(loan);
    if (!base) return forward(std::move(base.error()));
    if (auto lent = std::dynamic_pointer_cast<loan::ExportLoan>(*base)) return exporter_of(*lent->peer).wait_done(lent, timeout_ms);
    auto borrowed = std::static_pointer_cast<loan::ImportLoan>(*base);
    return importer_of(*borrowed->peer).wait_done(borrowed, timeout_ms);
  });
}

gpuloan_status gpuloan_loan_wait_end(gpuloan_loan *loan, uint32_t timeout_ms) {
  return guard([&]() -> Result<void> {
    auto base = loan_of(loan);
    if (!base) return forward(std::move(base.error()));
    return (*base)->peer->context->wait_end(**base, timeout_ms);
  });
}

gpuloan_status gpuloan_loan_report_get(gpuloan_loan *loan, gpuloan_loan_report *out_report) {
  return guard([&]() -> Result<void> {
    auto base = loan_of(loan);
    if (!base) return forward(std::move(base.error()));
    gpuloan_loan_report report = {};
    {
      const std::lock_guard lock((*base)->peer->context->mutex());
      (*base)->fill_report(report);
    }
    return write_struct(out_report, report, "out_report");
  });
}

gpuloan_loan *gpuloan_loan_ref(gpuloan_loan *loan) {
  auto base = loan_of(loan);
  return base ? hand_out(*base) : nullptr;
}

void gpuloan_loan_unref(gpuloan_loan *loan) {
  auto base = loan_of(loan);
  if (!base) return;
  std::shared_ptr<void> last;
  {
    const std::lock_guard lock((*base)->peer->context->mutex());
    last = (*base)->peer->context->drop((*base)->handle);
    if (last) (*base)->peer->context->forget_events(**base);
  }
  if (auto borrowed = std::dynamic_pointer_cast<loan::ImportLoan>(*base); last && borrowed) {
    static_cast<void>(importer_of(*borrowed->peer).give_back(borrowed, GPULOAN_OK, ""));
  }
}

} // extern "C"
