// SPDX-License-Identifier: MIT
#include "raw_client.hpp"

#include "../support/check.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace loan_test {
namespace {

void read_boot_id(unsigned char (&out)[16]) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  std::erase(text, '-');
  expect(text.size() == 32, "no boot id");
  for (std::size_t at = 0; at < 16; ++at) out[at] = static_cast<unsigned char>(std::stoul(text.substr(at * 2, 2), nullptr, 16));
}

} // namespace

channel::Record raw_record(channel::Type type) {
  channel::Record record;
  std::memset(&record, 0, sizeof record);
  record.header.magic = 0x4E4F4C47;
  record.header.version = 1;
  record.header.type = static_cast<std::uint16_t>(type);
  return record;
}

channel::Record raw_hello(const gpuloan_key* key) {
  channel::Record record = raw_record(channel::Type::Hello);
  record.hello.version_min = 1;
  record.hello.version_max = 1;
  record.hello.features = 1;
  read_boot_id(record.hello.boot_id);
  if (key != nullptr) {
    record.hello.has_key = 1;
    std::memcpy(record.hello.key, key->bytes, sizeof record.hello.key);
  }
  return record;
}

RawClient RawClient::connect(const std::string& path) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  expect(path.size() < sizeof address.sun_path, "the path is too long");
  std::memcpy(address.sun_path, path.c_str(), path.size());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    fail(std::string("connect: ") + std::strerror(errno));
  }
  return RawClient(std::move(socket));
}

bool RawClient::send_bytes(std::span<const unsigned char> bytes, std::span<const int> fds) {
  std::vector<unsigned char> copy(bytes.begin(), bytes.end());
  iovec part = {copy.data(), copy.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) unsigned char control[CMSG_SPACE(sizeof(int) * 250)] = {};
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(copy.size());
}

bool RawClient::send(const channel::Record& record, std::span<const unsigned char> tail, std::span<const int> fds) {
  std::vector<unsigned char> bytes(sizeof record);
  std::memcpy(bytes.data(), &record, sizeof record);
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  return send_bytes(bytes, fds);
}

std::optional<RawClient::Message> RawClient::receive() {
  pollfd ready = {socket_.get(), POLLIN, 0};
  expect(::poll(&ready, 1, static_cast<int>(kWaitMs)) == 1, "the exporter says nothing");
  unsigned char bytes[sizeof(channel::Record) + channel::kTailMax] = {};
  alignas(cmsghdr) unsigned char control[CMSG_SPACE(sizeof(int) * 8)] = {};
  iovec part = {bytes, sizeof bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t length = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  if (length <= 0) return std::nullopt;
  Message out;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
      out.fds.emplace_back(fd);
    }
  }
  expect(length >= static_cast<ssize_t>(sizeof out.record), "the exporter sent half a record");
  std::memcpy(&out.record, bytes, sizeof out.record);
  out.tail.assign(bytes + sizeof out.record, bytes + length);
  return out;
}

RawClient::Message RawClient::expect_type(channel::Type type) {
  auto message = receive();
  expect(message.has_value(), "the exporter hung up");
  expect_equal(static_cast<int>(message->type()), static_cast<int>(type), "type of the record");
  return std::move(*message);
}

std::string RawClient::expect_refused(gpuloan_status status) {
  const Message message = expect_type(channel::Type::Refused);
  expect_equal(message.record.notice.status, static_cast<std::int32_t>(status), "status in REFUSED");
  expect(!message.tail.empty(), "REFUSED without a sentence");
  expect_closed();
  return message.text();
}

void RawClient::expect_closed() {
  const std::uint64_t end = now_ms() + kWaitMs;
  while (receive()) expect(now_ms() < end, "the exporter goes on talking");
}

void RawClient::shake_hands(const channel::Record& hello) {
  expect(send(hello), "the exporter is gone");
  const Message welcome = expect_type(channel::Type::Welcome);
  expect_equal(welcome.record.welcome.version, 1, "version in WELCOME");
  expect_equal(welcome.record.header.version, 1, "version in the header of WELCOME");
  const Message pages = expect_type(channel::Type::Pages);
  expect_equal(pages.fds.size(), 1U, "descriptors of PAGES");
  void* mapped = ::mmap(nullptr, pages.record.pages.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pages.fds[0].get(), 0);
  expect(mapped != MAP_FAILED, "the control pages cannot be mapped");
  expect(send(raw_record(channel::Type::PagesMapped)), "the exporter is gone");
  static_cast<void>(expect_type(channel::Type::PagesSealed));
  expect(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, pages.fds[0].get(), 0) == MAP_FAILED, "sealed pages can be mapped for writing");
  ::munmap(mapped, pages.record.pages.bytes);
  expect(send(raw_record(channel::Type::PagesChecked)), "the exporter is gone");
  expect_equal(expect_type(channel::Type::Tether).fds.size(), 1U, "descriptors of TETHER");
}

void RawClient::show_pages(const channel::Record& welcome) {
  expect(send(welcome), "the importer is gone");
  const std::uint64_t bytes = std::uint64_t{welcome.welcome.slots} * 128;
  const Fd pages(::memfd_create("pages", MFD_CLOEXEC | MFD_ALLOW_SEALING)), tether(::memfd_create("tether", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  expect(::ftruncate(pages.get(), static_cast<off_t>(bytes)) == 0 && ::ftruncate(tether.get(), 4096) == 0, "ftruncate");
  const std::uint64_t ready = std::uint64_t{1} << 32 | 1;
  for (std::uint64_t at = 0; at < bytes; at += 64) {
    expect(::pwrite(pages.get(), &ready, sizeof ready, static_cast<off_t>(at)) == sizeof ready, "pwrite");
  }
  channel::Record record = raw_record(channel::Type::Pages);
  record.header.fd_count = 1;
  record.pages.bytes = bytes;
  record.pages.slots = welcome.welcome.slots;
  const int pages_fd = pages.get(), tether_fd = tether.get();
  expect(send(record, {}, std::span(&pages_fd, 1)), "the importer is gone");
  static_cast<void>(expect_type(channel::Type::PagesMapped));
  expect(::fcntl(pages_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0, "F_ADD_SEALS");
  expect(send(raw_record(channel::Type::PagesSealed)), "the importer is gone");
  static_cast<void>(expect_type(channel::Type::PagesChecked));
  record = raw_record(channel::Type::Tether);
  record.header.fd_count = 1;
  expect(send(record, {}, std::span(&tether_fd, 1)), "the importer is gone");
}

void RawClient::send_refused(std::uint16_t version, gpuloan_status status, std::string_view why) {
  channel::Record refused = raw_record(channel::Type::Refused);
  refused.header.version = version;
  refused.header.tail_bytes = static_cast<std::uint16_t>(why.size());
  refused.notice.status = status;
  send(refused, {reinterpret_cast<const unsigned char*>(why.data()), why.size()});
}

RawListener::RawListener(const std::string& path) : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  expect(path.size() < sizeof address.sun_path, "the path is too long");
  std::memcpy(address.sun_path, path.c_str(), path.size());
  expect(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 && ::listen(socket_.get(), 4) == 0, "listen");
}

RawClient RawListener::accept() {
  pollfd ready = {socket_.get(), POLLIN, 0};
  expect(::poll(&ready, 1, static_cast<int>(kWaitMs)) == 1, "nobody connects");
  Fd end(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const int on = 1; // as an exporter does; the importer asks the same of us
  expect(::setsockopt(end.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0, "SO_PASSCRED");
  return RawClient(std::move(end));
}

} // namespace loan_test
