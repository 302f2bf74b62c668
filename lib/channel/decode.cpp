// SPDX-License-Identifier: MIT
//
// The receive path as a checklist. Descriptors first: whatever is wrong with a record, those that came with it are owned
// from here on and closed with the error. Then the record, from the outside in: was all of it received, is it one of
// ours, does its type exist, does it carry exactly what it declares and what its type allows.
//
// Nothing in a record is believed: the peer wrote it. What is inside a body is the business of whoever handles the type.
#include <channel/control.hpp>
#include <channel/rules.hpp>
#include <channel/socket.hpp>

#include <cassert>
#include <string>

namespace gpuloan::channel {
namespace {

std::unexpected<Error> wrong(const std::string& what) { return fail(GPULOAN_ERR_PROTOCOL, "record: " + what); }

std::string number(std::size_t value) { return std::to_string(value); }

// HELLO and REFUSED keep their layout in every version, so that two sides without a common one can say so.
bool version_matters(std::uint16_t type) noexcept {
  return type != static_cast<std::uint16_t>(Type::Hello) && type != static_cast<std::uint16_t>(Type::Refused);
}

// Takes what the kernel delivered beside the data.
void take_control(const Control& control, Received& out) {
  out.sender.pidfd = UniqueFd::take(control.pidfd);
  try {
    out.fds.reserve(control.fd_count);
  } catch (const std::bad_alloc&) {
    for (std::size_t i = 0; i < control.fd_count; ++i) UniqueFd::take(control.fds[i]).reset();
    throw;
  }
  for (std::size_t i = 0; i < control.fd_count; ++i) out.fds.push(UniqueFd::take(control.fds[i]));
  if (!control.credentials) return;
  out.sender.known = true;
  out.sender.pid = control.credentials->pid;
  out.sender.uid = control.credentials->uid;
}

Result<void> check_arrival(const loop::Message& message, const Control& control) {
  if ((message.flags & MSG_TRUNC) != 0) {
    return wrong("longer than the " + number(kRecordBytes + kTailMax) + " bytes that any record may have");
  }
  if (control.fd_count > kMaxFds) return wrong("more than " + number(kMaxFds) + " descriptors came with it");
  if ((message.flags & MSG_CTRUNC) != 0) {
    return fail(GPULOAN_ERR_FD_LIMIT,
                "record: descriptors were lost on the way (MSG_CTRUNC): raise RLIMIT_NOFILE or close descriptors");
  }
  if (!control.well_formed) return wrong("malformed ancillary data");
  return {};
}

Result<void> check_header(const Header& header) {
  if (header.magic != kMagic) return wrong("magic " + number(header.magic) + " is not " + number(kMagic));
  if (version_matters(header.type) && (header.version < kVersionMin || header.version > kVersionMax)) {
    return wrong("version " + number(header.version) + " is not spoken here");
  }
  if (rule_of(header.type) == nullptr) return wrong("unknown type " + number(header.type));
  if (header.reserved != 0) return wrong("reserved header field is " + number(header.reserved));
  return {};
}

// Behind the tail, at the next step, another record may begin: then there are no descriptors.
std::size_t rest_at(const Header& header, std::size_t fds_came, std::size_t came) noexcept {
  const std::size_t next = bundle_step(header.tail_bytes);
  return fds_came == 0 && next < came && came - next >= kRecordBytes ? next : came;
}

Result<void> check_cargo(const Header& header, std::size_t fds_came, std::size_t tail_came) {
  const TypeRule& rule = *rule_of(header.type);
  if (header.fd_count != rule.fd_count) {
    return wrong(std::string(rule.name) + " declares " + number(header.fd_count) + " descriptors, must be " +
                 number(rule.fd_count));
  }
  if (header.fd_count != fds_came) {
    return wrong(std::string(rule.name) + " declares " + number(header.fd_count) + " descriptors, " +
                 number(fds_came) + " came");
  }
  if (header.tail_bytes > rule.tail_max) {
    return wrong(std::string(rule.name) + " declares a tail of " + number(header.tail_bytes) + " bytes, at most " +
                 number(rule.tail_max));
  }
  if (header.tail_bytes != tail_came) {
    return wrong(std::string(rule.name) + " declares a tail of " + number(header.tail_bytes) + " bytes, " +
                 number(tail_came) + " came");
  }
  return {};
}

Result<void> read_record(std::span<const std::byte> bytes, Received& out) {
  if (bytes.size() < kRecordBytes) return wrong(number(bytes.size()) + " bytes, shorter than " + number(kRecordBytes));
  // Engines align their buffers; a record is used where it lies.
  assert(reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(Record) == 0);
  out.record = reinterpret_cast<const Record*>(bytes.data());
  const std::span<const std::byte> behind = bytes.subspan(kRecordBytes);
  const Header& header = out.record->header;
  GPULOAN_TRY(check_header(header));
  const std::size_t rest = rest_at(header, out.fds.size(), behind.size());
  out.rest = behind.subspan(rest);
  out.tail = behind.first(out.rest.empty() ? rest : header.tail_bytes);
  return check_cargo(header, out.fds.size(), out.tail.size());
}

} // namespace

Result<Received> decode(const loop::Message& message) {
  Received out;
  const Control control = parse_control(message.control);
  take_control(control, out);
  GPULOAN_TRY(check_arrival(message, control));
  GPULOAN_TRY(read_record(message.data, out));
  return out;
}

Result<Received> decode_next(std::span<const std::byte> rest) {
  Received out;
  GPULOAN_TRY(read_record(rest, out));
  return out;
}

Record make_record(Type type) noexcept {
  Record record;
  std::memset(&record, 0, sizeof(record));
  record.header.magic = kMagic;
  record.header.version = version_matters(static_cast<std::uint16_t>(type)) ? kVersionMax : kVersionMin;
  record.header.type = static_cast<std::uint16_t>(type);
  return record;
}

void set_version(Record& record, std::uint16_t version) noexcept {
  if (version_matters(record.header.type)) record.header.version = version;
}

} // namespace gpuloan::channel
