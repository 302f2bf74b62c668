// SPDX-License-Identifier: MIT
//
// The wire: every record that crosses the socket.
//
// One SEQPACKET message is one record: 128 bytes, little-endian, and for some types a tail of up to 4096 bytes (metadata,
// a sentence, a device list). Descriptors travel only in records that declare them. "E>I" means sent by the exporter.
// docs/protocol.md has each of them with a bit diagram, and a test that compares it with this file.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gpuloan::channel {

static_assert(std::endian::native == std::endian::little, "records are little-endian and used in place");

inline constexpr std::uint32_t kMagic = 0x4E4F4C47; // "GLON"
inline constexpr std::uint16_t kVersionMin = 1;
inline constexpr std::uint16_t kVersionMax = 1;
inline constexpr std::size_t kRecordBytes = 128;
inline constexpr std::size_t kTailMax = 4096;
inline constexpr std::size_t kMaxFds = 64;

enum class Type : std::uint16_t {
  Hello = 1,         // I>E  tail: DeviceEntry[device_count]; carries the sender's credentials
  Welcome = 2,       // E>I  tail: DeviceEntry[device_count]
  Refused = 3,       // E>I  tail: text
  Bye = 4,           // both tail: text
  Pages = 5,         // E>I  1 fd: the control words
  PagesMapped = 6,   // I>E
  PagesSealed = 7,   // E>I
  PagesChecked = 8,  // I>E
  Chunk = 9,         // E>I  1 fd: VMM memory or host pages
  Recall = 10,       // E>I
  Unmapped = 11,     // I>E
  Ring = 12,         // E>I  1 fd: the host rung's slots
  EventHandle = 13,  // both
  Export = 14,       // E>I  tail: metadata
  Ready = 15,        // E>I
  Done = 16,         // I>E
  Ack = 17,          // I>E  tail: text of a failure
  Cancel = 18,       // E>I  tail: text
  Finish = 19,       // E>I
  Request = 20,      // I>E  tail: metadata
  Denied = 21,       // E>I  tail: text
  RingFilled = 22,   // both
  RingDrained = 23,  // both
  Tether = 24,       // E>I  1 fd: a page that the importer keeps mapped as long as it may touch lent memory
  Foreign = 25,      // E>I  tail: a legacy handle, a pool pointer's data, or none
  Piece = 26,        // E>I  1 fd: VMM memory
  PiecesTaken = 27,  // I>E
  Pool = 28,         // E>I  1 fd: a memory pool
};
inline constexpr std::uint16_t kTypeMax = 28;

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t type; // Type
  std::uint16_t fd_count;
  std::uint16_t tail_bytes;
  std::uint32_t reserved; // 0
};

struct DeviceEntry {
  unsigned char uuid[16];
  std::uint32_t floors; // gpuloan_floor, kDeviceMps, kDevicePeer; of the device that is listed first the floors, else none
  std::int32_t driver_version;
};

inline constexpr std::uint32_t kDevicePeer = 1U << 30; // HELLO, not of the first: the first one can map this one's memory
inline constexpr std::uint32_t kDeviceMps = 1U << 31; // the process uses the device under MPS

// What a side takes that not every side of version 1 does; unknown bits are ignored.
enum Feature : std::uint32_t {
  FeatureBundles = 1, // messages of several records
};

struct Hello {
  std::uint16_t version_min;
  std::uint16_t version_max;
  std::uint32_t features; // Feature
  std::uint32_t device_count; // at most 64
  std::uint32_t has_key;
  unsigned char boot_id[16]; // /proc/sys/kernel/random/boot_id
  unsigned char key[32];
  std::uint32_t wants_device; // 1: the importer computes on the device it lists first; it sees the others
  unsigned char reserved[44];
};

struct Welcome {
  std::uint16_t version;
  std::uint16_t reserved0;
  std::uint32_t features;
  std::uint32_t device_count; // at most 64
  std::uint32_t slots;
  unsigned char reserved[96];
};

struct Notice { // Refused, Bye
  std::int32_t status; // gpuloan_status
  unsigned char reserved[108];
};

struct Pages { // Pages; the other three steps have an empty body
  std::uint64_t bytes;
  std::uint32_t slots;
  unsigned char reserved[100];
};

struct Empty { // PagesMapped, PagesSealed, PagesChecked, Tether
  unsigned char reserved[112];
};

enum class ChunkKind : std::uint32_t { Vmm = 1, HostPages = 2 };

struct Chunk { // Chunk, Recall, Unmapped: the last two use `chunk` only
  std::uint64_t chunk;
  std::uint64_t bytes;
  std::uint32_t kind;   // ChunkKind
  std::uint32_t access; // gpuloan_access: the most that loans in it will grant
  unsigned char uuid[16];
  unsigned char reserved[72];
};

enum class ForeignKind : std::uint32_t { Legacy = 1, Vmm = 2, Pool = 3 };

struct Foreign { // memory of the exporter's process that is not its arena's, for one loan
  std::uint64_t chunk;
  std::uint64_t bytes;  // of the allocation, or of all pieces
  std::uint64_t buffer; // two with the same number are the same memory
  std::uint32_t kind;   // ForeignKind
  std::uint32_t access; // gpuloan_access
  std::uint32_t pieces; // Piece records that follow
  std::uint32_t reserved0;
  unsigned char uuid[16];
  std::uint64_t pool; // ForeignKind::Pool
  unsigned char reserved[48];
};

struct Pool {
  std::uint64_t pool;
  unsigned char uuid[16];
  unsigned char reserved[88];
};

struct Piece {
  std::uint64_t chunk;
  std::uint64_t bytes;
  std::uint32_t index; // 0, 1 ...: in the order of their addresses
  unsigned char reserved[92];
};

struct PiecesTaken {
  std::uint64_t chunk;
  std::uint32_t count; // descriptors that are closed again at the importer since the last such record
  unsigned char reserved[100];
};

struct Ring {
  std::uint64_t slot_bytes;
  std::uint32_t slot_count;
  std::uint32_t to_importer; // 1: exporter fills, importer drains
  unsigned char reserved[96];
};

struct EventHandle {
  std::uint32_t index;
  std::uint32_t reserved0;
  unsigned char handle[64];
  unsigned char reserved[40];
};

enum ExportFlags : std::uint32_t {
  ExportKeepOpen = 1, // more turns may follow
  ExportReady = 2,    // READY of turn 1 is posted: no Ready record follows for it
  ExportCanary = 4,   // the library's own proof of the rung; the importer's library answers it
};

struct Export {
  std::uint64_t loan;
  std::uint64_t request; // the request it answers, 0 for none
  std::uint64_t chunk;   // 0 for none (a loan of 0 bytes, or the ring)
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint64_t export_ns;
  std::uint64_t ready_ns; // 0 unless ExportReady
  std::uint32_t slot;
  std::uint32_t generation;
  std::uint32_t access; // gpuloan_access
  std::uint32_t rung;   // gpuloan_rung
  std::uint32_t gate;   // gpuloan_gate
  std::uint32_t memory; // gpuloan_memory
  std::uint32_t flags;  // ExportFlags
  std::uint32_t event;  // index of the event pair, event gate only
  std::uint32_t exposed_kib;
  std::uint32_t canary; // gpuloan_canary
  unsigned char reserved[16];
};

struct Turn { // Ready, Done
  std::uint64_t loan;
  std::uint32_t slot;
  std::uint32_t generation;
  std::uint32_t turn;
  std::uint32_t reserved0;
  std::uint64_t at_ns; // when READY was posted / when the work was seen complete (0 where only recorded)
  unsigned char reserved[80];
};

struct Ack {
  std::uint64_t loan;
  std::uint32_t slot;
  std::uint32_t generation;
  std::int32_t outcome; // gpuloan_status
  std::uint32_t turns_done;
  std::uint64_t import_ns;
  std::uint64_t write_ns;
  std::uint64_t done_ns;
  std::uint64_t unimport_ns;
  std::uint64_t ack_ns;
  std::uint64_t copied_bytes;
  unsigned char reserved[40];
};

struct Cancel { // Cancel, Finish
  std::uint64_t loan;
  std::int32_t status; // gpuloan_status
  std::uint32_t reserved0;
  unsigned char reserved[96];
};

struct Request {
  std::uint64_t request; // chosen by the importer, never 0
  std::uint64_t bytes;
  std::uint64_t alignment;
  std::uint32_t memory; // gpuloan_memory
  std::uint32_t onward;
  unsigned char reserved[80];
};

struct Denied {
  std::uint64_t request;
  std::int32_t status; // gpuloan_status
  std::uint32_t reserved0;
  unsigned char reserved[96];
};

struct RingFilled {
  std::uint64_t loan;
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint32_t turn;
  std::uint32_t slot;
  unsigned char reserved[80];
};

struct RingDrained {
  std::uint32_t slot;
  std::uint32_t reserved0;
  unsigned char reserved[104];
};

// A record as it lies in memory; which member is meant is said by header.type.
struct Record {
  Header header;
  union {
    Hello hello;
    Welcome welcome;
    Notice notice;
    Pages pages;
    Empty empty;
    Chunk chunk;
    Ring ring;
    EventHandle event_handle;
    Export export_;
    Turn turn;
    Ack ack;
    Cancel cancel;
    Request request;
    Denied denied;
    RingFilled ring_filled;
    RingDrained ring_drained;
    Foreign foreign;
    Piece piece;
    PiecesTaken pieces_taken;
    Pool pool;
  };
};

// Of a message of several records each starts at a multiple of this.
inline constexpr std::size_t kBundleAlign = 16;
[[nodiscard]] constexpr std::size_t bundle_step(std::size_t bytes) noexcept { return (bytes + kBundleAlign - 1) / kBundleAlign * kBundleAlign; }

static_assert(sizeof(Header) == 16);
static_assert(sizeof(DeviceEntry) == 24);
static_assert(sizeof(Hello) == 112 && sizeof(Welcome) == 112 && sizeof(Notice) == 112 && sizeof(Pages) == 112);
static_assert(sizeof(Empty) == 112 && sizeof(Chunk) == 112 && sizeof(Ring) == 112 && sizeof(EventHandle) == 112);
static_assert(sizeof(Export) == 112 && sizeof(Turn) == 112 && sizeof(Ack) == 112 && sizeof(Cancel) == 112);
static_assert(sizeof(Request) == 112 && sizeof(Denied) == 112 && sizeof(RingFilled) == 112);
static_assert(sizeof(RingDrained) == 112 && sizeof(Foreign) == 112 && sizeof(Piece) == 112 && sizeof(PiecesTaken) == 112);
static_assert(sizeof(Pool) == 112);
static_assert(sizeof(Record) == kRecordBytes && std::is_trivially_copyable_v<Record>);

} // namespace gpuloan::channel
