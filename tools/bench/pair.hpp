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
  BareSpin,   // `count` turns over the words, both sides spinning
  BareSocket, // `count` turns, a record each way
  Turns,      // `count` turns of the loan that is offered next
  Loans,      // the next `count` loans
  Copies,     // the next `count` read loans: taken and given back
  Failed,     // `text` says why
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
  // The answer to what was sent; Failure with the worker's words when it could not.
  Message expect(Op op);

 private:
  Fd socket_;
};

} // namespace gpuloan::tool::bench
