// SPDX-License-Identifier: MIT
//
// An exporter made by hand hands over a block of this process's: what the worker's library opened it has closed again, whatever number
// the block has, and whether or not the loan that it was announced for ever came. A block that is still open somewhere keeps its memory
// when it is freed.
#include "../process/raw_client.hpp"
#include "suite_foreign.hpp"

#include <cstring>

namespace loan_test {
namespace {

using channel::Record;
using channel::Type;

constexpr std::uint64_t kBlock = std::uint64_t{4} << 20;

class HandMade {
 public:
  explicit HandMade(const Bench& bench) : bench_(bench), worker_(bench), wire_(Fd(worker_.take_loan_end())) {
    worker_.post(worker_.open_command());
    static_cast<void>(wire_.expect_type(Type::Hello));
    Record welcome = raw_record(Type::Welcome);
    welcome.welcome.version = 1;
    welcome.welcome.slots = 64;
    wire_.show_pages(welcome);
    const Reply reply = worker_.reply();
    if (reply.status != GPULOAN_OK) fail(std::string("the worker cannot open: ") + reply.text);
  }
  void announce(std::uint64_t chunk, std::uint64_t buffer, std::uint64_t block) {
    const cuda::IpcMemHandle handle = legacy_handle(bench_, block);
    unsigned char tail[sizeof handle];
    std::memcpy(tail, &handle, sizeof handle);
    Record record = raw_record(Type::Foreign);
    record.header.tail_bytes = sizeof tail;
    record.foreign.chunk = chunk;
    record.foreign.bytes = kBlock;
    record.foreign.buffer = buffer;
    record.foreign.kind = static_cast<std::uint32_t>(channel::ForeignKind::Legacy);
    record.foreign.access = GPULOAN_ACCESS_READ;
    expect(wire_.send(record, tail), "the worker is gone");
  }
  // A loan of all of it, with the number of its chunk, whose turn 1 is ready.
  [[nodiscard]] Borrowed lend(std::uint64_t chunk) {
    Record record = raw_record(Type::Export);
    record.export_.loan = record.export_.chunk = chunk;
    record.export_.bytes = kBlock;
    record.export_.generation = 1;
    record.export_.access = GPULOAN_ACCESS_READ;
    record.export_.rung = GPULOAN_RUNG_IPC;
    record.export_.gate = GPULOAN_GATE_HOST;
    record.export_.memory = GPULOAN_MEMORY_DEVICE;
    record.export_.flags = channel::ExportReady;
    expect(wire_.send(record), "the worker is gone");
    return worker_.offered(chunk);
  }
  [[nodiscard]] RawClient& wire() noexcept { return wire_; }
  [[nodiscard]] Worker& worker() noexcept { return worker_; }

 private:
  const Bench& bench_;
  Worker worker_;
  RawClient wire_;
};

// The worker and its connection are still there: only a closed block's memory comes back.
void free_closed(const Bench& bench, std::uint64_t block, std::string_view what) {
  const std::uint64_t used = bench.gpu.used_bytes();
  bench.gpu.free(block);
  expect(becomes([&] { return bench.gpu.used_bytes() + kBlock <= used; }), std::string(what) + ": the worker has not closed the block");
}

} // namespace

// A1: any number names a block, 0 too; closed before the ACK.
void any_buffer_number(const Bench& bench) {
  HandMade exporter(bench);
  std::uint64_t chunk = 0;
  for (const std::uint64_t buffer : {std::uint64_t{1}, std::uint64_t{0}, UINT64_MAX, std::uint64_t{0}}) {
    const std::uint64_t block = bench.gpu.alloc(kBlock);
    bench.gpu.upload(block, kBlock, ++chunk);
    bench.gpu.sync();
    exporter.announce(chunk, buffer, block);
    Borrowed loan = exporter.lend(chunk);
    loan.acquire();
    loan.check(chunk);
    loan.done();
    const Record ack = exporter.wire().expect_type(Type::Ack).record;
    expect_equal(ack.ack.outcome, static_cast<std::int32_t>(GPULOAN_OK), "outcome in ACK");
    free_closed(bench, block, "buffer " + std::to_string(buffer));
  }
  exporter.worker().close();
}

// A4: the exporter is lost between FOREIGN and its EXPORT. The other loan of that block is its last.
void announced_and_lost(const Bench& bench) {
  HandMade exporter(bench);
  const std::uint64_t block = bench.gpu.alloc(kBlock);
  bench.gpu.upload(block, kBlock, 1);
  bench.gpu.sync();
  exporter.announce(1, 7, block);
  Borrowed loan = exporter.lend(1);
  loan.acquire();
  exporter.announce(2, 7, block);
  expect(exporter.wire().send(raw_record(Type::Recall)), "the worker is gone"); // of no chunk
  exporter.worker().event(GPULOAN_EVENT_PEER_LOST, GPULOAN_ERR_PROTOCOL);
  loan.check(1); // unmapped when its borrower lets go, not before
  loan.give_back();
  expect_status(loan.wait_end().status, GPULOAN_ERR_PEER_LOST, "outcome of the loan");
  free_closed(bench, block, "announced twice");
  exporter.worker().close();
}

} // namespace loan_test
