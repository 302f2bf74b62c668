// SPDX-License-Identifier: MIT
//
// The two processes of a measurement and the socket between them. Over it go commands, answers and descriptors, and, in
// the floors that a library is compared with, the records themselves: 128 bytes each way, as a hand-written program
// would send them.
#pragma once

#include "../child.hpp"
#include "../files.hpp"

namespace gpuloan::tool::bench {

enum class Op : std::uint32_t {
  Hello,      // worker to parent: it is up; no descriptor. Parent to worker: the library's end of a socketpair
  Words,      // the page of control words
  Chunk,      // VMM memory of `bytes`
  Drop,       // of that memory
  Drain,      // until its library has unmapped what the parent's recalls
  BareFill,   // of it with `value`, once; answered when it is done, `bytes` is the time in nanoseconds
  BareProbe,  // of it: filled, and its last word read back; with `count` only the first and last bytes are filled
  Pool,       // a pool, and in `text` the export data of its allocation of `bytes`
  BareSpin,   // `count` turns over the words, both sides spinning
  BareSocket, // `count` turns, a record each way
  BarePool,   // as BareSocket, with the pool's allocation, which is imported and freed in each turn
  Turns,      // `count` turns of the loan that is offered next
  LoanProbe,  // the next loan, as BareProbe
  Loans,      // the next `count` loans
  WholeLoan,  // the next loan; `bytes` of the answer is when READY was seen, on clock_ns()
  Copies,     // the next `count` read loans: taken and given back
  // The control plane's cases; `value` is the number of a context.
  Join,        // a peer more for that context
  Plain,       // a socket more for the floor
  Answer,      // the next `count` loans: what is there is taken and given back together
  Trips,       // the next `count` loans, one after the other
  Keep,        // the next `count` loans: taken
  GiveBack,    // of those that were kept all but `count`
  PlainAnswer, // `count` records of all the floor's sockets
  Pin,         // to CPU number `value` of those that it may use; `count` 0: to all of them again
  PlainTrips,  // `count` records of its last one, blocking
  Failed,     // `text` says why, `value` is the exit code for it, or 0
  Bye,
};

struct Message {
  Op op = Op::Bye;
  std::uint32_t count = 0;
  std::uint64_t bytes = 0;
  std::uint64_t value = 0;
  char text[104] = {};
};
static_assert(sizeof(Message) == 128);

class Channel {
 public:
  // Every call that waits gives up after `timeout_ms` (Failure), so that neither process outlives the other for long.
  Channel(Fd socket, std::uint32_t timeout_ms);
  void send(const Message& message, int fd = -1); // fd is borrowed
  [[nodiscard]] Message receive(Fd* fd = nullptr);
  [[nodiscard]] bool waits(Milliseconds timeout) const; // whether something is there to be received
  // The answer to what was sent; Failure with the worker's words when it could not.
  Message expect(Op op);

 private:
  Fd socket_;
};

// A record of a floor, blocking, with room for descriptors as a library would leave it. Failure when the other end is gone.
void plain_send(const Fd& end, std::span<const std::byte> record);
void plain_receive(const Fd& end, std::span<std::byte> record);

// All threads of this process to the `index`-th CPU of those that it could use when it began, or to all of them again. Nothing where it
// has but one.
void pin(std::optional<std::size_t> index);

// Hundreds of peers, with a few descriptors each.
void raise_descriptor_limit();

} // namespace gpuloan::tool::bench
