// SPDX-License-Identifier: MIT
//
// The exporter's calls, and those that both sides share.
#include <abi/abi.hpp>

using namespace gpuloan;
using namespace gpuloan::abi;

namespace {

loan::RegionHandle *region_of(const gpuloan_region *handle) { return reinterpret_cast<loan::RegionHandle *>(const_cast<gpuloan_region *>(handle)); }
loan::Request *request_of(const gpuloan_request *handle) { return reinterpret_cast<loan::Request *>(const_cast<gpuloan_request *>(handle)); }

Result<void> check_region(const gpuloan_region *handle) {
  return check_core(handle != nullptr ? region_of(handle)->exporter.get() : nullptr);
}

Result<void> check_request(const gpuloan_request *handle) {
  return check_core(handle != nullptr ? request_of(handle)->exporter.get() : nullptr);
}

Result<void> check_access(std::uint32_t access) {
  if (access == GPULOAN_ACCESS_READ || access == GPULOAN_ACCESS_WRITE) return {};
  return fail(GPULOAN_ERR_INVALID, "options.access is neither GPULOAN_ACCESS_READ nor GPULOAN_ACCESS_WRITE");
}

Result<void> check_memory(std::uint32_t memory) {
  if (memory <= GPULOAN_MEMORY_HOST) return {};
  return fail(GPULOAN_ERR_INVALID, "options.memory is no gpuloan_memory");
}

Result<loan::LendOptions> convert(const gpuloan_lend_options &in) {
  loan::LendOptions out;
  GPULOAN_TRY(check_memory(in.memory));
  if (in.policy > GPULOAN_POLICY_REQUIRE_ZERO_COPY) return fail(GPULOAN_ERR_INVALID, "options.policy is no gpuloan_policy");
  if (in.gate > GPULOAN_GATE_HOST) return fail(GPULOAN_ERR_INVALID, "options.gate is no gpuloan_gate");
  auto metadata = metadata_of(in.metadata, in.metadata_bytes);
  if (!metadata) return forward(std::move(metadata.error()));
  out.access = static_cast<gpuloan_access>(in.access);
  out.policy = static_cast<gpuloan_policy>(in.policy);
  out.rungs = in.rungs;
  out.gate = static_cast<gpuloan_gate>(in.gate);
  out.memory = static_cast<gpuloan_memory>(in.memory);
  out.keep_open = in.keep_open != 0;
  out.exclusive = in.exclusive != 0;
  out.stream = stream_of(in.stream);
  out.metadata = *metadata;
  if (in.release != nullptr) out.release = [function = in.release, user = in.release_user] { function(user); };
  return out;
}

// NULL: everything by default.
Result<loan::LendOptions> grant_options(const gpuloan_lend_options *options) {
  if (options == nullptr) return loan::LendOptions();
  auto given = read_struct(options, "options");
  if (!given) return forward(std::move(given.error()));
  return convert(*given);
}

// Ends the caller's request handle.
void drop_request(loan::Request *request) {
  std::shared_ptr<void> last;
  const std::shared_ptr<loan::Exporter> exporter = request->exporter;
  const std::lock_guard lock(exporter->mutex());
  last = exporter->drop(request->handle);
}

} // namespace

extern "C" {

// ---- Regions ----

gpuloan_status gpuloan_region_create(gpuloan_peer *peer, const gpuloan_region_options *options, gpuloan_region **out_region) {
  return guard([&]() -> Result<void> {
    auto to = exporter_peer(peer);
    if (!to) return forward(std::move(to.error()));
    auto given = read_struct(options, "options");
    if (!given) return forward(std::move(given.error()));
    if (out_region == nullptr) return fail(GPULOAN_ERR_INVALID, "out_region is NULL");
    GPULOAN_TRY(check_access(given->access));
    GPULOAN_TRY(check_memory(given->memory));
    memory::RegionSpec spec;
    spec.bytes = given->bytes;
    spec.alignment = given->alignment;
    spec.access = static_cast<gpuloan_access>(given->access);
    spec.memory = static_cast<gpuloan_memory>(given->memory);
    auto region = exporter_of(**to).create_region(*to, spec);
    if (!region) return forward(std::move(region.error()));
    *out_region = handle_of(**region);
    return {};
  });
}

gpuloan_status gpuloan_region_destroy(gpuloan_region *region) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_region(region));
    loan::RegionHandle *handle = region_of(region);
    const std::shared_ptr<loan::Exporter> exporter = handle->exporter;
    GPULOAN_TRY(exporter->destroy_region(*handle));
    std::shared_ptr<void> last;
    const std::lock_guard lock(exporter->mutex());
    last = exporter->drop(handle->handle);
    return {};
  });
}

uint64_t gpuloan_region_pointer(const gpuloan_region *region) {
  if (!check_region(region)) return 0;
  const memory::Region *made = region_of(region)->region;
  return made != nullptr ? made->pointer() : 0;
}

void *gpuloan_region_host(const gpuloan_region *region) {
  if (!check_region(region)) return nullptr;
  const memory::Region *made = region_of(region)->region;
  return made != nullptr ? made->host() : nullptr;
}

uint64_t gpuloan_region_bytes(const gpuloan_region *region) {
  if (!check_region(region)) return 0;
  const memory::Region *made = region_of(region)->region;
  return made != nullptr ? made->bytes() : 0;
}

gpuloan_status gpuloan_region_used_on(gpuloan_region *region, void *stream) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_region(region));
    return region_of(region)->exporter->used_on(*region_of(region), stream_of(stream));
  });
}

// ---- Lending ----

gpuloan_status gpuloan_lend(gpuloan_peer *peer, uint64_t pointer, uint64_t bytes, const gpuloan_lend_options *options, gpuloan_loan **out_loan) {
  return guard([&]() -> Result<void> {
    auto to = exporter_peer(peer);
    if (!to) return forward(std::move(to.error()));
    auto given = read_struct(options, "options");
    if (!given) return forward(std::move(given.error()));
    if (out_loan == nullptr) return fail(GPULOAN_ERR_INVALID, "out_loan is NULL");
    GPULOAN_TRY(check_access(given->access));
    auto wanted = convert(*given);
    if (!wanted) return forward(std::move(wanted.error()));
    auto loan = exporter_of(**to).lend(*to, pointer, bytes, *wanted);
    if (!loan) return forward(std::move(loan.error()));
    *out_loan = handle_of(**loan);
    return {};
  });
}

gpuloan_status gpuloan_lend_many(gpuloan_peer *peer, const gpuloan_range *ranges, uint32_t count, const gpuloan_lend_options *options,
                                 gpuloan_loan **out_loans, uint32_t *out_count) {
  if (out_count != nullptr) *out_count = 0;
  return guard([&]() -> Result<void> {
    auto to = exporter_peer(peer);
    if (!to) return forward(std::move(to.error()));
    auto given = read_struct(options, "options");
    if (!given) return forward(std::move(given.error()));
    if (out_count == nullptr) return fail(GPULOAN_ERR_INVALID, "out_count is NULL");
    if (count > 0 && (ranges == nullptr || out_loans == nullptr)) return fail(GPULOAN_ERR_INVALID, std::string(ranges == nullptr ? "ranges" : "out_loans") + " is NULL");
    GPULOAN_TRY(check_access(given->access));
    auto wanted = convert(*given);
    if (!wanted) return forward(std::move(wanted.error()));
    auto lent = exporter_of(**to).lend_many(*to, {ranges, count}, *wanted);
    for (std::size_t at = 0; at < lent.loans.size(); ++at) out_loans[at] = handle_of(*lent.loans[at]);
    *out_count = static_cast<uint32_t>(lent.loans.size());
    if (lent.refusal) return std::unexpected(std::move(*lent.refusal));
    return {};
  });
}

gpuloan_status gpuloan_loan_ready(gpuloan_loan *loan, void *stream) {
  return guard([&]() -> Result<void> {
    auto lent = export_loan(loan);
    if (!lent) return forward(std::move(lent.error()));
    return exporter_of(*(*lent)->peer).ready(*lent, stream_of(stream));
  });
}

gpuloan_status gpuloan_reclaim(gpuloan_loan *loan, uint32_t timeout_ms) {
  return guard([&]() -> Result<void> {
    auto lent = export_loan(loan);
    if (!lent) return forward(std::move(lent.error()));
    return exporter_of(*(*lent)->peer).reclaim(*lent, timeout_ms);
  });
}

gpuloan_status gpuloan_loan_cancel(gpuloan_loan *loan, const char *reason) {
  return guard([&]() -> Result<void> {
    auto lent = export_loan(loan);
    if (!lent) return forward(std::move(lent.error()));
    return exporter_of(*(*lent)->peer).cancel(*lent, reason != nullptr ? reason : "");
  });
}

gpuloan_status gpuloan_request_info_get(const gpuloan_request *request, gpuloan_request_info *out_info) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_request(request));
    const loan::Request *from = request_of(request);
    gpuloan_request_info info = {};
    info.peer = hand_out(std::static_pointer_cast<loan::Peer>(from->peer));
    info.bytes = from->bytes;
    info.alignment = from->alignment;
    info.memory = from->memory;
    info.onward = from->onward ? 1 : 0;
    info.metadata = from->metadata.data();
    info.metadata_bytes = from->metadata.size();
    return write_struct(out_info, info, "out_info");
  });
}

gpuloan_status gpuloan_request_grant(gpuloan_request *request, const gpuloan_lend_options *options, gpuloan_region **out_region, gpuloan_loan **out_loan) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_request(request));
    if (out_region == nullptr || out_loan == nullptr) return fail(GPULOAN_ERR_INVALID, "out_region or out_loan is NULL");
    auto wanted = grant_options(options);
    if (!wanted) return forward(std::move(wanted.error()));
    loan::Request *from = request_of(request);
    auto granted = from->exporter->grant(*from, *wanted);
    if (!granted) return forward(std::move(granted.error()));
    *out_region = handle_of(*granted->region);
    *out_loan = handle_of(*granted->loan);
    drop_request(from);
    return {};
  });
}

gpuloan_status gpuloan_request_grant_with(gpuloan_request *request, uint64_t pointer, const gpuloan_lend_options *options, gpuloan_loan **out_loan) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_request(request));
    if (out_loan == nullptr) return fail(GPULOAN_ERR_INVALID, "out_loan is NULL");
    auto wanted = grant_options(options);
    if (!wanted) return forward(std::move(wanted.error()));
    loan::Request *from = request_of(request);
    auto granted = from->exporter->grant_with(*from, pointer, *wanted);
    if (!granted) return forward(std::move(granted.error()));
    *out_loan = handle_of(**granted);
    drop_request(from);
    return {};
  });
}

gpuloan_status gpuloan_request_deny(gpuloan_request *request, const char *reason) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_request(request));
    loan::Request *from = request_of(request);
    GPULOAN_TRY(from->exporter->deny(*from, reason != nullptr ? reason : ""));
    drop_request(from);
    return {};
  });
}

} // extern "C"
