// SPDX-License-Identifier: MIT
//
// A peer with a good handshake that then breaks the protocol, in the handshake's later steps, at rest, and with loans out.
// Each kind of breach drops that peer, with PROTOCOL where it lied about the protocol, and an ordinary peer of the same
// exporter goes on.
#include "raw_client.hpp"

#include "../support/run.hpp"

#include <cstdio>
#include <cstring>

namespace loan_test {
namespace {

using channel::Record;
using channel::Type;

// An exporter with one ordinary peer and room for hostile ones.
struct Scene {
  // A peer made by hand answers no canary: the host rung carries its loans unproven once the budget is over.
  explicit Scene(const Bench& bench_)
      : bench(bench_), exporter(bench_, [](gpuloan_context_options& options) { options.canary_timeout_ms = 100; }), worker(bench_), peer(exporter.attach(worker)) {}

  struct Enemy {
    RawClient client;
    gpuloan_peer* peer = nullptr;
  };
  [[nodiscard]] RawClient stranger() {
    SocketPair line = make_socketpair();
    expect_ok(gpuloan_context_attach(exporter.get(), line.left.release(), nullptr), "gpuloan_context_attach");
    return RawClient(std::move(line.right));
  }
  [[nodiscard]] Enemy enemy() {
    Enemy made{stranger()};
    made.client.shake_hands();
    made.peer = exporter.event(GPULOAN_EVENT_PEER_READY).peer;
    return made;
  }
  void expect_dropped(Enemy& enemy, std::string_view what, gpuloan_status status = GPULOAN_ERR_PROTOCOL) {
    try {
      enemy.client.expect_closed();
      const gpuloan_event event = exporter.event(GPULOAN_EVENT_PEER_LOST);
      expect(event.peer == enemy.peer, "the wrong peer was lost");
      if (event.status != status) fail(std::string("lost with ") + gpuloan_status_name(event.status) + ": " + event.text);
      expect(event.text[0] != '\0', "no sentence for the loss");
    } catch (const Failure& failure) {
      fail(std::string(what) + ": " + failure.text);
    }
    gpuloan_peer_close(enemy.peer);
  }
  void good_loan() {
    const Region region(peer, 5000);
    bench.gpu.upload(region.pointer(), 5000, ++seed);
    const Lent lent = lend(bench, peer, region, {});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.check(seed);
    loan.done();
    lent.ended();
  }
  const Bench& bench;
  Exporter exporter;
  Worker worker;
  gpuloan_peer* peer;
  std::uint64_t seed = 0;
};

template <typename Fill>
Record made(Type type, Fill fill) {
  Record record = raw_record(type);
  fill(record);
  return record;
}

// One message of these records.
std::vector<unsigned char> together(std::span<const Record> records) {
  std::vector<unsigned char> bytes(records.size_bytes());
  std::memcpy(bytes.data(), records.data(), records.size_bytes());
  return bytes;
}

// ---- In the handshake ---------------------------------------------------------------------------------------------

// After HELLO the only record that may come is PAGES_MAPPED, then PAGES_CHECKED. A peer that was never ready is dropped
// without an event.
void out_of_turn(const Bench& bench) {
  Scene scene(bench);
  for (const Type type : {Type::Hello, Type::PagesChecked, Type::Request, Type::Ack, Type::Pages, Type::Export, Type::Bye}) {
    RawClient client = scene.stranger();
    client.send(raw_hello());
    static_cast<void>(client.expect_type(Type::Welcome));
    static_cast<void>(client.expect_type(Type::Pages));
    Record record = type == Type::Hello ? raw_hello() : raw_record(type);
    client.send(record);
    client.expect_closed();
  }
  RawClient twice = scene.stranger();
  twice.send(raw_hello());
  static_cast<void>(twice.expect_type(Type::Welcome));
  static_cast<void>(twice.expect_type(Type::Pages));
  twice.send(raw_record(Type::PagesMapped));
  static_cast<void>(twice.expect_type(Type::PagesSealed));
  twice.send(raw_record(Type::PagesMapped));
  twice.expect_closed();
  RawClient hasty = scene.stranger();
  const Record both[] = {raw_hello(), raw_record(Type::PagesMapped)};
  hasty.send_bytes(together(both));
  hasty.expect_closed();
  scene.good_loan();
  expect_equal(scene.exporter.stats().peers, 1U, "peers");
  scene.worker.close();
}

// ---- At rest ------------------------------------------------------------------------------------------------------

void lies_at_rest(const Bench& bench) {
  const std::vector<std::pair<const char*, Record>> lies = {
      {"ACK of no loan", made(Type::Ack, [](Record& record) { record.ack.loan = 77; })},
      {"DONE of no loan", made(Type::Done, [](Record& record) { record.turn.loan = 77, record.turn.turn = 1; })},
      {"UNMAPPED of no chunk", made(Type::Unmapped, [](Record& record) { record.chunk.chunk = 5; })},
      {"RING_FILLED without a ring", made(Type::RingFilled, [](Record& record) { record.ring_filled.bytes = 1; })},
      {"RING_DRAINED without a ring", raw_record(Type::RingDrained)},
      {"EVENT_HANDLE of no pair", raw_record(Type::EventHandle)},
      {"request number 0", raw_record(Type::Request)},
      {"HELLO again", raw_hello()},
      {"WELCOME", raw_record(Type::Welcome)},
      {"PAGES_MAPPED again", raw_record(Type::PagesMapped)},
      {"EXPORT", raw_record(Type::Export)},
      {"READY", raw_record(Type::Ready)},
      {"CANCEL", raw_record(Type::Cancel)},
      {"FINISH", raw_record(Type::Finish)},
      {"DENIED", raw_record(Type::Denied)},
      {"RECALL", raw_record(Type::Recall)},
      {"another version", made(Type::Ack, [](Record& record) { record.header.version = 2; })},
  };
  Scene scene(bench);
  for (const auto& [what, record] : lies) {
    Scene::Enemy enemy = scene.enemy();
    expect(enemy.client.send(record), "it cannot be sent");
    scene.expect_dropped(enemy, what);
    scene.good_loan();
  }
  Scene::Enemy polite = scene.enemy();
  polite.client.send(raw_record(Type::Bye));
  scene.expect_dropped(polite, "BYE", GPULOAN_ERR_PEER_LOST);
  Scene::Enemy gone = scene.enemy();
  gone.client.close();
  expect(scene.exporter.event(GPULOAN_EVENT_PEER_LOST).peer == gone.peer, "the wrong peer was lost");
  scene.good_loan();
  scene.worker.close();
}

void rubbish_at_rest(const Bench& bench) {
  Scene scene(bench);
  const int fd = 2;
  for (const std::size_t size : {std::size_t{1}, std::size_t{127}, std::size_t{4096}, std::size_t{65536}}) {
    Scene::Enemy enemy = scene.enemy();
    expect(enemy.client.send_bytes(std::vector<unsigned char>(size, 0x5A)), "it cannot be sent");
    scene.expect_dropped(enemy, std::to_string(size) + " bytes of rubbish");
  }
  Scene::Enemy enemy = scene.enemy();
  const int many[] = {fd, fd, fd, fd, fd};
  enemy.client.send(raw_record(Type::Unmapped), {}, many);
  scene.expect_dropped(enemy, "descriptors that are not declared");
  scene.good_loan();
  scene.worker.close();
}

// 1024 requests may be unanswered; each further one is denied, and nothing grows.
void request_flood(const Bench& bench) {
  Scene scene(bench);
  Scene::Enemy enemy = scene.enemy();
  for (std::uint64_t number = 1; number <= 1030; ++number) {
    const Record request = made(Type::Request, [&](Record& record) { record.request.request = number, record.request.bytes = UINT64_MAX; });
    expect(enemy.client.send(request), "the exporter is gone");
  }
  for (std::uint64_t number = 1025; number <= 1030; ++number) {
    const RawClient::Message denied = enemy.client.expect_type(Type::Denied);
    expect_equal(denied.record.denied.request, number, "the denied request");
    expect_equal(denied.record.denied.status, static_cast<std::int32_t>(GPULOAN_ERR_LIMIT), "status in DENIED");
  }
  gpuloan_request* request = scene.exporter.event(GPULOAN_EVENT_REQUEST).request;
  gpuloan_region* region = nullptr;
  gpuloan_loan* loan = nullptr;
  expect(gpuloan_request_grant(request, nullptr, &region, &loan) != GPULOAN_OK, "16 exbibytes were granted");
  expect_ok(gpuloan_request_deny(request, "no"), "a request that could not be granted can be denied");
  scene.good_loan();
  enemy.client.close();
  static_cast<void>(scene.exporter.event(GPULOAN_EVENT_PEER_LOST));
  scene.worker.close();
}

// ---- With a loan out ----------------------------------------------------------------------------------------------

// Loans of 0 bytes need no memory of the peer's, and host memory no device: enough for a peer that has none.
struct Target {
  Region region;
  Lent lent;
  channel::Export wire;
};

Target lend_to(Scene& scene, Scene::Enemy& enemy, std::uint64_t bytes) {
  Region region(enemy.peer, bytes, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST);
  const auto host = reinterpret_cast<std::uint64_t>(gpuloan_region_host(region.get()));
  const std::uint64_t at = region.pointer() != 0 ? region.pointer() : host;
  Lent lent = lend(scene.bench, enemy.peer, at, bytes, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true, .memory = GPULOAN_MEMORY_HOST});
  auto next = enemy.client.receive();
  const auto passed = [&] { return next->type() == Type::Chunk || (next->type() == Type::Export && (next->record.export_.flags & channel::ExportCanary) != 0); };
  while (next && passed()) next = enemy.client.receive();
  expect(next && next->type() == Type::Export, "no EXPORT came");
  expect_equal(lent.report().canary, GPULOAN_CANARY_NOT_ATTEMPTED, "canary of a peer that answers none");
  return {std::move(region), std::move(lent), next->record.export_};
}

Record ack_of(const channel::Export& wire) {
  return made(Type::Ack, [&](Record& record) { record.ack.loan = wire.loan, record.ack.slot = wire.slot, record.ack.generation = wire.generation; });
}

Record done_of(const channel::Export& wire, std::uint32_t turn) {
  return made(Type::Done, [&](Record& record) {
    record.turn.loan = wire.loan, record.turn.slot = wire.slot, record.turn.generation = wire.generation, record.turn.turn = turn;
  });
}

using Attack = std::vector<Record> (*)(const channel::Export& wire);

constexpr std::pair<const char*, Attack> kAttacks[] = {
    {"ACK with another generation",
     [](const channel::Export& wire) {
       Record record = ack_of(wire);
       ++record.ack.generation;
       return std::vector{record};
     }},
    {"ACK with another slot",
     [](const channel::Export& wire) {
       Record record = ack_of(wire);
       ++record.ack.slot;
       return std::vector{record};
     }},
    {"ACK twice", [](const channel::Export& wire) { return std::vector{ack_of(wire), ack_of(wire)}; }},
    {"DONE of turn 2", [](const channel::Export& wire) { return std::vector{done_of(wire, 2)}; }},
    {"DONE of turn 0", [](const channel::Export& wire) { return std::vector{done_of(wire, 0)}; }},
    {"DONE of turn 4,294,967,295", [](const channel::Export& wire) { return std::vector{done_of(wire, UINT32_MAX)}; }},
    {"DONE after ACK", [](const channel::Export& wire) { return std::vector{ack_of(wire), done_of(wire, 1)}; }},
};

// A2
void lies_about_a_loan(const Bench& bench) {
  Scene scene(bench);
  for (const std::uint64_t bytes : {0U, 5000U}) {
    for (std::size_t at = 0; at < 2 * std::size(kAttacks); ++at) {
      const auto& [what, attack] = kAttacks[at / 2];
      Scene::Enemy enemy = scene.enemy();
      Target target = lend_to(scene, enemy, bytes);
      const std::vector<Record> records = attack(target.wire);
      if (at % 2 == 0) enemy.client.send_bytes(together(records)); // in one message, or each in its own
      else for (const Record& record : records) enemy.client.send(record);
      scene.expect_dropped(enemy, what);
      expect(gpuloan_loan_wait_end(target.lent, kWaitMs) != GPULOAN_ERR_TIMEOUT, std::string(what) + ": the loan does not end");
      expect(target.lent.report().outcome != GPULOAN_OK, std::string(what) + ": the loan is called a success");
      target.region.destroy();
    }
  }
  scene.good_loan();
  expect(becomes([&] { return scene.exporter.stats().loans_out == 0; }), "loans are out, canaries' of lost peers included");
  scene.worker.close();
}

// Not lies about the protocol, only about the outcome: the loan fails, the peer stays.
void odd_outcomes(const Bench& bench) {
  Scene scene(bench);
  for (const std::int32_t outcome : {-21, -1000, 7, INT32_MIN}) {
    Scene::Enemy enemy = scene.enemy();
    Target target = lend_to(scene, enemy, 5000);
    Record ack = ack_of(target.wire);
    ack.ack.outcome = outcome;
    ack.header.tail_bytes = 6;
    const unsigned char text[] = {'w', 'h', 'y', 0, '\n', 0xFF};
    enemy.client.send(ack, text);
    const gpuloan_status status = gpuloan_loan_wait_end(target.lent, kWaitMs);
    expect_status(status, GPULOAN_ERR_FAILED, "outcome " + std::to_string(outcome));
    target.region.destroy();
    enemy.client.close();
    static_cast<void>(scene.exporter.event(GPULOAN_EVENT_PEER_LOST));
  }
  scene.good_loan();
  scene.worker.close();
}

// ACK without DONE: returned, not done.
void ack_without_done(const Bench& bench) {
  Scene scene(bench);
  Scene::Enemy enemy = scene.enemy();
  Target target = lend_to(scene, enemy, 5000);
  enemy.client.send(ack_of(target.wire));
  target.lent.ended(GPULOAN_ERR_RETURNED);
  target.region.destroy();
  scene.good_loan();
  scene.worker.close();
}

// What may share a message, and what may not: the records before the one that is wrong count.
void records_in_one_message(const Bench& bench) {
  Scene scene(bench);
  {
    Scene::Enemy peer = scene.enemy();
    Target target = lend_to(scene, peer, 5000);
    Record ack = ack_of(target.wire);
    ack.ack.turns_done = 1;
    const Record records[] = {done_of(target.wire, 1), ack};
    peer.client.send_bytes(together(records));
    target.lent.ended();
    target.region.destroy();
    peer.client.close();
    static_cast<void>(scene.exporter.event(GPULOAN_EVENT_PEER_LOST));
  }
  struct Wrong {
    const char* what;
    void (*change)(std::vector<unsigned char>& message);
    bool descriptor;
  };
  const Wrong wrongs[] = {
      {"a second record that is cut", [](auto& message) { message.pop_back(); }, false},
      {"a second record of zeros", [](auto& message) { std::fill(message.begin() + 128, message.end(), 0); }, false},
      {"a second record that declares a tail", [](auto& message) { message[128 + 10] = 1; }, false},
      {"a second record that declares a descriptor", [](auto& message) { message[128 + 8] = 1; }, false},
      {"a descriptor beside two records", [](auto&) {}, true},
  };
  for (const Wrong& wrong : wrongs) {
    Scene::Enemy enemy = scene.enemy();
    Target target = lend_to(scene, enemy, 5000);
    const Record records[] = {done_of(target.wire, 1), done_of(target.wire, 1)};
    std::vector<unsigned char> message = together(records);
    wrong.change(message);
    const int fd = 2;
    enemy.client.send_bytes(message, wrong.descriptor ? std::span<const int>(&fd, 1) : std::span<const int>());
    scene.expect_dropped(enemy, wrong.what);
    expect(gpuloan_loan_wait_end(target.lent, kWaitMs) != GPULOAN_ERR_TIMEOUT, std::string(wrong.what) + ": the loan does not end");
    target.region.destroy();
  }
  scene.good_loan();
  scene.worker.close();
}

// A peer that reads nothing: what waits for it is bounded, and it is dropped.
void deaf_peer(const Bench& bench) {
  Scene scene(bench);
  Scene::Enemy enemy = scene.enemy();
  gpuloan_status status = GPULOAN_OK;
  for (int count = 0; count < 15'000 && status == GPULOAN_OK; ++count) {
    gpuloan_loan* loan = nullptr;
    status = try_lend(bench, enemy.peer, 0, 0, {}, &loan);
    if (status == GPULOAN_OK) gpuloan_loan_unref(loan);
  }
  expect_status(status, GPULOAN_ERR_PEER_LOST, "lend to a peer that does not read");
  expect_contains(gpuloan_error_text(), "does not read", "the reason");
  expect(scene.exporter.event(GPULOAN_EVENT_PEER_LOST).status == GPULOAN_ERR_PROTOCOL, "status of PEER_LOST");
  scene.good_loan();
  scene.worker.close();
}

constexpr Case kHostileCases[] = {
    {"handshake out of turn", out_of_turn},
    {"lies at rest", lies_at_rest},
    {"rubbish at rest", rubbish_at_rest},
    {"a flood of requests", request_flood},
    {"lies about a loan", lies_about_a_loan},
    {"odd outcomes", odd_outcomes},
    {"ACK without DONE", ack_without_done},
    {"records in one message", records_in_one_message},
    {"a peer that reads nothing", deaf_peer},
};

} // namespace

std::span<const Case> hostile_cases() { return kHostileCases; }

} // namespace loan_test
