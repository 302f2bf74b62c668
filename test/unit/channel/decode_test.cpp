// SPDX-License-Identifier: MIT
//
// decode() against peers that lie: every field of the header wrong in turn, counts that do not match what came, what
// the kernel cut off. Whatever is refused, no descriptor stays open.
#include "support.hpp"

#include <channel/rules.hpp>

using namespace gpuloan;
using namespace gpuloan::channel;

namespace {

// A good record of `type`: what it declares is there.
Letter good(Type type, std::size_t tail_bytes = 0) {
  Letter letter;
  Record record = make_record(type);
  record.header.fd_count = rule_of(record.header.type)->fd_count;
  record.header.tail_bytes = static_cast<std::uint16_t>(tail_bytes);
  letter.set(record, tail_bytes);
  if (record.header.fd_count != 0) letter.add_fds(record.header.fd_count);
  return letter;
}

template <typename Change>
Letter changed(Type type, Change&& change, std::size_t tail_bytes = 0) {
  Letter letter = good(type, tail_bytes);
  Record record;
  std::memcpy(&record, letter.data.data(), sizeof(record));
  change(record.header);
  std::memcpy(letter.data.data(), &record, sizeof(record));
  return letter;
}

template <typename Function>
void for_each_type(Function&& function) {
  for (std::uint16_t number = 1; number <= kTypeMax; ++number) {
    CAPTURE(rule_of(number)->name);
    function(*rule_of(number));
  }
}

} // namespace

TEST_CASE("every type is accepted with what it may carry") {
  const DescriptorGuard guard;
  for_each_type([](const TypeRule& rule) {
    for (const std::size_t tail : {std::size_t{0}, std::size_t{rule.tail_max}}) {
      const Letter letter = good(rule.type, tail);
      const auto received = decode(letter.message());
      REQUIRE_MESSAGE(received.has_value(), received.error().text);
      CHECK(received->type() == rule.type);
      CHECK(received->tail.size() == tail);
      CHECK(received->fds.size() == rule.fd_count);
      CHECK_FALSE(received->sender.known);
    }
  });
}

TEST_CASE("a wrong header field is refused and named") {
  const DescriptorGuard guard;
  struct Wrong {
    void (*change)(Header&);
    const char* text;
  };
  const Wrong wrongs[] = {
      {[](Header& h) { h.magic = 0; }, "magic"},
      {[](Header& h) { h.magic = __builtin_bswap32(h.magic); }, "magic"},
      {[](Header& h) { h.version = 0; }, "version 0"},
      {[](Header& h) { h.version = kVersionMax + 1; }, "version 2"},
      {[](Header& h) { h.type = 0; }, "unknown type 0"},
      {[](Header& h) { h.type = kTypeMax + 1; }, "unknown type 29"},
      {[](Header& h) { h.type = 0xFFFF; }, "unknown type 65535"},
      {[](Header& h) { h.reserved = 1; }, "reserved"},
      {[](Header& h) { h.fd_count = 0; }, "CHUNK declares 0 descriptors, must be 1"},
      {[](Header& h) { h.fd_count = 2; }, "CHUNK declares 2 descriptors, must be 1"},
      {[](Header& h) { h.fd_count = 0xFFFF; }, "CHUNK declares 65535 descriptors"},
      {[](Header& h) { h.tail_bytes = 1; }, "CHUNK declares a tail of 1 bytes, at most 0"},
      {[](Header& h) { h.tail_bytes = 0xFFFF; }, "CHUNK declares a tail of 65535 bytes"},
  };
  for (const Wrong& wrong : wrongs) {
    const Letter letter = changed(Type::Chunk, wrong.change);
    check_fails(decode(letter.message()), GPULOAN_ERR_PROTOCOL, wrong.text);
  }
}

namespace {

// A message of these records.
Letter several(std::initializer_list<std::pair<Type, std::size_t>> records) {
  Bundle bundle;
  std::array<std::byte, kTailMax> tail = {};
  for (const auto& [type, bytes] : records) CHECK(bundle.add(make_record(type), std::span(tail).first(bytes)));
  Letter letter;
  std::memcpy(letter.data.data(), bundle.bytes().data(), bundle.bytes().size());
  letter.data_bytes = bundle.bytes().size();
  return letter;
}

} // namespace

TEST_CASE("the records of one message come in their order, each with its tail") {
  const Letter letter = several({{Type::Export, 5}, {Type::Ready, 0}, {Type::Cancel, 16}});
  const auto first = decode(letter.message());
  REQUIRE(first.has_value());
  CHECK((first->type() == Type::Export && first->tail.size() == 5));
  const auto second = decode_next(first->rest);
  REQUIRE(second.has_value());
  CHECK((second->type() == Type::Ready && second->tail.empty()));
  const auto third = decode_next(second->rest);
  REQUIRE(third.has_value());
  CHECK((third->type() == Type::Cancel && third->tail.size() == 16 && third->rest.empty()));
}

TEST_CASE("a message holds what a receiver has room for") {
  Bundle bundle;
  std::size_t records = 0;
  while (bundle.add(make_record(Type::Ack), {})) ++records;
  CHECK(records == (kRecordBytes + kTailMax) / kRecordBytes);
  CHECK(bundle.bytes().size() <= loop::kDataBytes);
  bundle.clear();
  CHECK(bundle.bytes().empty());
  CHECK(bundle.add(make_record(Type::Ack), {}));
}

TEST_CASE("a second record that is cut, or lies, is refused") {
  const DescriptorGuard guard;
  Letter cut = several({{Type::Ready, 0}, {Type::Ready, 0}});
  cut.data_bytes -= 1;
  check_fails(decode(cut.message()), GPULOAN_ERR_PROTOCOL, "tail of 0 bytes, 127 came");
  cut = several({{Type::Ready, 0}, {Type::Ready, 0}, {Type::Ready, 0}});
  cut.data_bytes -= 64;
  auto first = decode(cut.message());
  REQUIRE(first.has_value());
  check_fails(decode_next(first->rest), GPULOAN_ERR_PROTOCOL, "tail of 0 bytes, 64 came");
  struct Wrong {
    void (*change)(Header&);
    const char* text;
  };
  for (const Wrong& wrong : {Wrong{[](Header& h) { h.magic = 0; }, "magic"}, {[](Header& h) { h.type = 0; }, "unknown type 0"},
                             {[](Header& h) { h.tail_bytes = 0xFFFF; }, "tail of 65535"}, {[](Header& h) { h.fd_count = 1; }, "declares 1 descriptors"}}) {
    Letter letter = several({{Type::Ready, 0}, {Type::Ready, 0}});
    Header second;
    std::memcpy(&second, letter.data.data() + kRecordBytes, sizeof second);
    wrong.change(second);
    std::memcpy(letter.data.data() + kRecordBytes, &second, sizeof second);
    first = decode(letter.message());
    REQUIRE(first.has_value());
    check_fails(decode_next(first->rest), GPULOAN_ERR_PROTOCOL, wrong.text);
  }
}

TEST_CASE("descriptors belong to a record that is alone in its message") {
  const DescriptorGuard guard;
  Letter before = good(Type::Chunk); // the first record's
  const Record more = make_record(Type::Ready);
  std::memcpy(before.data.data() + before.data_bytes, &more, sizeof more);
  before.data_bytes += sizeof more;
  check_fails(decode(before.message()), GPULOAN_ERR_PROTOCOL, "CHUNK declares a tail of 0 bytes, 128 came");
  Letter behind = good(Type::Chunk); // the second record's
  Letter both = several({{Type::Ready, 0}, {Type::Chunk, 0}});
  std::memcpy(behind.data.data(), both.data.data(), both.data_bytes);
  behind.data_bytes = both.data_bytes;
  check_fails(decode(behind.message()), GPULOAN_ERR_PROTOCOL, "READY declares 0 descriptors, 1 came");
}

TEST_CASE("HELLO and REFUSED are read whatever their version") {
  for (const Type type : {Type::Hello, Type::Refused}) {
    for (const std::uint16_t version : {std::uint16_t{0}, std::uint16_t{1}, std::uint16_t{2}, std::uint16_t{0xFFFF}}) {
      const Letter letter = changed(type, [&](Header& h) { h.version = version; });
      CHECK(decode(letter.message()).has_value());
    }
  }
  const Letter welcome = changed(Type::Welcome, [](Header& h) { h.version = 2; });
  check_fails(decode(welcome.message()), GPULOAN_ERR_PROTOCOL, "version 2");
}

TEST_CASE("a record shorter than a record is refused") {
  const DescriptorGuard guard;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, sizeof(Header), kRecordBytes - 1}) {
    Letter letter = good(Type::Chunk);
    letter.data_bytes = bytes;
    check_fails(decode(letter.message()), GPULOAN_ERR_PROTOCOL, "shorter than 128");
  }
}

TEST_CASE("a tail that is longer or shorter than declared is refused") {
  for_each_type([](const TypeRule& rule) {
    if (rule.tail_max == 0) {
      Letter letter = good(rule.type);
      letter.data_bytes += 1;
      check_fails(decode(letter.message()), GPULOAN_ERR_PROTOCOL, "tail of 0 bytes, 1 came");
      return;
    }
    Letter letter = good(rule.type, 24);
    letter.data_bytes -= 1;
    check_fails(decode(letter.message()), GPULOAN_ERR_PROTOCOL, "tail of 24 bytes, 23 came");
    letter.data_bytes += 2;
    check_fails(decode(letter.message()), GPULOAN_ERR_PROTOCOL, "tail of 24 bytes, 25 came");
    const auto one_more = static_cast<std::uint16_t>(rule.tail_max + 1);
    const Letter above = changed(rule.type, [&](Header& h) { h.tail_bytes = one_more; }, rule.tail_max);
    check_fails(decode(above.message()), GPULOAN_ERR_PROTOCOL, "at most");
  });
}

TEST_CASE("descriptors that were not declared, or declared and did not come") {
  const DescriptorGuard guard;
  for_each_type([](const TypeRule& rule) {
    Letter surplus = good(rule.type);
    surplus.add_fds(1);
    check_fails(decode(surplus.message()), GPULOAN_ERR_PROTOCOL, rule.fd_count == 0 ? "0 descriptors, 1 came" : "1 descriptors, 2 came");
    if (rule.fd_count == 0) {
      const Letter claimed = changed(rule.type, [](Header& h) { h.fd_count = 1; });
      check_fails(decode(claimed.message()), GPULOAN_ERR_PROTOCOL, "must be 0");
      return;
    }
    Letter missing;
    Record record = make_record(rule.type);
    record.header.fd_count = 1;
    missing.set(record);
    check_fails(decode(missing.message()), GPULOAN_ERR_PROTOCOL, "1 descriptors, 0 came");
  });
}

TEST_CASE("many descriptors, in one header or several, are all closed") {
  const DescriptorGuard guard;
  Letter many = good(Type::Done);
  many.add_fds(kMaxFds + 1);
  check_fails(decode(many.message()), GPULOAN_ERR_PROTOCOL, "more than 64 descriptors");
  Letter split = good(Type::Chunk);
  split.add_fds(3);
  split.add_fds(2);
  check_fails(decode(split.message()), GPULOAN_ERR_PROTOCOL, "1 descriptors, 6 came");
}

// D1
TEST_CASE("what the kernel cut off") {
  const DescriptorGuard guard;
  Letter truncated = good(Type::Chunk);
  truncated.flags = MSG_TRUNC;
  check_fails(decode(truncated.message()), GPULOAN_ERR_PROTOCOL, "longer than the 4224 bytes");

  Letter lost = good(Type::Chunk);
  lost.control_bytes = 0;
  close(*reinterpret_cast<int*>(lost.control.data() + CMSG_LEN(0)));
  lost.flags = MSG_CTRUNC | MSG_CMSG_CLOEXEC;
  check_fails(decode(lost.message()), GPULOAN_ERR_FD_LIMIT, "RLIMIT_NOFILE");

  // The record is complete, yet something was lost beside it.
  Letter complete = good(Type::Chunk);
  complete.flags = MSG_CTRUNC;
  check_fails(decode(complete.message()), GPULOAN_ERR_FD_LIMIT, "MSG_CTRUNC");

  Letter flooded = good(Type::Done);
  flooded.add_fds(kMaxFds + 1);
  flooded.flags = MSG_CTRUNC;
  check_fails(decode(flooded.message()), GPULOAN_ERR_PROTOCOL, "more than 64 descriptors");

  Letter flagged = good(Type::Done); // bits that are no loss
  flagged.flags = MSG_EOR | MSG_CMSG_CLOEXEC;
  CHECK(decode(flagged.message()).has_value());
}

TEST_CASE("credentials and pidfd name the sender") {
  const DescriptorGuard guard;
  Letter letter = good(Type::Hello);
  const ucred who = {4321, 1000, 100};
  letter.add(SCM_CREDENTIALS, &who, sizeof(who));
  const int pidfd = make_eventfd().release();
  letter.add(loop::kScmPidfd, &pidfd, sizeof(pidfd));
  const auto received = decode(letter.message());
  REQUIRE(received.has_value());
  CHECK(received->sender.known);
  CHECK(received->sender.pid == 4321);
  CHECK(received->sender.uid == 1000);
  CHECK(received->sender.pidfd.get() == pidfd);
  CHECK(received->fds.size() == 0);
}

TEST_CASE("a pidfd that could not be made, and one too many") {
  const DescriptorGuard guard;
  Letter none = good(Type::Done);
  const int error = -ESRCH;
  none.add(loop::kScmPidfd, &error, sizeof(error));
  const auto received = decode(none.message());
  REQUIRE(received.has_value());
  CHECK_FALSE(received->sender.pidfd);

  Letter two = good(Type::Done);
  for (int i = 0; i < 2; ++i) {
    const int fd = make_eventfd().release();
    two.add(loop::kScmPidfd, &fd, sizeof(fd));
  }
  check_fails(decode(two.message()), GPULOAN_ERR_PROTOCOL, "0 descriptors, 1 came");
}

TEST_CASE("malformed ancillary data is refused, and what was readable of it is closed") {
  const DescriptorGuard guard;
  Letter letter = good(Type::Chunk);
  letter.control_bytes += 5;
  check_fails(decode(letter.message()), GPULOAN_ERR_PROTOCOL, "ancillary");
  Letter short_credentials = good(Type::Chunk);
  const int half = 0;
  short_credentials.add(SCM_CREDENTIALS, &half, sizeof(half));
  check_fails(decode(short_credentials.message()), GPULOAN_ERR_PROTOCOL, "ancillary");
}

TEST_CASE("make_record: zeroed, with a header that decode accepts") {
  for_each_type([](const TypeRule& rule) {
    const Record record = make_record(rule.type);
    CHECK(record.header.magic == kMagic);
    CHECK(record.header.version == 1);
    CHECK(record.header.type == static_cast<std::uint16_t>(rule.type));
    const std::array<unsigned char, 112> zero = {};
    CHECK(std::memcmp(reinterpret_cast<const unsigned char*>(&record) + sizeof(Header), zero.data(), zero.size()) == 0);
    CHECK(record.header.fd_count == 0);
    CHECK(record.header.tail_bytes == 0);
    CHECK(record.header.reserved == 0);
  });
}

TEST_CASE("rules: names and what each type may carry") {
  std::size_t with_fd = 0;
  for_each_type([&](const TypeRule& rule) {
    CHECK(std::string_view(rule.name) == type_name(rule.type));
    CHECK(rule.fd_count <= 1);
    CHECK(rule.tail_max <= kTailMax);
    with_fd += rule.fd_count;
  });
  CHECK(with_fd == 6); // PAGES, CHUNK, RING
  CHECK(rule_of(0) == nullptr);
  CHECK(rule_of(kTypeMax + 1) == nullptr);
  CHECK(std::string_view(type_name(static_cast<Type>(0))) == "unknown");
}
