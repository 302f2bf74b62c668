// SPDX-License-Identifier: MIT
//
// The wire format as literals, frozen: version 1 is what is written here. lib/channel/records.hpp and docs/protocol.md
// are both compared with it. A change of any line is a new protocol version.
#pragma once

// F(struct, field, offset in the struct, bytes)
#define GPULOAN_WIRE_FIELDS(F)                                                                                         \
  F(Header, magic, 0, 4)                                                                                               \
  F(Header, version, 4, 2)                                                                                             \
  F(Header, type, 6, 2)                                                                                                \
  F(Header, fd_count, 8, 2)                                                                                            \
  F(Header, tail_bytes, 10, 2)                                                                                         \
  F(Header, reserved, 12, 4)                                                                                           \
  F(DeviceEntry, uuid, 0, 16)                                                                                          \
  F(DeviceEntry, floors, 16, 4)                                                                                        \
  F(DeviceEntry, driver_version, 20, 4)                                                                                \
  F(Hello, version_min, 0, 2)                                                                                          \
  F(Hello, version_max, 2, 2)                                                                                          \
  F(Hello, features, 4, 4)                                                                                             \
  F(Hello, device_count, 8, 4)                                                                                         \
  F(Hello, has_key, 12, 4)                                                                                             \
  F(Hello, boot_id, 16, 16)                                                                                            \
  F(Hello, key, 32, 32)                                                                                                \
  F(Hello, wants_device, 64, 4)                                                                                        \
  F(Hello, reserved, 68, 44)                                                                                           \
  F(Welcome, version, 0, 2)                                                                                            \
  F(Welcome, reserved0, 2, 2)                                                                                          \
  F(Welcome, features, 4, 4)                                                                                           \
  F(Welcome, device_count, 8, 4)                                                                                       \
  F(Welcome, slots, 12, 4)                                                                                             \
  F(Welcome, reserved, 16, 96)                                                                                         \
  F(Notice, status, 0, 4)                                                                                              \
  F(Notice, reserved, 4, 108)                                                                                          \
  F(Pages, bytes, 0, 8)                                                                                                \
  F(Pages, slots, 8, 4)                                                                                                \
  F(Pages, reserved, 12, 100)                                                                                          \
  F(Empty, reserved, 0, 112)                                                                                           \
  F(Chunk, chunk, 0, 8)                                                                                                \
  F(Chunk, bytes, 8, 8)                                                                                                \
  F(Chunk, kind, 16, 4)                                                                                                \
  F(Chunk, access, 20, 4)                                                                                              \
  F(Chunk, uuid, 24, 16)                                                                                               \
  F(Chunk, reserved, 40, 72)                                                                                           \
  F(Ring, slot_bytes, 0, 8)                                                                                            \
  F(Ring, slot_count, 8, 4)                                                                                            \
  F(Ring, to_importer, 12, 4)                                                                                          \
  F(Ring, reserved, 16, 96)                                                                                            \
  F(EventHandle, index, 0, 4)                                                                                          \
  F(EventHandle, reserved0, 4, 4)                                                                                      \
  F(EventHandle, handle, 8, 64)                                                                                        \
  F(EventHandle, reserved, 72, 40)                                                                                     \
  F(Export, loan, 0, 8)                                                                                                \
  F(Export, request, 8, 8)                                                                                             \
  F(Export, chunk, 16, 8)                                                                                              \
  F(Export, offset, 24, 8)                                                                                             \
  F(Export, bytes, 32, 8)                                                                                              \
  F(Export, export_ns, 40, 8)                                                                                          \
  F(Export, ready_ns, 48, 8)                                                                                           \
  F(Export, slot, 56, 4)                                                                                               \
  F(Export, generation, 60, 4)                                                                                         \
  F(Export, access, 64, 4)                                                                                             \
  F(Export, rung, 68, 4)                                                                                               \
  F(Export, gate, 72, 4)                                                                                               \
  F(Export, memory, 76, 4)                                                                                             \
  F(Export, flags, 80, 4)                                                                                              \
  F(Export, event, 84, 4)                                                                                              \
  F(Export, exposed_kib, 88, 4)                                                                                        \
  F(Export, canary, 92, 4)                                                                                             \
  F(Export, reserved, 96, 16)                                                                                          \
  F(Turn, loan, 0, 8)                                                                                                  \
  F(Turn, slot, 8, 4)                                                                                                  \
  F(Turn, generation, 12, 4)                                                                                           \
  F(Turn, turn, 16, 4)                                                                                                 \
  F(Turn, reserved0, 20, 4)                                                                                            \
  F(Turn, at_ns, 24, 8)                                                                                                \
  F(Turn, reserved, 32, 80)                                                                                            \
  F(Ack, loan, 0, 8)                                                                                                   \
  F(Ack, slot, 8, 4)                                                                                                   \
  F(Ack, generation, 12, 4)                                                                                            \
  F(Ack, outcome, 16, 4)                                                                                               \
  F(Ack, turns_done, 20, 4)                                                                                            \
  F(Ack, import_ns, 24, 8)                                                                                             \
  F(Ack, write_ns, 32, 8)                                                                                              \
  F(Ack, done_ns, 40, 8)                                                                                               \
  F(Ack, unimport_ns, 48, 8)                                                                                           \
  F(Ack, ack_ns, 56, 8)                                                                                                \
  F(Ack, copied_bytes, 64, 8)                                                                                          \
  F(Ack, reserved, 72, 40)                                                                                             \
  F(Cancel, loan, 0, 8)                                                                                                \
  F(Cancel, status, 8, 4)                                                                                              \
  F(Cancel, reserved0, 12, 4)                                                                                          \
  F(Cancel, reserved, 16, 96)                                                                                          \
  F(Request, request, 0, 8)                                                                                            \
  F(Request, bytes, 8, 8)                                                                                              \
  F(Request, alignment, 16, 8)                                                                                         \
  F(Request, memory, 24, 4)                                                                                            \
  F(Request, onward, 28, 4)                                                                                            \
  F(Request, reserved, 32, 80)                                                                                         \
  F(Denied, request, 0, 8)                                                                                             \
  F(Denied, status, 8, 4)                                                                                              \
  F(Denied, reserved0, 12, 4)                                                                                          \
  F(Denied, reserved, 16, 96)                                                                                          \
  F(RingFilled, loan, 0, 8)                                                                                            \
  F(RingFilled, offset, 8, 8)                                                                                          \
  F(RingFilled, bytes, 16, 8)                                                                                          \
  F(RingFilled, turn, 24, 4)                                                                                           \
  F(RingFilled, slot, 28, 4)                                                                                           \
  F(RingFilled, reserved, 32, 80)                                                                                      \
  F(RingDrained, slot, 0, 4)                                                                                           \
  F(RingDrained, reserved0, 4, 4)                                                                                      \
  F(RingDrained, reserved, 8, 104)                                                                                     \
  F(Foreign, chunk, 0, 8)                                                                                              \
  F(Foreign, bytes, 8, 8)                                                                                              \
  F(Foreign, buffer, 16, 8)                                                                                            \
  F(Foreign, kind, 24, 4)                                                                                              \
  F(Foreign, access, 28, 4)                                                                                            \
  F(Foreign, pieces, 32, 4)                                                                                            \
  F(Foreign, reserved0, 36, 4)                                                                                         \
  F(Foreign, uuid, 40, 16)                                                                                             \
  F(Foreign, pool, 56, 8)                                                                                              \
  F(Foreign, reserved, 64, 48)                                                                                         \
  F(Piece, chunk, 0, 8)                                                                                                \
  F(Piece, bytes, 8, 8)                                                                                                \
  F(Piece, index, 16, 4)                                                                                               \
  F(Piece, reserved, 20, 92)                                                                                           \
  F(PiecesTaken, chunk, 0, 8)                                                                                          \
  F(PiecesTaken, count, 8, 4)                                                                                          \
  F(PiecesTaken, reserved, 12, 100)                                                                                    \
  F(Pool, pool, 0, 8)                                                                                                  \
  F(Pool, uuid, 8, 16)                                                                                                 \
  F(Pool, reserved, 24, 88)

// F(Type, number, name, struct of its body, descriptors, longest tail)
#define GPULOAN_WIRE_TYPES(F)                                                                                          \
  F(Hello, 1, "HELLO", Hello, 0, 1536)                                                                                 \
  F(Welcome, 2, "WELCOME", Welcome, 0, 1536)                                                                           \
  F(Refused, 3, "REFUSED", Notice, 0, 4096)                                                                            \
  F(Bye, 4, "BYE", Notice, 0, 4096)                                                                                    \
  F(Pages, 5, "PAGES", Pages, 1, 0)                                                                                    \
  F(PagesMapped, 6, "PAGES_MAPPED", Empty, 0, 0)                                                                       \
  F(PagesSealed, 7, "PAGES_SEALED", Empty, 0, 0)                                                                       \
  F(PagesChecked, 8, "PAGES_CHECKED", Empty, 0, 0)                                                                     \
  F(Chunk, 9, "CHUNK", Chunk, 1, 0)                                                                                    \
  F(Recall, 10, "RECALL", Chunk, 0, 0)                                                                                 \
  F(Unmapped, 11, "UNMAPPED", Chunk, 0, 0)                                                                             \
  F(Ring, 12, "RING", Ring, 1, 0)                                                                                      \
  F(EventHandle, 13, "EVENT_HANDLE", EventHandle, 0, 0)                                                                \
  F(Export, 14, "EXPORT", Export, 0, 4096)                                                                             \
  F(Ready, 15, "READY", Turn, 0, 0)                                                                                    \
  F(Done, 16, "DONE", Turn, 0, 0)                                                                                      \
  F(Ack, 17, "ACK", Ack, 0, 4096)                                                                                      \
  F(Cancel, 18, "CANCEL", Cancel, 0, 4096)                                                                             \
  F(Finish, 19, "FINISH", Cancel, 0, 0)                                                                                \
  F(Request, 20, "REQUEST", Request, 0, 4096)                                                                          \
  F(Denied, 21, "DENIED", Denied, 0, 4096)                                                                             \
  F(RingFilled, 22, "RING_FILLED", RingFilled, 0, 0)                                                                   \
  F(RingDrained, 23, "RING_DRAINED", RingDrained, 0, 0)                                                                \
  F(Tether, 24, "TETHER", Empty, 1, 0)                                                                                 \
  F(Foreign, 25, "FOREIGN", Foreign, 0, 64)                                                                            \
  F(Piece, 26, "PIECE", Piece, 1, 0)                                                                                   \
  F(PiecesTaken, 27, "PIECES_TAKEN", PiecesTaken, 0, 0)                                                                \
  F(Pool, 28, "POOL", Pool, 1, 0)

#define GPULOAN_WIRE_BODIES(F)                                                                                         \
  F(Hello)                                                                                                             \
  F(Welcome)                                                                                                           \
  F(Notice)                                                                                                            \
  F(Pages)                                                                                                             \
  F(Empty)                                                                                                             \
  F(Chunk)                                                                                                             \
  F(Ring)                                                                                                              \
  F(EventHandle)                                                                                                       \
  F(Export)                                                                                                            \
  F(Turn)                                                                                                              \
  F(Ack)                                                                                                               \
  F(Cancel)                                                                                                            \
  F(Request)                                                                                                           \
  F(Denied)                                                                                                            \
  F(RingFilled)                                                                                                        \
  F(RingDrained)                                                                                                       \
  F(Foreign)                                                                                                           \
  F(Piece)                                                                                                             \
  F(PiecesTaken)                                                                                                       \
  F(Pool)
