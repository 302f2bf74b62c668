// SPDX-License-Identifier: MIT
//
// The walk over a control buffer: well-formed buffers, and bytes that nobody should send.
#include "support.hpp"

#include <random>

using namespace gpuloan;
using namespace gpuloan::loop;

namespace {

using Bytes = std::vector<std::byte>;

// Appends one item. `claimed` is its cmsg_len, 0: the true one.
void append(Bytes& bytes, int level, int type, const std::vector<int>& values, std::size_t claimed = 0) {
  const std::size_t start = bytes.size();
  bytes.resize(start + CMSG_SPACE(values.size() * sizeof(int)));
  cmsghdr header = {};
  header.cmsg_level = level;
  header.cmsg_type = type;
  header.cmsg_len = claimed != 0 ? claimed : CMSG_LEN(values.size() * sizeof(int));
  std::memcpy(bytes.data() + start, &header, sizeof(header));
  if (!values.empty()) std::memcpy(bytes.data() + start + CMSG_LEN(0), values.data(), values.size() * sizeof(int));
}

struct Walked {
  bool whole = false;
  std::vector<int> descriptors;
  std::vector<std::size_t> sizes;
};

Walked walk(std::span<const std::byte> bytes) {
  Walked out;
  out.whole = walk_control(bytes, [&](const ControlItem& item) {
    out.sizes.push_back(item.data.size());
    for_each_descriptor(item, [&](int fd) { out.descriptors.push_back(fd); });
  });
  return out;
}

} // namespace

TEST_CASE("an empty buffer has no items") {
  const Walked walked = walk({});
  CHECK(walked.whole);
  CHECK(walked.sizes.empty());
}

TEST_CASE("several headers add up, in order, and other types are passed over") {
  Bytes bytes;
  append(bytes, SOL_SOCKET, SCM_RIGHTS, {10, 11, 12});
  append(bytes, SOL_SOCKET, SCM_CREDENTIALS, {1, 2, 3});
  append(bytes, SOL_SOCKET, kScmPidfd, {13});
  append(bytes, SOL_SOCKET + 1, SCM_RIGHTS, {99});
  append(bytes, SOL_SOCKET, SCM_RIGHTS, {});
  append(bytes, SOL_SOCKET, SCM_RIGHTS, {14});
  const Walked walked = walk(bytes);
  CHECK(walked.whole);
  CHECK(walked.descriptors == std::vector<int>{10, 11, 12, 13, 14});
  CHECK(walked.sizes == std::vector<std::size_t>{12, 12, 4, 4, 0, 4});
}

TEST_CASE("the last item may lack its padding") {
  Bytes bytes;
  append(bytes, SOL_SOCKET, SCM_RIGHTS, {10});
  bytes.resize(CMSG_LEN(sizeof(int)));
  const Walked walked = walk(bytes);
  CHECK(walked.whole);
  CHECK(walked.descriptors == std::vector<int>{10});
}

TEST_CASE("a pidfd that the kernel could not make is no descriptor") {
  Bytes bytes;
  append(bytes, SOL_SOCKET, kScmPidfd, {-ESRCH});
  CHECK(walk(bytes).descriptors.empty());
}

TEST_CASE("lengths that do not fit end the walk") {
  for (const std::size_t claimed : {std::size_t{1}, CMSG_LEN(0) - 1, CMSG_LEN(5 * sizeof(int)), ~std::size_t{0},
                                    ~std::size_t{0} - 7}) {
    CAPTURE(claimed);
    Bytes bytes;
    append(bytes, SOL_SOCKET, SCM_RIGHTS, {10});
    append(bytes, SOL_SOCKET, SCM_RIGHTS, {11}, claimed);
    const Walked walked = walk(bytes);
    CHECK_FALSE(walked.whole);
    CHECK(walked.descriptors == std::vector<int>{10});
  }
  Bytes stub(sizeof(cmsghdr) - 1);
  CHECK_FALSE(walk(stub).whole);
}

TEST_CASE("a length that is no multiple of a descriptor's leaves the rest out") {
  Bytes bytes;
  append(bytes, SOL_SOCKET, SCM_RIGHTS, {10, 11}, CMSG_LEN(sizeof(int) + 3));
  const Walked walked = walk(bytes);
  CHECK(walked.descriptors == std::vector<int>{10});
}

TEST_CASE("any bytes are walked within their bounds") {
  std::mt19937 random(4711); // fixed: a failure can be repeated
  for (int round = 0; round < 20'000; ++round) {
    // Exactly as long as its content, so that a sanitizer sees one byte too many.
    Bytes bytes(random() % 96);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 4 == 0 ? random() : random() % 32);
    std::size_t seen = 0;
    for (const std::size_t size : walk(bytes).sizes) seen += size;
    CHECK(seen <= bytes.size());
  }
}
