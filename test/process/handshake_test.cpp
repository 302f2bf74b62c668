// SPDX-License-Identifier: MIT
//
// Who gets in over a path, and who does not: keys, versions, hosts, users, rubbish. Whatever a stranger does, it is
// refused or dropped alone: an ordinary peer of the same exporter has a loan after each.
#include "raw_client.hpp"

#include "../support/run.hpp"

#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace loan_test {
namespace {

// An exporter that listens in a folder of its own, with one peer that behaves.
struct Door {
  explicit Door(const Bench& bench, const ContextTweak& tweak = {}) : exporter(bench, tweak), worker(bench) {
    peer = exporter.attach(worker);
    expect_ok(gpuloan_context_listen(exporter.get(), path.c_str()), "gpuloan_context_listen");
  }
  [[nodiscard]] gpuloan_key invite() const {
    gpuloan_key key = {};
    expect_ok(gpuloan_context_invite(exporter.get(), "worker", &key), "gpuloan_context_invite");
    return key;
  }
  void expect_refusal(gpuloan_status status, std::string_view part, Where where = Where::current()) {
    const gpuloan_event event = exporter.event(GPULOAN_EVENT_PEER_REFUSED, kWaitMs, where);
    if (event.status != status) fail(std::string("refused with ") + gpuloan_status_name(event.status) + ": " + event.text, where);
    expect_contains(event.text, part, "the text of PEER_REFUSED", where);
    expect(event.peer == nullptr, "PEER_REFUSED names a peer", where);
  }
  // The one that behaves still has its loans.
  void good_loan(const Bench& bench) {
    const Region region(peer, 5000);
    bench.gpu.upload(region.pointer(), 5000, ++seed);
    const Lent lent = lend(bench, peer, region, {});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.check(seed);
    loan.done();
    lent.ended();
  }
  TempFolder folder{"gpuloan-door"};
  std::string path = folder.path() + "/socket";
  Exporter exporter;
  Worker worker;
  gpuloan_peer* peer = nullptr;
  std::uint64_t seed = 0;
};

// An importer without a device, in this thread.
class Guest {
 public:
  Guest() {
    auto options = init<gpuloan_context_options>();
    options.role = GPULOAN_ROLE_IMPORTER;
    options.flags = GPULOAN_CONTEXT_NO_DEVICE;
    expect_ok(gpuloan_context_create(&options, &context_), "gpuloan_context_create");
  }
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;
  ~Guest() { gpuloan_context_destroy(context_); }
  [[nodiscard]] gpuloan_context* get() const { return context_; }
  [[nodiscard]] gpuloan_status connect(const std::string& path, const gpuloan_key* key, std::uint32_t timeout_ms = kWaitMs) {
    gpuloan_peer* peer = nullptr;
    return gpuloan_context_connect(context_, path.c_str(), key, timeout_ms, &peer);
  }

 private:
  gpuloan_context* context_ = nullptr;
};

gpuloan_event ready(Door& door) { return door.exporter.event(GPULOAN_EVENT_PEER_READY); }

// ---- Keys ---------------------------------------------------------------------------------------------------------

void right_key(const Bench& bench) {
  Door door(bench);
  const gpuloan_key key = door.invite();
  Guest guest;
  expect_ok(guest.connect(door.path, &key), "gpuloan_context_connect");
  auto info = init<gpuloan_peer_info>();
  expect_ok(gpuloan_peer_info_get(ready(door).peer, &info), "gpuloan_peer_info_get");
  expect_contains(info.account, "worker", "account of the key");
  expect_equal(info.pid, ::getpid(), "pid of the peer");
  door.good_loan(bench);
  door.worker.close();
}

// E9, M2, M5
void wrong_keys(const Bench& bench) {
  Door door(bench);
  gpuloan_key key = door.invite();
  Guest guest;
  expect_status(guest.connect(door.path, nullptr), GPULOAN_ERR_KEY, "no key");
  door.expect_refusal(GPULOAN_ERR_KEY, "needs a key");
  key.bytes[31] ^= 1U;
  expect_status(guest.connect(door.path, &key), GPULOAN_ERR_KEY, "a wrong key");
  expect_contains(gpuloan_error_text(), "unknown", "the text for a wrong key");
  door.expect_refusal(GPULOAN_ERR_KEY, "unknown");
  key.bytes[31] ^= 1U;
  expect_ok(guest.connect(door.path, &key), "the right key after two wrong tries");
  Guest second;
  expect_status(second.connect(door.path, &key), GPULOAN_ERR_KEY, "a used key");
  expect_contains(gpuloan_error_text(), "used before", "the text for a used key");
  door.expect_refusal(GPULOAN_ERR_KEY, "used before");
  door.good_loan(bench);
  door.worker.close();
}

// A connection that was refused for another reason than its key has not used it up.
void key_survives_refusal(const Bench& bench) {
  Door door(bench);
  const gpuloan_key key = door.invite();
  RawClient client = RawClient::connect(door.path);
  channel::Record hello = raw_hello(&key);
  hello.hello.version_min = hello.hello.version_max = 99;
  client.send(hello);
  client.expect_refused(GPULOAN_ERR_VERSION);
  door.expect_refusal(GPULOAN_ERR_VERSION, "99");
  Guest guest;
  expect_ok(guest.connect(door.path, &key), "the same key in a better HELLO");
  door.worker.close();
}

// The connection is gone before the exporter says WELCOME: the key is given back. The exporter is caller-driven, so that
// it does not look before.
void key_given_back(const Bench& bench) {
  Door door(bench, [](gpuloan_context_options& options) {
    options.loop = GPULOAN_LOOP_CALLER;
    options.engine = GPULOAN_ENGINE_EPOLL;
  });
  const gpuloan_key key = door.invite();
  RawClient client = RawClient::connect(door.path);
  client.send(raw_hello(&key));
  client.close();
  for (int turn = 0; turn < 20; ++turn) expect_ok(gpuloan_context_dispatch(door.exporter.get(), 5), "gpuloan_context_dispatch");
  RawClient again = RawClient::connect(door.path);
  again.send(raw_hello(&key));
  for (int turn = 0; turn < 20; ++turn) expect_ok(gpuloan_context_dispatch(door.exporter.get(), 5), "gpuloan_context_dispatch");
  const auto answer = again.receive();
  expect(answer.has_value(), "the exporter hung up");
  if (answer->type() != channel::Type::Welcome) fail("the key of a connection that ended before WELCOME is lost: " + answer->text());
  door.worker.close();
}

void key_text(const Bench& bench) {
  Door door(bench);
  const gpuloan_key key = door.invite();
  char text[GPULOAN_KEY_TEXT_BYTES] = {};
  gpuloan_key_format(&key, text);
  gpuloan_key parsed = {};
  expect_ok(gpuloan_key_parse((std::string(" ") + text + "\n").c_str(), &parsed), "gpuloan_key_parse");
  expect(std::memcmp(&key, &parsed, sizeof key) == 0, "a key changed on its way through text");
  expect_status(gpuloan_key_parse("0123", &parsed), GPULOAN_ERR_INVALID, "gpuloan_key_parse of a short text");
  Guest guest;
  expect_ok(guest.connect(door.path, &parsed), "gpuloan_context_connect");
  door.worker.close();
}

// ---- Strangers ----------------------------------------------------------------------------------------------------

void other_version(const Bench& bench) {
  Door door(bench);
  const gpuloan_key key = door.invite();
  for (const auto& [low, high] : {std::pair<std::uint16_t, std::uint16_t>{2, 9}, {0, 0}, {5, 3}}) {
    RawClient client = RawClient::connect(door.path);
    channel::Record hello = raw_hello(&key);
    hello.hello.version_min = low;
    hello.hello.version_max = high;
    client.send(hello);
    const std::string text = client.expect_refused(GPULOAN_ERR_VERSION); // both sides learn both ranges
    const std::string ranges = "the peer speaks protocol versions " + std::to_string(low) + " to " + std::to_string(high) + ", this library 1 to 1";
    expect_contains(text, ranges, "the text of REFUSED");
    door.expect_refusal(GPULOAN_ERR_VERSION, ranges);
  }
  RawClient newer = RawClient::connect(door.path);
  channel::Record hello = raw_hello(&key);
  hello.header.version = 7; // HELLO keeps its layout in every version
  hello.hello.version_max = 7;
  hello.hello.features = UINT32_MAX;
  newer.shake_hands(hello);
  expect_ok(ready(door).status, "status of PEER_READY");
  door.good_loan(bench);
  door.worker.close();
}

// What `exporter` does to an importer of this library that connects to it; the importer's status and text.
template <typename RawExporter>
std::pair<gpuloan_status, std::string> connect_to(RawExporter exporter) {
  const TempFolder folder("gpuloan-other");
  const std::string path = folder.path() + "/socket";
  RawListener listener(path);
  Guest guest;
  std::pair<gpuloan_status, std::string> result;
  std::jthread importer([&] {
    const gpuloan_key key = {};
    result.first = guest.connect(path, &key);
    result.second = gpuloan_error_text();
  });
  RawClient client = listener.accept();
  const RawClient::Message hello = client.expect_type(channel::Type::Hello);
  exporter(client, hello.record.hello);
  importer.join();
  return result;
}

channel::Record raw_welcome(std::uint16_t version) {
  channel::Record record = raw_record(channel::Type::Welcome);
  record.welcome.version = version;
  record.welcome.slots = 64;
  return record;
}

// The other way round: the importer is of this version, the exporter is not.
void other_version_exporter(const Bench&) {
  for (const auto& [low, high] : {std::pair<std::uint16_t, std::uint16_t>{2, 9}, {0, 0}}) {
    const auto [status, text] = connect_to([&, low = low, high = high](RawClient& client, const channel::Hello& hello) {
      const std::string why = "the peer speaks protocol versions " + std::to_string(hello.version_min) + " to " + std::to_string(hello.version_max) +
                              ", this library " + std::to_string(low) + " to " + std::to_string(high);
      client.send_refused(low, GPULOAN_ERR_VERSION, why); // REFUSED keeps its layout in every version
    });
    expect_status(status, GPULOAN_ERR_VERSION, "gpuloan_context_connect");
    expect_contains(text, "refused by the exporter: the peer speaks protocol versions 1 to 1, this library " + std::to_string(low) + " to " + std::to_string(high), "the text");
  }
  const auto [status, text] = connect_to([](RawClient& client, const channel::Hello&) {
    client.send(raw_welcome(2));
    client.expect_closed();
  });
  expect_status(status, GPULOAN_ERR_VERSION, "a WELCOME of a version that the importer does not speak");
  expect_contains(text, "the exporter chose protocol version 2, this library speaks 1 to 1", "the text");
  const auto [newer, why] = connect_to([](RawClient& client, const channel::Hello& hello) {
    expect_equal(hello.version_max, 1, "version_max in HELLO");
    client.show_pages(raw_welcome(1)); // one that speaks 1 to 9 takes 1
  });
  if (newer != GPULOAN_OK) fail("an exporter that speaks more than this version: " + why);
}

// An exporter may refuse at any step.
void refused_late(const Bench&) {
  const auto [status, text] = connect_to([](RawClient& client, const channel::Hello&) {
    client.send(raw_welcome(1));
    client.send_refused(1, GPULOAN_ERR_TIMEOUT, "it took too long");
  });
  expect_status(status, GPULOAN_ERR_TIMEOUT, "gpuloan_context_connect");
  expect_contains(text, "refused by the exporter: it took too long", "the text");
}

// E5
void other_host(const Bench& bench) {
  Door door(bench);
  const gpuloan_key key = door.invite();
  RawClient client = RawClient::connect(door.path);
  channel::Record hello = raw_hello(&key);
  hello.hello.boot_id[0] ^= 1U;
  client.send(hello);
  client.expect_refused(GPULOAN_ERR_HOST);
  door.expect_refusal(GPULOAN_ERR_HOST, "host");
  door.good_loan(bench);
  door.worker.close();
}

const char* not_root(const Bench&) { return ::geteuid() == 0 ? nullptr : "only root can become another user"; }

// E9. The end that was handed on is used by a process of another user.
void other_user(const Bench& bench) {
  Door door(bench);
  SocketPair line = make_socketpair();
  expect_ok(gpuloan_context_attach(door.exporter.get(), line.left.release(), nullptr), "gpuloan_context_attach");
  const channel::Record hello = raw_hello();
  const pid_t child = ::fork();
  expect(child >= 0, "fork");
  if (child == 0) {
    const bool sent = ::setresuid(65534, 65534, 65534) == 0 && ::send(line.right.get(), &hello, sizeof hello, 0) == sizeof hello;
    ::_exit(sent ? 0 : 1);
  }
  int status = 1;
  expect(::waitpid(child, &status, 0) == child && status == 0, "the other user's process could not send");
  door.expect_refusal(GPULOAN_ERR_UID, "65534");
  RawClient client(std::move(line.right));
  client.expect_refused(GPULOAN_ERR_UID);
  door.good_loan(bench);
  door.worker.close();
}

// ---- Rubbish ------------------------------------------------------------------------------------------------------

struct Rubbish {
  const char* what;
  std::vector<unsigned char> bytes;
  std::vector<int> fds;
};

std::vector<unsigned char> bytes_of(const channel::Record& record, std::size_t size = sizeof(channel::Record)) {
  std::vector<unsigned char> bytes(size, 0xA5);
  std::memcpy(bytes.data(), &record, std::min(size, sizeof record));
  return bytes;
}

template <typename Change>
std::vector<unsigned char> changed_hello(Change change) {
  channel::Record hello = raw_hello();
  change(hello);
  return bytes_of(hello);
}

std::vector<Rubbish> rubbish() {
  std::vector<unsigned char> noise(4224);
  for (std::size_t at = 0; at < noise.size(); ++at) noise[at] = static_cast<unsigned char>(at * 131 + 7);
  const int fd = STDERR_FILENO;
  return {
      {"noise", noise, {}},
      {"one byte", {0x47}, {}},
      {"half a record", bytes_of(raw_hello(), 64), {}},
      {"a record and a byte", bytes_of(raw_hello(), 129), {}},
      {"longer than any record", std::vector<unsigned char>(65536, 1), {}},
      {"another magic", changed_hello([](auto& hello) { hello.header.magic ^= 1U; }), {}},
      {"an unknown type", changed_hello([](auto& hello) { hello.header.type = 24; }), {}},
      {"type 0", changed_hello([](auto& hello) { hello.header.type = 0; }), {}},
      {"no HELLO first", bytes_of(raw_record(channel::Type::PagesMapped)), {}},
      {"BYE first", bytes_of(raw_record(channel::Type::Bye)), {}},
      {"an exporter's record", bytes_of(raw_record(channel::Type::Welcome)), {}},
      {"a tail that is not there", changed_hello([](auto& hello) { hello.header.tail_bytes = 24; }), {}},
      {"65,535 bytes of tail", changed_hello([](auto& hello) { hello.header.tail_bytes = 65535; }), {}},
      {"devices that are not there", changed_hello([](auto& hello) { hello.hello.device_count = 2; }), {}},
      {"4,294,967,295 devices", changed_hello([](auto& hello) { hello.hello.device_count = UINT32_MAX; }), {}},
      {"descriptors that are not there", changed_hello([](auto& hello) { hello.header.fd_count = 3; }), {}},
      {"a descriptor that it does not declare", bytes_of(raw_hello()), {fd}},
      {"200 descriptors", bytes_of(raw_hello()), std::vector<int>(200, fd)},
      {"declared descriptors where none may be", changed_hello([](auto& hello) { hello.header.fd_count = 1; }), {fd}},
      {"a reserved field that is set", changed_hello([](auto& hello) { hello.header.reserved = 1; }), {}},
  };
}

// E9, M5. By path, where nobody knows who it is yet, and over an inherited end.
void garbage_first(const Bench& bench) {
  Door door(bench);
  door.good_loan(bench); // its chunk stays
  const std::set<std::string> before = open_fds();
  for (const Rubbish& each : rubbish()) {
    for (const bool inherited : {false, true}) {
      try {
        RawClient client;
        if (inherited) {
          SocketPair line = make_socketpair();
          expect_ok(gpuloan_context_attach(door.exporter.get(), line.left.release(), nullptr), "gpuloan_context_attach");
          client = RawClient(std::move(line.right));
        } else {
          client = RawClient::connect(door.path);
        }
        expect(client.send_bytes(each.bytes, each.fds), "it cannot be sent");
        client.expect_closed();
      } catch (const Failure& failure) {
        fail(std::string(each.what) + (inherited ? ", inherited" : ", by path") + ": " + failure.text);
      }
    }
  }
  door.good_loan(bench);
  expect(becomes([&] { return added(before, open_fds()).empty(); }), "descriptors of strangers stay open: " + added(before, open_fds()));
  expect_equal(door.exporter.stats().peers, 1U, "peers");
  door.worker.close();
}

void silent_connections(const Bench& bench) {
  Door door(bench);
  std::vector<RawClient> silent;
  for (int count = 0; count < 100; ++count) silent.push_back(RawClient::connect(door.path)); // say nothing
  for (int count = 0; count < 50; ++count) RawClient::connect(door.path).close();
  const gpuloan_key key = door.invite();
  Guest guest;
  expect_ok(guest.connect(door.path, &key), "gpuloan_context_connect among silent connections");
  door.good_loan(bench);
  door.worker.close();
}

// ---- Paths --------------------------------------------------------------------------------------------------------

void second_listener(const Bench& bench) {
  Door door(bench);
  Exporter other(bench);
  expect_status(gpuloan_context_listen(other.get(), door.path.c_str()), GPULOAN_ERR_ADDRESS_IN_USE, "a second listener");
  expect_status(gpuloan_context_listen(door.exporter.get(), (door.path + "2").c_str()), GPULOAN_ERR_STATE, "listen twice");
  struct stat info = {};
  expect(::stat(door.path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode) && (info.st_mode & 0777) == 0600, "the socket's mode is not 0600");
  const gpuloan_key key = door.invite();
  Guest guest;
  expect_ok(guest.connect(door.path, &key), "the first listener still answers");
  door.worker.close();
}

// B12
void stale_socket(const Bench& bench) {
  const TempFolder folder("gpuloan-stale");
  const std::string path = folder.path() + "/socket";
  {
    const Fd dead(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)); // bound and left behind, as by a crash
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size());
    expect(::bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "bind");
  }
  Guest guest;
  expect_status(guest.connect(path, nullptr), GPULOAN_ERR_CONNECT, "connect to a stale socket");
  Exporter exporter(bench);
  expect_ok(gpuloan_context_listen(exporter.get(), path.c_str()), "a stale socket is replaced");
  gpuloan_key key = {};
  expect_ok(gpuloan_context_invite(exporter.get(), nullptr, &key), "gpuloan_context_invite");
  expect_ok(guest.connect(path, &key), "gpuloan_context_connect");
  exporter.destroy();
  struct stat info = {};
  expect(::stat(path.c_str(), &info) != 0, "the socket's file is not removed with the context");
}

// The end of a context removes its own socket file, wherever the process is by then, and no other file.
void only_its_own_file(const Bench& bench) {
  const TempFolder folder("gpuloan-own");
  const std::string path = folder.path() + "/socket";
  struct stat info = {};
  Exporter first(bench);
  expect_ok(gpuloan_context_listen(first.get(), path.c_str()), "listen");
  expect(::unlink(path.c_str()) == 0, "unlink");
  Exporter second(bench);
  expect_ok(gpuloan_context_listen(second.get(), path.c_str()), "listen at the same path");
  first.destroy();
  expect(::stat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode), "the socket of another context was removed");
  expect(::unlink(path.c_str()) == 0, "unlink");
  std::ofstream(path) << "precious";
  second.destroy();
  expect(::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode), "an ordinary file was removed");

  const Fd back(::open(".", O_PATH | O_DIRECTORY | O_CLOEXEC));
  const std::string sub = folder.path() + "/sub", other = sub + "/own";
  expect(::mkdir(sub.c_str(), 0700) == 0 && ::chdir(folder.path().c_str()) == 0, "chdir");
  std::ofstream(other) << "precious";
  Exporter moved(bench);
  const gpuloan_status status = gpuloan_context_listen(moved.get(), "own");
  const bool there = ::chdir(sub.c_str()) == 0;
  moved.destroy();
  expect(::fchdir(back.get()) == 0 && there, "chdir");
  expect_ok(status, "listen at a relative path");
  expect(::stat(other.c_str(), &info) == 0, "a file of the same name in another folder was removed");
  expect(::stat((folder.path() + "/own").c_str(), &info) != 0, "the socket of a relative path stays");
}

void other_paths(const Bench& bench) {
  const TempFolder folder("gpuloan-paths");
  Exporter exporter(bench);
  const std::string file = folder.path() + "/file";
  std::ofstream(file) << "precious";
  expect_status(gpuloan_context_listen(exporter.get(), file.c_str()), GPULOAN_ERR_INVALID, "listen at an ordinary file");
  std::string text;
  std::ifstream(file) >> text;
  expect(text == "precious", "an ordinary file was replaced");
  expect_status(gpuloan_context_listen(exporter.get(), folder.path().c_str()), GPULOAN_ERR_INVALID, "listen at a folder");
  const std::string long_path = folder.path() + "/" + std::string(120, 'x');
  expect_status(gpuloan_context_listen(exporter.get(), long_path.c_str()), GPULOAN_ERR_INVALID, "a path that is too long");
  const std::string no_folder = folder.path() + "/no/such/folder";
  expect(gpuloan_context_listen(exporter.get(), no_folder.c_str()) != GPULOAN_OK, "listen in a folder that does not exist");
  Guest guest;
  expect_status(guest.connect(folder.path() + "/nobody", nullptr), GPULOAN_ERR_CONNECT, "connect to nothing");
  expect_status(guest.connect(file, nullptr), GPULOAN_ERR_CONNECT, "connect to an ordinary file");
}

// Whose the descriptor is after each way in which adopt can fail.
void adopt_fails(const Bench& bench) {
  const Exporter exporter(bench);
  const Guest guest;
  gpuloan_peer* peer = nullptr;
  const SocketPair pair = make_socketpair();
  const int kept = pair.left.get();
  const auto open = [](int fd) { return ::fcntl(fd, F_GETFD) >= 0; };
  expect_status(gpuloan_context_adopt(exporter.get(), kept, 0, &peer), GPULOAN_ERR_STATE, "adopt by an exporter");
  expect_status(gpuloan_context_adopt(guest.get(), kept, 0, nullptr), GPULOAN_ERR_INVALID, "adopt without out_peer");
  expect_status(gpuloan_context_adopt(nullptr, kept, 0, &peer), GPULOAN_ERR_INVALID, "adopt without a context");
  const Fd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  expect_status(gpuloan_context_adopt(guest.get(), file.get(), 0, &peer), GPULOAN_ERR_INVALID, "adopt of no socket");
  expect(open(kept) && open(file.get()), "a call that was refused took the descriptor");
  SocketPair mute = make_socketpair();
  const int taken = mute.left.release();
  expect_status(gpuloan_context_adopt(guest.get(), taken, 50, &peer), GPULOAN_ERR_TIMEOUT, "adopt with nobody at the other end");
  expect(becomes([&] { return !open(taken); }), "the descriptor stays open after a handshake that failed");
}

// Somebody listens and never answers.
void deaf_listener(const Bench&) {
  const TempFolder folder("gpuloan-deaf");
  const std::string path = folder.path() + "/socket";
  const Fd deaf(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  expect(::bind(deaf.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 && ::listen(deaf.get(), 4) == 0, "listen");
  Guest guest;
  const std::uint64_t start = now_ms();
  expect_status(guest.connect(path, nullptr, 100), GPULOAN_ERR_TIMEOUT, "connect to a deaf listener");
  expect(now_ms() - start < 5000, "the timeout was not kept");
}

constexpr Case kHandshakeCases[] = {
    {"the right key", right_key},
    {"no key, a wrong one, a used one", wrong_keys},
    {"a key survives a refusal", key_survives_refusal},
    {"a key is given back", key_given_back},
    {"a key as text", key_text},
    {"another version", other_version},
    {"an exporter of another version", other_version_exporter},
    {"refused after WELCOME", refused_late},
    {"another host", other_host},
    {"another user", other_user, false, not_root},
    {"garbage instead of HELLO", garbage_first},
    {"silent connections", silent_connections},
    {"a second listener", second_listener},
    {"a stale socket", stale_socket},
    {"only its own file is removed", only_its_own_file},
    {"other paths", other_paths},
    {"adopt fails", adopt_fails},
    {"a deaf listener", deaf_listener},
};

} // namespace

std::span<const Case> handshake_cases() { return kHandshakeCases; }

} // namespace loan_test
