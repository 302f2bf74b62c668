// SPDX-License-Identifier: MIT
//
// Contexts, events, connections.
#include <abi/abi.hpp>

#include <base/log.hpp>
#include <loan/trial.hpp>

#include <cstdlib>

using namespace gpuloan;
using namespace gpuloan::abi;

namespace {

constexpr std::uint32_t kSlotsMin = loan::kCanaryShapes.size(); // which are out at once
constexpr std::uint32_t kSlotsMax = 1U << 20;

Result<loan::ContextOptions> convert(const gpuloan_context_options &in) {
  loan::ContextOptions out;
  if (in.role != GPULOAN_ROLE_EXPORTER && in.role != GPULOAN_ROLE_IMPORTER) return fail(GPULOAN_ERR_INVALID, "options.role is neither GPULOAN_ROLE_EXPORTER nor GPULOAN_ROLE_IMPORTER");
  if (in.loop > GPULOAN_LOOP_CALLER) return fail(GPULOAN_ERR_INVALID, "options.loop is no gpuloan_loop");
  if (in.engine > GPULOAN_ENGINE_IO_URING) return fail(GPULOAN_ERR_INVALID, "options.engine is no gpuloan_engine");
  if (in.gate > GPULOAN_GATE_HOST) return fail(GPULOAN_ERR_INVALID, "options.gate is no gpuloan_gate");
  if ((in.flags & ~std::uint32_t{GPULOAN_CONTEXT_NO_DEVICE | GPULOAN_CONTEXT_DEVICE | GPULOAN_CONTEXT_SLEEP}) != 0) return fail(GPULOAN_ERR_INVALID, "options.flags has bits that mean nothing");
  if ((in.rungs & ~std::uint32_t{GPULOAN_RUNG_VMM | GPULOAN_RUNG_POOL | GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST}) != 0) return fail(GPULOAN_ERR_INVALID, "options.rungs has bits that are no rung of this version");
  if (in.slots != 0 && in.slots < kSlotsMin) {
    return fail(GPULOAN_ERR_INVALID, "options.slots is under " + std::to_string(kSlotsMin) + ": the canary of each way to a peer lends so much at once (0: the default)");
  }
  if (in.slots > kSlotsMax) return fail(GPULOAN_ERR_INVALID, "options.slots is over " + std::to_string(kSlotsMax));
  if (in.engine == GPULOAN_ENGINE_IO_URING && (in.role != GPULOAN_ROLE_EXPORTER || in.loop != GPULOAN_LOOP_THREAD)) {
    return fail(GPULOAN_ERR_INVALID, "options.engine io_uring is for an exporter with a loop thread");
  }
  if (in.gpu_wait_limit > 7) return fail(GPULOAN_ERR_INVALID, "options.gpu_wait_limit is over 7: with 8 pending waits no other work of the CUDA context runs (S9)");
  out.role = static_cast<gpuloan_role>(in.role);
  out.loop_thread = in.loop == GPULOAN_LOOP_THREAD;
  out.spin = (in.flags & GPULOAN_CONTEXT_SLEEP) == 0;
  out.engine = static_cast<gpuloan_engine>(in.engine);
  out.gate = static_cast<gpuloan_gate>(in.gate);
  if (in.rungs != 0) out.rungs = in.rungs;
  else if (const char *pool = std::getenv("GPULOAN_POOL"); pool != nullptr && std::strcmp(pool, "1") == 0) out.rungs |= GPULOAN_RUNG_POOL;
  if ((out.rungs & GPULOAN_RUNG_POOL) != 0 && in.role == GPULOAN_ROLE_EXPORTER) {
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "the pool rung is on. It is EXPERIMENTAL: importing one allocation above the import limit kills the importer, and "
                                     "the driver keeps what was lent from the device after it is freed");
  }
  if (in.pool_import_limit != 0) out.pool_import_limit = {in.pool_import_limit, GPULOAN_LIMIT_OPTION};
  if (in.gpu_wait_limit != 0) out.gpu_wait_limit = in.gpu_wait_limit;
  if (in.slots != 0) out.slots = in.slots;
  if (in.canary_timeout_ms != 0) out.canary_timeout_ms = in.canary_timeout_ms;
  if (in.idle_bytes != 0) out.idle_bytes = in.idle_bytes;
  out.account_bytes = in.account_bytes;
  return out;
}

Result<std::shared_ptr<driver::Gpu>> open_gpu(const gpuloan_context_options &options) {
  if ((options.flags & GPULOAN_CONTEXT_NO_DEVICE) != 0) return std::shared_ptr<driver::Gpu>();
  auto opened = driver::Driver::open(options.driver);
  if (!opened) return forward(std::move(opened.error()));
  return driver::Gpu::open(std::move(*opened), options.device, (options.flags & GPULOAN_CONTEXT_DEVICE) != 0);
}

Result<void> check_context(const gpuloan_context *context) { return check_core(context != nullptr ? context->core.get() : nullptr); }

Result<void> check_role(const gpuloan_context *context, bool exporter) {
  GPULOAN_TRY(check_context(context));
  if (exporter != (context->exporter != nullptr)) return fail(GPULOAN_ERR_STATE, exporter ? "this call is for an exporter's context" : "this call is for an importer's context");
  return {};
}

// A connection that nobody gets a name for is closed again.
gpuloan_peer *hand_out_new(const std::shared_ptr<loan::Peer> &peer) {
  try {
    return hand_out(peer);
  } catch (const std::bad_alloc &) {
    peer->context->close_peer(peer);
    throw;
  }
}

} // namespace

extern "C" {

gpuloan_status gpuloan_context_create(const gpuloan_context_options *options, gpuloan_context **out_context) {
  return guard([&]() -> Result<void> {
    auto given = read_struct(options, "options");
    if (!given) return forward(std::move(given.error()));
    if (out_context == nullptr) return fail(GPULOAN_ERR_INVALID, "out_context is NULL");
    auto wanted = convert(*given);
    if (!wanted) return forward(std::move(wanted.error()));
    auto gpu = open_gpu(*given);
    if (!gpu) return forward(std::move(gpu.error()));
    const bool asks = wanted->role == GPULOAN_ROLE_EXPORTER && (wanted->rungs & GPULOAN_RUNG_POOL) != 0 && given->pool_import_limit == 0;
    if (asks && *gpu && (*gpu)->floors().has(GPULOAN_FLOOR_POOLS)) {
      wanted->pool_import_limit = memory::find_import_limit((*gpu)->driver(), (*gpu)->floors());
    }
    auto context = std::make_unique<gpuloan_context>();
    if (wanted->role == GPULOAN_ROLE_EXPORTER) {
      auto exporter = loan::Exporter::create(*wanted, std::move(*gpu));
      if (!exporter) return forward(std::move(exporter.error()));
      context->exporter = std::move(*exporter);
      context->core = context->exporter;
    } else {
      auto importer = loan::Importer::create(*wanted, std::move(*gpu));
      if (!importer) return forward(std::move(importer.error()));
      context->importer = std::move(*importer);
      context->core = context->importer;
    }
    *out_context = context.release();
    return {};
  });
}

void gpuloan_context_destroy(gpuloan_context *context) {
  if (context == nullptr || context->core->forked()) return;
  context->core->close();
  delete context;
}

int gpuloan_context_fd(const gpuloan_context *context) {
  return check_context(context) ? context->core->fd() : -1;
}

gpuloan_status gpuloan_context_dispatch(gpuloan_context *context, uint32_t timeout_ms) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_context(context));
    return context->core->dispatch(timeout_ms);
  });
}

gpuloan_status gpuloan_context_next_event(gpuloan_context *context, uint32_t timeout_ms, gpuloan_event *out_event) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(write_struct(out_event, gpuloan_event{}, "out_event")); // checks it before an event is taken
    GPULOAN_TRY(check_context(context));
    auto event = context->core->next_event(timeout_ms);
    if (!event) return forward(std::move(event.error()));
    gpuloan_event out = {};
    out.type = event->type;
    out.status = event->status;
    try {
      if (event->peer) out.peer = hand_out(event->peer);
      if (event->loan) out.loan = reinterpret_cast<gpuloan_loan *>(event->loan.get());
      if (event->request) out.request = hand_out(event->request);
    } catch (const std::bad_alloc &) { // it is the next call's
      context->core->put_back(std::move(*event));
      throw;
    }
    copy_text(out.text, sizeof out.text, event->text);
    return write_struct(out_event, out, "out_event");
  });
}

gpuloan_status gpuloan_context_stats(gpuloan_context *context, gpuloan_stats *out_stats) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_context(context));
    return write_struct(out_stats, context->core->stats(), "out_stats");
  });
}

gpuloan_status gpuloan_context_invite(gpuloan_context *context, const char *account, gpuloan_key *out_key) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_role(context, true));
    if (out_key == nullptr) return fail(GPULOAN_ERR_INVALID, "out_key is NULL");
    auto key = context->exporter->invite(account != nullptr ? account : "");
    if (!key) return forward(std::move(key.error()));
    *out_key = *key;
    return {};
  });
}

gpuloan_status gpuloan_context_listen(gpuloan_context *context, const char *path) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_role(context, true));
    if (path == nullptr || *path == '\0') return fail(GPULOAN_ERR_INVALID, "path is empty");
    return context->exporter->listen(path);
  });
}

gpuloan_status gpuloan_context_attach(gpuloan_context *context, int fd, const char *account) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_role(context, true));
    return context->exporter->attach(fd, account != nullptr ? account : "");
  });
}

gpuloan_status gpuloan_context_connect(gpuloan_context *context, const char *path, const gpuloan_key *key, uint32_t timeout_ms,
                                       gpuloan_peer **out_peer) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_role(context, false));
    if (path == nullptr || *path == '\0' || out_peer == nullptr) return fail(GPULOAN_ERR_INVALID, "path or out_peer is empty");
    auto peer = context->importer->connect(path, key, timeout_ms);
    if (!peer) return forward(std::move(peer.error()));
    *out_peer = hand_out_new(*peer);
    return {};
  });
}

gpuloan_status gpuloan_context_adopt(gpuloan_context *context, int fd, uint32_t timeout_ms, gpuloan_peer **out_peer) {
  return guard([&]() -> Result<void> {
    GPULOAN_TRY(check_role(context, false));
    if (out_peer == nullptr) return fail(GPULOAN_ERR_INVALID, "out_peer is NULL");
    auto peer = context->importer->adopt(fd, timeout_ms);
    if (!peer) return forward(std::move(peer.error()));
    *out_peer = hand_out_new(*peer);
    return {};
  });
}

gpuloan_status gpuloan_peer_info_get(gpuloan_peer *peer, gpuloan_peer_info *out_info) {
  return guard([&]() -> Result<void> {
    auto base = peer_of(peer);
    if (!base) return forward(std::move(base.error()));
    return write_struct(out_info, (*base)->context->peer_info(**base), "out_info");
  });
}

void gpuloan_peer_close(gpuloan_peer *peer) {
  if (auto base = peer_of(peer)) (*base)->context->close_peer(*base);
}

} // extern "C"
