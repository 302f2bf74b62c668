// SPDX-License-Identifier: MIT
//
// The witness: who broke a claim is reported, and nobody else is.
#include "child.hpp"
#include "driver.hpp"

#include <string>
#include <unistd.h>

using namespace sim_test;

namespace {

constexpr std::uint32_t kAnybody = UINT32_MAX;

std::uint32_t self() { return static_cast<std::uint32_t>(::getpid()); }

std::string first_report() {
  char text[256] = "";
  return driver().witness_report(0, text, sizeof text) != 0 ? text : "";
}

std::string range_text(std::uint64_t offset, std::uint64_t bytes) {
  return "[" + std::to_string(offset) + ", +" + std::to_string(bytes) + ")";
}

} // namespace

TEST_CASE("who is named in a claim may touch it; memory that nobody claimed is free to all") {
  Machine machine;
  in_child([] {
    start();
    const DevicePtr chunk = map_chunk(create_chunk(2 * kMiB), 2 * kMiB);
    write_word(chunk, 1);
    CHECK(driver().claim(chunk + 4096, 8192, self(), 0, 0, 7) == Success);
    write_word(chunk + 4096, 2);
    CHECK(read_word(chunk + 4096) == 2); // who may write may read
    CHECK(driver().claim(chunk + 4096, 8192, 0, 0, kAnybody, 7) == Success); // other rights for the same claim
    CHECK(read_word(chunk + 12284) == 0);
    write_word(chunk + 4092, 3);
    write_word(chunk + 12288, 3);
    CHECK(driver().unclaim(chunk + 4096, 8192) == Success);
    write_word(chunk + 4096, 4);
    CHECK(driver().witness_reports() == 0);
    CHECK(first_report().empty());
  });
}

TEST_CASE("a touch that a claim does not allow is done and reported") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const DevicePtr chunk = map_chunk(create_chunk(2 * kMiB), 2 * kMiB);
    CHECK(cuda.claim(chunk + 4096, 8192, 0, 0, self(), 31) == Success);
    CHECK(read_word(chunk + 4096) == 0);
    CHECK(cuda.witness_reports() == 0);
    write_word(chunk + 12284, 5); // the last of its words
    CHECK(read_word(chunk + 12284) == 5);
    CHECK(cuda.witness_reports() == 2); // before and after
    const std::string text = first_report();
    CHECK(text.find("process " + std::to_string(self()) + " wrote " + range_text(12284, 4)) == 0);
    CHECK(text.find(range_text(4096, 8192) + " for writers 0 and 0, reader " + std::to_string(self()) + " (note 31)") != std::string::npos);
    CHECK(cuda.claim(chunk + 4096, 8192, 0, 0, 0, 31) == Success);
    CHECK(read_word(chunk + 4096) == 0);
    CHECK(cuda.witness_reports() == 4);
  });
}

TEST_CASE("work is judged when it runs, not when it is called") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const DevicePtr chunk = map_chunk(create_chunk(2 * kMiB), 2 * kMiB);
    const Stream stream = make_stream();
    CHECK(cuda.claim(chunk, 4096, self(), 0, 0, 0) == Success);
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuMemsetD8Async(chunk, 1, 4096, stream) == Success);
    CHECK(cuda.claim(chunk, 4096, self() + 1, 0, 0, 0) == Success); // the turn is over
    CHECK(cuda.witness_reports() == 0);
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(cuda.witness_reports() == 2);
  });
}

TEST_CASE("a claim holds for other processes at other addresses, and no two overlap") {
  Machine machine;
  Link link;
  Child owner([&] {
    start();
    const MemHandle handle = create_chunk(2 * kMiB);
    const DevicePtr chunk = map_chunk(handle, 2 * kMiB);
    CHECK(driver().claim(chunk + 4096, 4096, 5, self(), 0, 1) == Success);
    CHECK(driver().claim(chunk + 6000, 4096, 5, self(), 0, 1) == InvalidValue);
    CHECK(driver().claim(chunk, 4 * kMiB, self(), 0, 0, 1) == InvalidValue); // beyond the chunk
    CHECK(driver().claim(reinterpret_cast<std::uintptr_t>(&handle), 8, self(), 0, 0, 1) == InvalidValue);
    link.left().send_fd(export_fd(handle));
    static_cast<void>(link.left().hear());
    CHECK(driver().witness_reports() == 2);
  });
  Child guest([&] {
    start();
    const DevicePtr chunk = map_chunk(import_fd(link.right().receive_fd()), 2 * kMiB);
    write_word(chunk, 1);
    CHECK(driver().witness_reports() == 0);
    CHECK(driver().claim(chunk + 4096, 4096, self(), 0, 0, 2) == InvalidValue); // another's
    CHECK(driver().unclaim(chunk + 4096, 4096) == InvalidValue);
    write_word(chunk + 4096, 1);
    CHECK(driver().witness_reports() == 2);
    driver().unclaim_all(static_cast<std::uint32_t>(owner.pid()));
    write_word(chunk + 4096, 2);
    CHECK(driver().witness_reports() == 2);
    link.right().say(1);
  });
  guest.finish();
  owner.finish();
}

TEST_CASE("an orphan writes what its dead parent had mapped, and only then") {
  Machine machine;
  Link link, ready;
  Child owner([&] {
    const Driver& cuda = start();
    const MemHandle handle = create_chunk(2 * kMiB);
    const DevicePtr chunk = map_chunk(handle, 2 * kMiB);
    link.left().send_fd(export_fd(handle));
    const auto guest = static_cast<std::uint32_t>(link.left().hear());
    CHECK(cuda.claim(chunk, 8192, guest, 0, 0, 0) == Success);
    link.left().say(1);
    static_cast<void>(link.left().hear()); // the guest is dead
    CHECK(cuda.claim(chunk, 8192, 0, 0, self(), 0) == Success);
    for (int look = 0; look < 2000 && cuda.witness_reports() == 0; ++look) ::usleep(1000); // its first write may have been before the claim
    CHECK(cuda.witness_reports() > 0);
    CHECK(first_report().find("process " + std::to_string(guest) + " wrote " + range_text(4096, 4096)) == 0);
    for (int look = 0; look < 2000 && read_word(chunk + 4096) != 9; ++look) ::usleep(1000); // it is reported before it is made
    CHECK(read_word(chunk + 4096) == 9);
    CHECK(read_word(chunk) == 0);
  });
  Child guest([&] {
    const Driver& cuda = start();
    const DevicePtr chunk = map_chunk(import_fd(link.right().receive_fd()), 2 * kMiB);
    link.right().say(self());
    static_cast<void>(link.right().hear());
    CHECK(cuda.orphan_writer(chunk + 4096, 4096, 9, 1500) > 0);
    ::usleep(20'000);
    CHECK(read_word(chunk + 4096) == 0); // its parent lives
    CHECK(cuda.orphan_writer(chunk, 4 * kMiB, 9, 300) == -1);
    ready.right().say(1);
    ::pause();
  });
  static_cast<void>(ready.left().hear());
  guest.kill();
  link.right().say(1);
  owner.finish();
}
