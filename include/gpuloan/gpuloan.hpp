// SPDX-License-Identifier: MIT
//
// gpuloan for C++17 and newer: owners over the C interface of gpuloan.h, header only.
//
// Ownership
//   Context owns a gpuloan_context and ends it. Peer, Region, Loan and Request own one handle each and are move-only.
//   They may outlive their Context: its end makes them empty, their destructors then do nothing, and using one throws
//   StatusError with GPULOAN_ERR_STATE. get() borrows the C handle, release() gives it away.
//   What ends a handle: Peer closes the connection. Region destroys the region, which the library refuses while a loan
//   of it is out (it then lives until the context ends; call destroy() to be told). Loan drops a reference: the
//   exporter's loan goes on, an importer that drops its last one returns the loan. Request denies an unanswered
//   request.
//
// Errors
//   Every function that can fail throws StatusError, which has the status and the whole sentence. A timeout is one too
//   (GPULOAN_ERR_TIMEOUT), except that next_event() gives an empty optional. Destructors never throw.
//
// Threads
//   As in gpuloan.h: any thread may use an object, but not while another ends it or its Context.
#pragma once

#if __cplusplus < 201703L
#error "gpuloan.hpp needs C++17 (-std=c++17 or newer); gpuloan.h is for C++11, too"
#else

#include <gpuloan/gpuloan.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gpuloan {

using Milliseconds = std::chrono::milliseconds;

class StatusError : public std::runtime_error {
 public:
  StatusError(gpuloan_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  [[nodiscard]] gpuloan_status status() const noexcept { return status_; }

 private:
  gpuloan_status status_;
};

// An options or output struct with its size set and everything else at its default.
template <typename Struct>
[[nodiscard]] Struct init() noexcept {
  Struct value{};
  value.size = sizeof(Struct);
  return value;
}

// Throws what the calling thread's last gpuloan call failed with.
inline void check(gpuloan_status status) {
  if (status != GPULOAN_OK) throw StatusError(status, gpuloan_error_text());
}

namespace detail {

// Shared by a Context and everything made from it; null once the context is destroyed.
struct Core {
  gpuloan_context* context = nullptr;
};

inline std::uint32_t to_ms(Milliseconds time) noexcept {
  if (time.count() <= 0) return 0;
  return time.count() > std::int64_t{UINT32_MAX} ? UINT32_MAX : static_cast<std::uint32_t>(time.count());
}

template <typename Handle, void (*End)(Handle*)>
class Owner {
 public:
  Owner() noexcept = default;
  Owner(std::shared_ptr<Core> core, Handle* handle) noexcept : core_(std::move(core)), handle_(handle) {}
  Owner(Owner&& other) noexcept : core_(std::move(other.core_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Owner& operator=(Owner&& other) noexcept {
    if (this != &other) {
      reset();
      core_ = std::move(other.core_);
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() { reset(); }

  // The handle, borrowed; null when empty or when the context is gone.
  [[nodiscard]] Handle* get() const noexcept {
    return core_ != nullptr && core_->context != nullptr ? handle_ : nullptr;
  }
  [[nodiscard]] explicit operator bool() const noexcept { return get() != nullptr; }
  [[nodiscard]] Handle* release() noexcept {
    Handle* handle = get();
    handle_ = nullptr;
    return handle;
  }
  void reset() noexcept {
    if (Handle* handle = release(); handle != nullptr) End(handle);
    core_.reset();
  }

 protected:
  [[nodiscard]] Handle* need() const {
    if (Handle* handle = get(); handle != nullptr) return handle;
    throw StatusError(GPULOAN_ERR_STATE, "the object is empty, or its context has been destroyed");
  }
  [[nodiscard]] const std::shared_ptr<Core>& core() const noexcept { return core_; }

 private:
  std::shared_ptr<Core> core_;
  Handle* handle_ = nullptr;
};

inline void end_peer(gpuloan_peer* peer) { gpuloan_peer_close(peer); }
inline void end_region(gpuloan_region* region) { static_cast<void>(gpuloan_region_destroy(region)); }
inline void end_loan(gpuloan_loan* loan) { gpuloan_loan_unref(loan); }
inline void end_request(gpuloan_request* request) {
  static_cast<void>(gpuloan_request_deny(request, "the request was dropped without an answer"));
}

} // namespace detail

// One region lent to one peer, from either side. The functions name the side that may call them.
class Loan : public detail::Owner<gpuloan_loan, detail::end_loan> {
 public:
  using Owner::Owner;

  // Importer.
  [[nodiscard]] gpuloan_view acquire(Milliseconds timeout) {
    auto view = init<gpuloan_view>();
    check(gpuloan_loan_acquire(need(), detail::to_ms(timeout), &view));
    return view;
  }
  [[nodiscard]] gpuloan_view acquire_on(void* stream, Milliseconds timeout) {
    auto view = init<gpuloan_view>();
    check(gpuloan_loan_acquire_on(need(), stream, detail::to_ms(timeout), &view));
    return view;
  }
  void used_on(void* stream) { check(gpuloan_loan_used_on(need(), stream)); }
  void done(void* stream) { check(gpuloan_loan_done(need(), stream)); }
  void give_back() { check(gpuloan_loan_return(need())); }
  void fail(const char* reason) { check(gpuloan_loan_fail(need(), reason)); }

  // Exporter.
  void ready(void* stream) { check(gpuloan_loan_ready(need(), stream)); }
  void reclaim(Milliseconds timeout) { check(gpuloan_reclaim(need(), detail::to_ms(timeout))); }
  void cancel(const char* reason) { check(gpuloan_loan_cancel(need(), reason)); }

  // Of loans of one context. The number of turns that are over, where one is refused, is lost: gpuloan_loan_done_many has it.
  static void done_many(const std::vector<Loan>& loans, void* stream) {
    std::vector<gpuloan_loan*> handles;
    handles.reserve(loans.size());
    for (const Loan& loan : loans) handles.push_back(loan.need());
    std::uint32_t count = 0;
    check(gpuloan_loan_done_many(handles.data(), static_cast<std::uint32_t>(handles.size()), stream, &count));
  }
  // Both.
  void wait_done(Milliseconds timeout) { check(gpuloan_loan_wait_done(need(), detail::to_ms(timeout))); }
  void wait_end(Milliseconds timeout) { check(gpuloan_loan_wait_end(need(), detail::to_ms(timeout))); }
  [[nodiscard]] gpuloan_loan_report report() const {
    auto report = init<gpuloan_loan_report>();
    check(gpuloan_loan_report_get(need(), &report));
    return report;
  }
  // A second owner of the same loan.
  [[nodiscard]] Loan share() const { return Loan(core(), gpuloan_loan_ref(need())); }
};

// Memory of the exporter's arena.
class Region : public detail::Owner<gpuloan_region, detail::end_region> {
 public:
  using Owner::Owner;
  [[nodiscard]] std::uint64_t pointer() const { return gpuloan_region_pointer(need()); }
  [[nodiscard]] void* host() const { return gpuloan_region_host(need()); }
  [[nodiscard]] std::uint64_t bytes() const { return gpuloan_region_bytes(need()); }
  void used_on(void* stream) { check(gpuloan_region_used_on(need(), stream)); }
  // Throws BUSY while a loan of it is out; the object then still owns the region.
  void destroy() {
    check(gpuloan_region_destroy(need()));
    static_cast<void>(release());
  }
};

// One connection to one process.
class Peer : public detail::Owner<gpuloan_peer, detail::end_peer> {
 public:
  using Owner::Owner;
  [[nodiscard]] gpuloan_peer_info info() const {
    auto info = init<gpuloan_peer_info>();
    check(gpuloan_peer_info_get(need(), &info));
    return info;
  }
  // Exporter.
  [[nodiscard]] Region create_region(const gpuloan_region_options& options) {
    gpuloan_region* region = nullptr;
    check(gpuloan_region_create(need(), &options, &region));
    return Region(core(), region);
  }
  [[nodiscard]] Loan lend(std::uint64_t pointer, std::uint64_t bytes, const gpuloan_lend_options& options) {
    gpuloan_loan* loan = nullptr;
    check(gpuloan_lend(need(), pointer, bytes, &options, &loan));
    return Loan(core(), loan);
  }
  // All or, when it throws, those that were lent before the range that cannot be: they are in `out`.
  void lend_many(const std::vector<gpuloan_range>& ranges, const gpuloan_lend_options& options, std::vector<Loan>& out) {
    std::vector<gpuloan_loan*> loans(ranges.size());
    std::uint32_t count = 0;
    out.reserve(out.size() + ranges.size());
    const gpuloan_status status = gpuloan_lend_many(need(), ranges.data(), static_cast<std::uint32_t>(ranges.size()), &options, loans.data(), &count);
    for (std::uint32_t at = 0; at < count; ++at) out.emplace_back(core(), loans[at]);
    check(status);
  }
  // Importer.
  [[nodiscard]] Loan request(const gpuloan_request_options& options) {
    gpuloan_loan* loan = nullptr;
    check(gpuloan_request_send(need(), &options, &loan));
    return Loan(core(), loan);
  }
};

// An importer's wish for a result buffer, at the exporter.
class Request : public detail::Owner<gpuloan_request, detail::end_request> {
 public:
  using Owner::Owner;
  struct Grant {
    Region region;
    Loan loan;
  };
  [[nodiscard]] gpuloan_request_info info() const {
    auto info = init<gpuloan_request_info>();
    check(gpuloan_request_info_get(need(), &info));
    return info;
  }
  // The request is consumed on success only; the pointers that info() gave end with it.
  [[nodiscard]] Grant grant(const gpuloan_lend_options* options = nullptr) {
    gpuloan_region* region = nullptr;
    gpuloan_loan* loan = nullptr;
    check(gpuloan_request_grant(need(), options, &region, &loan));
    static_cast<void>(release());
    return Grant{Region(core(), region), Loan(core(), loan)};
  }
  // With memory of the caller's own at `pointer`, which it keeps as for Peer::lend.
  [[nodiscard]] Loan grant_with(std::uint64_t pointer, const gpuloan_lend_options* options = nullptr) {
    gpuloan_loan* loan = nullptr;
    check(gpuloan_request_grant_with(need(), pointer, options, &loan));
    static_cast<void>(release());
    return Loan(core(), loan);
  }
  void deny(const char* reason) {
    check(gpuloan_request_deny(need(), reason));
    static_cast<void>(release());
  }
};

// What happened. Owns the request of REQUEST and the loan reference of LOAN_OFFERED until they are taken; all other
// handles are borrowed and serve to be compared with get().
class Event {
 public:
  Event(const std::shared_ptr<detail::Core>& core, const gpuloan_event& raw) : core_(core), raw_(raw) {
    if (raw.type == GPULOAN_EVENT_LOAN_OFFERED) loan_ = Loan(core, raw.loan);
    if (raw.type == GPULOAN_EVENT_REQUEST) request_ = Request(core, raw.request);
  }
  [[nodiscard]] gpuloan_event_type type() const noexcept { return static_cast<gpuloan_event_type>(raw_.type); }
  [[nodiscard]] gpuloan_status status() const noexcept { return raw_.status; }
  [[nodiscard]] const char* text() const noexcept { return raw_.text; }
  [[nodiscard]] gpuloan_peer* peer() const noexcept { return raw_.peer; }
  [[nodiscard]] gpuloan_loan* loan() const noexcept { return raw_.loan; }
  // PEER_READY only. Untaken, the connection stays open until the context ends.
  [[nodiscard]] Peer take_peer() { return Peer(core_, raw_.peer); }
  [[nodiscard]] Loan take_loan() { return std::move(loan_); }
  [[nodiscard]] Request take_request() { return std::move(request_); }

 private:
  std::shared_ptr<detail::Core> core_;
  gpuloan_event raw_;
  Loan loan_;
  Request request_;
};

class Context {
 public:
  Context() noexcept = default;
  [[nodiscard]] static Context create(const gpuloan_context_options& options) {
    Context context;
    context.core_ = std::make_shared<detail::Core>();
    check(gpuloan_context_create(&options, &context.core_->context));
    return context;
  }
  Context(Context&& other) noexcept = default;
  Context& operator=(Context&& other) noexcept {
    if (this != &other) {
      destroy();
      core_ = std::move(other.core_);
    }
    return *this;
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { destroy(); }

  // Ends all peers and loans and frees the arena; every object made from this context becomes empty.
  void destroy() noexcept {
    if (core_ == nullptr) return;
    if (gpuloan_context* context = std::exchange(core_->context, nullptr); context != nullptr) {
      gpuloan_context_destroy(context);
    }
    core_.reset();
  }

  [[nodiscard]] gpuloan_context* get() const noexcept { return core_ != nullptr ? core_->context : nullptr; }
  [[nodiscard]] int fd() const { return gpuloan_context_fd(need()); }
  void dispatch(Milliseconds timeout) { check(gpuloan_context_dispatch(need(), detail::to_ms(timeout))); }
  [[nodiscard]] std::optional<Event> next_event(Milliseconds timeout) {
    auto raw = init<gpuloan_event>();
    const gpuloan_status status = gpuloan_context_next_event(need(), detail::to_ms(timeout), &raw);
    if (status == GPULOAN_ERR_TIMEOUT) return std::nullopt;
    check(status);
    return std::make_optional<Event>(core_, raw);
  }
  [[nodiscard]] gpuloan_stats stats() const {
    auto stats = init<gpuloan_stats>();
    check(gpuloan_context_stats(need(), &stats));
    return stats;
  }

  // Exporter.
  [[nodiscard]] gpuloan_key invite(const char* account) {
    gpuloan_key key{};
    check(gpuloan_context_invite(need(), account, &key));
    return key;
  }
  void listen(const char* path) { check(gpuloan_context_listen(need(), path)); }
  // `fd` is the context's once this returns, and remains the caller's when it throws.
  void attach(int fd, const char* account) { check(gpuloan_context_attach(need(), fd, account)); }

  // Importer.
  [[nodiscard]] Peer connect(const char* path, const gpuloan_key& key, Milliseconds timeout) {
    gpuloan_peer* peer = nullptr;
    check(gpuloan_context_connect(need(), path, &key, detail::to_ms(timeout), &peer));
    return Peer(core_, peer);
  }
  // `fd` is the context's from this call on; only when it throws INVALID, STATE or FORKED does it remain the caller's.
  [[nodiscard]] Peer adopt(int fd, Milliseconds timeout) {
    gpuloan_peer* peer = nullptr;
    check(gpuloan_context_adopt(need(), fd, detail::to_ms(timeout), &peer));
    return Peer(core_, peer);
  }

 private:
  [[nodiscard]] gpuloan_context* need() const {
    if (gpuloan_context* context = get(); context != nullptr) return context;
    throw StatusError(GPULOAN_ERR_STATE, "the context is empty or has been destroyed");
  }
  std::shared_ptr<detail::Core> core_;
};

// EXPERIMENTAL: gpuloan_pool_install for as long as the object lives.
class InstalledPool {
 public:
  InstalledPool() noexcept = default;
  [[nodiscard]] static InstalledPool install(std::int32_t device) {
    check(gpuloan_pool_install(device));
    InstalledPool pool;
    pool.device_ = device;
    return pool;
  }
  InstalledPool(InstalledPool&& other) noexcept : device_(std::exchange(other.device_, std::nullopt)) {}
  InstalledPool& operator=(InstalledPool&& other) noexcept {
    if (this != &other) {
      reset();
      device_ = std::exchange(other.device_, std::nullopt);
    }
    return *this;
  }
  InstalledPool(const InstalledPool&) = delete;
  InstalledPool& operator=(const InstalledPool&) = delete;
  ~InstalledPool() { reset(); }

  // As the end of the object does, but says what went wrong; it then is installed still.
  void uninstall() {
    if (!device_) return;
    check(gpuloan_pool_uninstall(*device_));
    device_.reset();
  }

 private:
  void reset() noexcept {
    if (device_) static_cast<void>(gpuloan_pool_uninstall(*device_));
    device_.reset();
  }
  std::optional<std::int32_t> device_;
};

// 64 hexadecimal digits, and back (surrounding white space is fine).
[[nodiscard]] inline std::string format_key(const gpuloan_key& key) {
  char text[GPULOAN_KEY_TEXT_BYTES];
  gpuloan_key_format(&key, text);
  return text;
}
[[nodiscard]] inline gpuloan_key parse_key(const std::string& text) {
  gpuloan_key key{};
  check(gpuloan_key_parse(text.c_str(), &key));
  return key;
}

} // namespace gpuloan

#endif // C++17
