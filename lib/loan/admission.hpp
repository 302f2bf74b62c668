// SPDX-License-Identifier: MIT
//
// Admission: which rung carries a loan and which gate orders it, with the reason why each better one does not. Pure: what
// is known of both sides in, the choice and its words out.
#pragma once

#include <memory/pointer_kind.hpp>

namespace gpuloan::loan {

// Where the bytes to be lent lie.
enum class Origin : std::uint8_t {
  Nothing,     // 0 bytes
  ArenaDevice, // device memory of this peer's arena
  ArenaHost,   // host memory of this peer's arena: both sides map it
  OtherArena,  // another peer's arena
  Foreign,     // memory that the caller's own allocator made; `kind` says how
};

// How the bytes reach the importer on the chosen rung.
enum class Carrier : std::uint8_t {
  Direct,  // it maps the memory that holds them
  Stage,   // it maps a chunk of its arena; the exporter copies between that and the region, on the device
  Segment, // the exporter's DMA moves them between the region and a host chunk that both map
  Ring,    // both sides' DMA move them through the ring; the importer works on a buffer of its own
};

struct SideFloors {
  bool has_device = false;
  std::uint32_t floors = 0; // gpuloan_floor, of the device it works on
  [[nodiscard]] bool operator==(const SideFloors&) const = default;
};

// What is known of one rung with one peer.
struct RungProof {
  gpuloan_canary canary = GPULOAN_CANARY_NOT_ATTEMPTED;
  bool unanswered = false; // it was sent, and no answer came yet
  const char* text = "";   // how it failed
  [[nodiscard]] bool operator==(const RungProof&) const = default;
};

struct AdmissionInput {
  Origin origin = Origin::Nothing;
  memory::PointerKind kind = memory::PointerKind::Unknown; // Origin::Foreign
  bool alone = false; // Origin::OtherArena: the region shares its chunk with no other
  gpuloan_access access = GPULOAN_ACCESS_READ;
  std::uint64_t bytes = 0;
  std::uint64_t free_bytes = UINT64_MAX; // of the device: a copy needs room beside the original
  std::uint64_t allocation_bytes = 0;    // Origin::Foreign: of the whole allocation
  std::uint64_t import_limit = 0;        // of one pool allocation: a larger one kills the importer (P3); 0: any does
  gpuloan_memory wanted = GPULOAN_MEMORY_DEVICE; // by the importer
  SideFloors exporter, importer;
  bool same_device = false; // by UUID
  RungProof vmm, foreign_vmm, pool, ipc; // foreign_vmm: memory that is not of this peer's part of the arena
  const char* unprovable = ""; // why it could not be proven that nobody of a lost peer is left; "" where it can (rule 5)
  std::uint32_t rungs = ~0U; // mask of allowed gpuloan_rung
  gpuloan_policy policy = GPULOAN_POLICY_BEST;
  gpuloan_canary host = GPULOAN_CANARY_NOT_ATTEMPTED; // of the host rung; unanswered it is kept, being the last
  bool peer_access = false;  // the importer works on another device, which reaches this one's memory
  const char* apart = "the importer works on another device"; // said where it is neither the same device nor a peer
  bool exclusive = false;    // this device takes one process at a time, and the importer is another one that works on it
  bool same_process = false; // exporter and importer are one process
  std::uint64_t allocation_base = 0;    // with import_limit
  const char* import_limit_source = ""; // for the reason
  [[nodiscard]] bool operator==(const AdmissionInput&) const = default; // of texts the addresses: equal means the same answer
};

struct Admission {
  gpuloan_rung rung = GPULOAN_RUNG_NONE;
  Carrier carrier = Carrier::Direct;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE; // what the importer will see
  std::string reason;                            // of each better rung that was refused; "" when the best was taken
};
// NO_RUNG with the reason of every rung, or because the peer is refused: its canary of the host rung failed.
[[nodiscard]] Result<Admission> admit(const AdmissionInput& input);

struct GateChoice {
  gpuloan_gate gate = GPULOAN_GATE_HOST;
  std::string reason;
};
// UNSUPPORTED when a gate was asked for by name and cannot be had. `event_free`: an event pair is left.
[[nodiscard]] Result<GateChoice> choose_gate(gpuloan_gate wanted, const SideFloors& exporter, const SideFloors& importer, bool same_device,
                                             bool event_free);

} // namespace gpuloan::loan
