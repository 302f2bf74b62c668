// SPDX-License-Identifier: MIT
//
// Admission over everything that it may be asked. What must hold is written down again here, from the contract and not
// from the code: which rung can carry the bytes at all, which carrier then copies, and that each rung which is passed over
// is named with a reason. Some rows are spelled out below.
#include <doctest/doctest.h>

#include <loan/admission.hpp>

#include <array>
#include <vector>

using namespace gpuloan::loan;

namespace {

constexpr std::uint32_t kVmmBit = GPULOAN_RUNG_VMM;
constexpr std::uint32_t kPoolBit = GPULOAN_RUNG_POOL;
constexpr std::uint32_t kIpcBit = GPULOAN_RUNG_IPC;
constexpr std::uint32_t kHostBit = GPULOAN_RUNG_HOST;
using gpuloan::memory::PointerKind;
constexpr SideFloors kNoDevice = {false, 0};
constexpr SideFloors kBare = {true, GPULOAN_FLOOR_MEMOPS};
constexpr SideFloors kFull = {true, ~0U};
constexpr SideFloors kNoVmm = {true, ~static_cast<std::uint32_t>(GPULOAN_FLOOR_VMM)};

std::string describe(const AdmissionInput& in) {
  return "origin " + std::to_string(static_cast<int>(in.origin)) + " wanted " + std::to_string(in.wanted) + " exporter " +
         std::to_string(in.exporter.has_device) + "/" + std::to_string(in.exporter.floors & GPULOAN_FLOOR_VMM) + " importer " +
         std::to_string(in.importer.has_device) + "/" + std::to_string(in.importer.floors & GPULOAN_FLOOR_VMM) + " kind " + std::to_string(static_cast<int>(in.kind)) + " same " +
         std::to_string(in.same_device) + " peer " + std::to_string(in.peer_access) + " exclusive " + std::to_string(in.exclusive) + " one process " +
         std::to_string(in.same_process) + " canaries " + std::to_string(in.vmm.canary) + "/" + std::to_string(in.vmm.unanswered) + " " +
         std::to_string(in.ipc.canary) + "/" + std::to_string(in.ipc.unanswered) + " unprovable '" + in.unprovable  + "' rungs " +
         std::to_string(in.rungs) + " policy " + std::to_string(in.policy);
}

bool has_vmm(const SideFloors& side) { return side.has_device && (side.floors & GPULOAN_FLOOR_VMM) != 0; }
bool has_ipc(const SideFloors& side) { return side.has_device && (side.floors & GPULOAN_FLOOR_IPC_MEMORY) != 0; }
bool proven(const RungProof& proof) { return proof.canary != GPULOAN_CANARY_DEMOTED && !proof.unanswered; }
// Memory that is not ours can only be kept, so there must be a way to tell when to stop.
bool keepable(const AdmissionInput& in) { return *in.unprovable == '\0'; }

// By its own device or by a peer's, on which it gets a CUDA context at all.
bool reaches(const AdmissionInput& in) { return (in.same_device || in.peer_access) && !in.exclusive; }

// The importer maps the chunk itself, and the way there was proven (or there is nothing to prove).
bool vmm_can(const AdmissionInput& in) {
  const bool ours = in.origin == Origin::ArenaDevice || in.origin == Origin::Nothing;
  const bool lent_on = in.origin == Origin::OtherArena && in.alone && in.access == GPULOAN_ACCESS_READ;
  const bool theirs = (in.origin == Origin::Foreign || lent_on) && in.kind == PointerKind::VmmShareable && keepable(in) &&
                      (in.exporter.floors & GPULOAN_FLOOR_FOREIGN_VMM) != 0;
  return (in.rungs & kVmmBit) != 0 && (ours || theirs) && in.wanted == GPULOAN_MEMORY_DEVICE && has_vmm(in.exporter) && has_vmm(in.importer) &&
         reaches(in) && (in.origin == Origin::Nothing || proven(ours ? in.vmm : in.foreign_vmm));
}

bool has_pools(const SideFloors& side) { return side.has_device && (side.floors & GPULOAN_FLOOR_POOLS) != 0; }

// The importer opens the allocation through its pool; one that is too large would kill it.
bool pool_can(const AdmissionInput& in) {
  const bool allocation = in.origin == Origin::Foreign && in.kind == PointerKind::PoolShareable && in.allocation_bytes <= in.import_limit &&
                          keepable(in) && proven(in.pool);
  return (in.rungs & kPoolBit) != 0 && (allocation || in.origin == Origin::Nothing) && in.wanted == GPULOAN_MEMORY_DEVICE &&
         has_pools(in.exporter) && has_pools(in.importer) && in.same_device && !in.exclusive;
}

// The importer opens the block by its legacy handle, which only cuMemAlloc memory has.
bool ipc_can(const AdmissionInput& in) {
  const bool block = in.origin == Origin::Foreign && in.kind == PointerKind::Alloc && keepable(in) && proven(in.ipc);
  return (in.rungs & kIpcBit) != 0 && (block || in.origin == Origin::Nothing) && in.wanted == GPULOAN_MEMORY_DEVICE && has_ipc(in.exporter) &&
         has_ipc(in.importer) && reaches(in) && (in.origin == Origin::Nothing || !in.same_process);
}

bool fits(const AdmissionInput& in) { return in.bytes <= in.free_bytes; }

// A copy on the device, into a chunk of the peer's own.
bool stage_can(const AdmissionInput& in) {
  return (in.rungs & kVmmBit) != 0 && (in.origin == Origin::Foreign || in.origin == Origin::OtherArena) && in.wanted == GPULOAN_MEMORY_DEVICE &&
         has_vmm(in.exporter) && has_vmm(in.importer) && reaches(in) && proven(in.vmm) && fits(in) &&
         in.policy != GPULOAN_POLICY_REQUIRE_ZERO_COPY;
}

bool host_copies(const AdmissionInput& in) {
  return in.origin == Origin::ArenaDevice || in.origin == Origin::OtherArena || in.origin == Origin::Foreign;
}

// Copies go through host memory that the exporter's device knows, and over the ring the importer's too.
bool host_can(const AdmissionInput& in) {
  if ((in.rungs & kHostBit) == 0) return false;
  if (!host_copies(in)) return true;
  const bool ring = in.wanted == GPULOAN_MEMORY_DEVICE && in.importer.has_device;
  return in.policy != GPULOAN_POLICY_REQUIRE_ZERO_COPY && (!ring || ((fits(in) || !in.same_device) && !in.exclusive));
}

void check_chosen(const AdmissionInput& in, const Admission& out) {
  CHECK((static_cast<std::uint32_t>(out.rung) & in.rungs) != 0); // never one that was not allowed
  const bool staged = !vmm_can(in) && !pool_can(in) && !ipc_can(in) && stage_can(in);
  CHECK(out.rung == (vmm_can(in) || staged ? GPULOAN_RUNG_VMM : pool_can(in) ? GPULOAN_RUNG_POOL : ipc_can(in) ? GPULOAN_RUNG_IPC : GPULOAN_RUNG_HOST));
  CHECK((out.carrier == Carrier::Stage) == staged);
  const bool copies = out.carrier != Carrier::Direct;
  if (in.policy == GPULOAN_POLICY_REQUIRE_ZERO_COPY) CHECK_FALSE(copies);
  if (vmm_can(in)) CHECK(out.reason.empty());
  else CHECK(out.reason.starts_with("vmm: "));
  if (out.rung != GPULOAN_RUNG_HOST) {
    CHECK(copies == staged);
    CHECK(out.memory == GPULOAN_MEMORY_DEVICE);
    return;
  }
  CHECK(copies == host_copies(in));
  CHECK(out.reason.find("; ipc: ") != std::string::npos);
  const bool host_memory = in.wanted == GPULOAN_MEMORY_HOST || !in.importer.has_device || in.origin == Origin::ArenaHost;
  CHECK(out.memory == (host_memory ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE));
  if (out.carrier == Carrier::Ring) { // it ends in a buffer on the importer's device
    CHECK(in.importer.has_device);
    CHECK_FALSE(host_memory);
  }
  if (out.carrier == Carrier::Segment) CHECK(host_memory);
}

void check(const AdmissionInput& in) {
  CAPTURE(describe(in));
  const auto out = admit(in);
  REQUIRE(out.has_value() == (vmm_can(in) || pool_can(in) || ipc_can(in) || stage_can(in) || host_can(in)));
  if (out) {
    check_chosen(in, *out);
    return;
  }
  CHECK(out.error().status == GPULOAN_ERR_NO_RUNG);
  const std::string& text = out.error().text;
  const std::size_t vmm = text.find("vmm: ");
  const std::size_t host = text.find("host: ");
  REQUIRE(vmm != std::string::npos);
  REQUIRE(host != std::string::npos);
  CHECK(text.size() > host + 6);
  CHECK(text[vmm + 5] != ';'); // a reason, not only a name
}

constexpr int kMemoryCount = 13;

template <typename Visit>
void each_input(Visit visit) {
  constexpr std::array kSides = {kNoDevice, kBare, kFull};
  constexpr std::array<std::uint32_t, 7> kMasks = {0, kVmmBit, kPoolBit, kIpcBit, kHostBit, kVmmBit | kHostBit, ~0U};
  struct Memory {
    Origin origin;
    PointerKind kind;
    bool alone = false;
  };
  constexpr Memory kMemories[] = {{Origin::Nothing, PointerKind::Unknown},       {Origin::ArenaDevice, PointerKind::Unknown},
                                  {Origin::ArenaHost, PointerKind::Unknown},     {Origin::OtherArena, PointerKind::VmmShareable},
                                  {Origin::OtherArena, PointerKind::VmmShareable, true}, {Origin::OtherArena, PointerKind::HostAlloc, true},
                                  {Origin::Foreign, PointerKind::Alloc},         {Origin::Foreign, PointerKind::PoolShareable},
                                  {Origin::Foreign, PointerKind::PoolPrivate},   {Origin::Foreign, PointerKind::VmmShareable},
                                  {Origin::Foreign, PointerKind::VmmPrivate},    {Origin::Foreign, PointerKind::Managed},
                                  {Origin::Foreign, PointerKind::HostAlloc}};
  static_assert(std::size(kMemories) == kMemoryCount);
  AdmissionInput in;
  for (const auto& [origin, kind, alone] : kMemories)
    for (const gpuloan_access access : {GPULOAN_ACCESS_READ, GPULOAN_ACCESS_WRITE})
     for (const std::uint64_t free : {std::uint64_t{0}, UINT64_MAX})
    for (const std::uint64_t limit : {999U, 1000U})
    for (const gpuloan_memory wanted : {GPULOAN_MEMORY_DEVICE, GPULOAN_MEMORY_HOST})
      for (const SideFloors& exporter : kSides)
        for (const SideFloors& importer : kSides)
          for (const bool same : {false, true})
            for (const gpuloan_canary canary : {GPULOAN_CANARY_NOT_ATTEMPTED, GPULOAN_CANARY_VERIFIED, GPULOAN_CANARY_DEMOTED})
              for (const bool unanswered : {false, true})
                for (const char* unprovable : {"", "nobody can tell"})
                  for (const std::uint32_t rungs : kMasks)
                    for (const gpuloan_policy policy : {GPULOAN_POLICY_BEST, GPULOAN_POLICY_REQUIRE_ZERO_COPY}) {
                      const RungProof proof = {canary, unanswered};
                      in = {origin, kind, alone, access, 100, free, 1000, limit, wanted, exporter, importer, same, proof, proof, proof, proof, unprovable, rungs, policy, canary == GPULOAN_CANARY_VERIFIED ? canary : GPULOAN_CANARY_NOT_ATTEMPTED};
                      visit(in);
                      in.peer_access = !same; // how the sides stand to each other, of which one holds at a time
                      in.exclusive = in.same_process = same;
                      if (same && unanswered) in.exclusive = false;
                      if (same && !unanswered) in.same_process = false;
                      visit(in);
                    }
}

AdmissionInput everyday() {
  constexpr RungProof kProven = {GPULOAN_CANARY_VERIFIED, false};
  return {Origin::ArenaDevice, PointerKind::Unknown, false, GPULOAN_ACCESS_READ, 100, UINT64_MAX, 100, 5248ULL << 20, GPULOAN_MEMORY_DEVICE,
          kFull, kFull, true, kProven, kProven, kProven, kProven, "", ~0U, GPULOAN_POLICY_BEST, GPULOAN_CANARY_NOT_ATTEMPTED};
}

void foreign(AdmissionInput& in, PointerKind kind) {
  in.origin = Origin::Foreign;
  in.kind = kind;
}

void lent_on(AdmissionInput& in, bool alone) {
  in.origin = Origin::OtherArena;
  in.kind = PointerKind::VmmShareable;
  in.alone = alone;
}

// A change of the everyday case, what it gives, and a part of the reason.
struct Row {
  const char* what;
  void (*change)(AdmissionInput& in);
  gpuloan_rung rung; // NONE: NO_RUNG
  Carrier carrier;
  gpuloan_memory memory;
  const char* reason;
};

constexpr auto kDevice = GPULOAN_MEMORY_DEVICE;
constexpr auto kHostMemory = GPULOAN_MEMORY_HOST;

constexpr Row kRows[] = {
    {"everyday", [](AdmissionInput&) {}, GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"not yet proven",
     [](AdmissionInput& in) { in.vmm.canary = GPULOAN_CANARY_NOT_ATTEMPTED; },
     GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"nothing to lend",
     [](AdmissionInput& in) { in.origin = Origin::Nothing; in.vmm.canary = GPULOAN_CANARY_DEMOTED; },
     GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"vmm forbidden", [](AdmissionInput& in) { in.rungs = kHostBit; }, GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "not among the allowed"},
    {"demoted",
     [](AdmissionInput& in) { in.vmm.canary = GPULOAN_CANARY_DEMOTED; },
     GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "canary failed"},
    {"unanswered", [](AdmissionInput& in) { in.vmm.unanswered = true; }, GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "unanswered"},
    {"other device", [](AdmissionInput& in) { in.same_device = false; }, GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "another device"},
    {"other device, not seen", [](AdmissionInput& in) { in.same_device = false, in.apart = "not visible to it"; }, GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "vmm: not visible to it; "},
    {"a peer", [](AdmissionInput& in) { in.same_device = false, in.peer_access = true; }, GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"a peer, cuMemAlloc",
     [](AdmissionInput& in) { in.same_device = false, in.peer_access = true, foreign(in, PointerKind::Alloc); },
     GPULOAN_RUNG_IPC, Carrier::Direct, kDevice, "cuMemAlloc memory"},
    {"a peer, shareable pool",
     [](AdmissionInput& in) { in.same_device = false, in.peer_access = true, foreign(in, PointerKind::PoolShareable); },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "pool: the importer works on another device, and a pool is imported on its own device alone"},
    {"exclusive-process mode", [](AdmissionInput& in) { in.exclusive = true; }, GPULOAN_RUNG_NONE, Carrier::Direct, kDevice, "host: the device is in exclusive-process mode"},
    {"exclusive-process mode, it wants host memory",
     [](AdmissionInput& in) { in.exclusive = true, in.wanted = kHostMemory; },
     GPULOAN_RUNG_HOST, Carrier::Segment, kHostMemory, "wants host memory"},
    {"one process, cuMemAlloc",
     [](AdmissionInput& in) { in.same_process = true, foreign(in, PointerKind::Alloc); },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "ipc: exporter and importer are one process"},
    {"no VMM here", [](AdmissionInput& in) { in.exporter = kNoVmm; }, GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "this device has no VMM"},
    {"no VMM there",
     [](AdmissionInput& in) { in.importer = kNoVmm; },
     GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "importer's driver has no VMM"},
    {"nothing registers here",
     [](AdmissionInput& in) { in.exporter = kBare; },
     GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "this device has no VMM"},
    {"nothing registers there",
     [](AdmissionInput& in) { in.importer = kBare; },
     GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "importer's driver has no VMM"},
    {"a worker without a device",
     [](AdmissionInput& in) { in.importer = kNoDevice; in.same_device = false; },
     GPULOAN_RUNG_HOST, Carrier::Segment, kHostMemory, "no device"},
    {"it wants host memory",
     [](AdmissionInput& in) { in.wanted = kHostMemory; },
     GPULOAN_RUNG_HOST, Carrier::Segment, kHostMemory, "wants host memory"},
    {"host region",
     [](AdmissionInput& in) { in.origin = Origin::ArenaHost; },
     GPULOAN_RUNG_HOST, Carrier::Direct, kHostMemory, "is host memory"},
    {"host region, zero-copy",
     [](AdmissionInput& in) { in.origin = Origin::ArenaHost; in.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY; },
     GPULOAN_RUNG_HOST, Carrier::Direct, kHostMemory, "is host memory"},
    {"another peer's region",
     [](AdmissionInput& in) { lent_on(in, false); },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "shares its chunk with others"},
    {"another peer's region, alone in its chunk", [](AdmissionInput& in) { lent_on(in, true); }, GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"another peer's region, for write",
     [](AdmissionInput& in) { lent_on(in, true), in.access = GPULOAN_ACCESS_WRITE; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "which may still write it"},
    {"another peer's region, zero-copy",
     [](AdmissionInput& in) { lent_on(in, false), in.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY; },
     GPULOAN_RUNG_NONE, Carrier::Direct, kDevice, "device copy: the policy requires zero-copy"},
    {"cuMemAlloc", [](AdmissionInput& in) { foreign(in, PointerKind::Alloc); }, GPULOAN_RUNG_IPC, Carrier::Direct, kDevice, "cuMemAlloc memory"},
    {"cuMemAlloc, vmm only",
     [](AdmissionInput& in) { foreign(in, PointerKind::Alloc), in.rungs = kVmmBit; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "ipc: not among the allowed"},
    {"cuMemAlloc, death cannot be proven",
     [](AdmissionInput& in) { foreign(in, PointerKind::Alloc), in.unprovable = "no pidfd"; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "ipc: memory lent this way could never be released if the peer is lost: no pidfd"},
    {"cuMemAlloc, demoted",
     [](AdmissionInput& in) { foreign(in, PointerKind::Alloc), in.ipc.canary = GPULOAN_CANARY_DEMOTED; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "ipc: its canary failed"},
    {"cuMemAlloc, both demoted",
     [](AdmissionInput& in) { foreign(in, PointerKind::Alloc), in.ipc.canary = in.vmm.canary = GPULOAN_CANARY_DEMOTED; },
     GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "device copy: its canary failed"},
    {"16 GiB on a card of 24 GiB, by ipc",
     [](AdmissionInput& in) { foreign(in, PointerKind::Alloc), in.bytes = 16ULL << 30, in.free_bytes = 8ULL << 30; },
     GPULOAN_RUNG_IPC, Carrier::Direct, kDevice, "cuMemAlloc"},
    {"16 GiB on a card of 24 GiB, copied",
     [](AdmissionInput& in) { foreign(in, PointerKind::PoolPrivate), in.bytes = 16ULL << 30, in.free_bytes = 8ULL << 30; },
     GPULOAN_RUNG_NONE, Carrier::Direct, kDevice, "a copy needs 17179869184 bytes of the device beside the original, 8589934592 are free"},
    {"shareable pool", [](AdmissionInput& in) { foreign(in, PointerKind::PoolShareable); }, GPULOAN_RUNG_POOL, Carrier::Direct, kDevice, "vmm: "},
    {"shareable pool, as by default",
     [](AdmissionInput& in) { foreign(in, PointerKind::PoolShareable), in.rungs = kVmmBit | kIpcBit | kHostBit; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "experimental and off by default"},
    {"a view of 1 KiB of a pool allocation of 6 GiB",
     [](AdmissionInput& in) { foreign(in, PointerKind::PoolShareable), in.bytes = 1024, in.allocation_bytes = 6ULL << 30; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "pool: the allocation has 6442450944 bytes and touches 192 pieces of 32 MiB, and importing more than 5502926848 at once kills"},
    {"a pool allocation of 5247 MiB that begins late in a piece",
     [](AdmissionInput& in) { foreign(in, PointerKind::PoolShareable), in.allocation_bytes = 5247ULL << 20, in.allocation_base = 733ULL << 20; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "pool: the allocation has 5501878272 bytes and touches 165 pieces of 32 MiB"},
    {"pool", [](AdmissionInput& in) { foreign(in, PointerKind::PoolPrivate); }, GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "a pool that cannot be shared"},
    {"pool, zero-copy",
     [](AdmissionInput& in) { foreign(in, PointerKind::PoolPrivate), in.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY; },
     GPULOAN_RUNG_NONE, Carrier::Direct, kDevice, "requires zero-copy"},
    {"VMM of others", [](AdmissionInput& in) { foreign(in, PointerKind::VmmShareable); }, GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"VMM of others, death cannot be proven",
     [](AdmissionInput& in) { foreign(in, PointerKind::VmmShareable), in.unprovable = "no pidfd"; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "vmm: memory lent this way"},
    {"VMM of others, that way demoted",
     [](AdmissionInput& in) { foreign(in, PointerKind::VmmShareable), in.foreign_vmm.canary = GPULOAN_CANARY_DEMOTED; },
     GPULOAN_RUNG_VMM, Carrier::Stage, kDevice, "vmm: its canary failed"},
    {"VMM of others, the arena's way demoted",
     [](AdmissionInput& in) { foreign(in, PointerKind::VmmShareable), in.vmm.canary = GPULOAN_CANARY_DEMOTED; },
     GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"the arena's region, others' way demoted",
     [](AdmissionInput& in) { in.foreign_vmm.canary = GPULOAN_CANARY_DEMOTED; },
     GPULOAN_RUNG_VMM, Carrier::Direct, kDevice, ""},
    {"host rung demoted", [](AdmissionInput& in) { in.host = GPULOAN_CANARY_DEMOTED; }, GPULOAN_RUNG_NONE, Carrier::Direct, kDevice, "the peer is refused"},
    {"managed, host only",
     [](AdmissionInput& in) { foreign(in, PointerKind::Managed), in.rungs = kHostBit; },
     GPULOAN_RUNG_HOST, Carrier::Ring, kDevice, "device copy: not among the allowed"},
    {"nothing allowed",
     [](AdmissionInput& in) { in.rungs = 0; },
     GPULOAN_RUNG_NONE, Carrier::Direct, kDevice, "vmm: not among the allowed"},
};

} // namespace

// D5
TEST_CASE("admission: everything it may be asked") {
  int count = 0;
  each_input([&](const AdmissionInput& in) {
    check(in);
    ++count;
  });
  CHECK(count == kMemoryCount * 2 * 2 * 2 * 2 * 3 * 3 * 2 * 3 * 2 * 2 * 7 * 2 * 2);
}

TEST_CASE("admission: more allowed rungs never refuse more") {
  each_input([](AdmissionInput in) {
    if (in.rungs == ~0U || !admit(in)) return;
    in.rungs = ~0U;
    CAPTURE(describe(in));
    CHECK(admit(in).has_value());
  });
}

TEST_CASE("admission: a peer whose host canary failed is refused everything") {
  each_input([](AdmissionInput in) {
    in.host = GPULOAN_CANARY_DEMOTED;
    CAPTURE(describe(in));
    const auto out = admit(in);
    REQUIRE_FALSE(out.has_value());
    CHECK(out.error().status == GPULOAN_ERR_NO_RUNG);
    CHECK(out.error().text.find("the peer is refused") != std::string::npos);
  });
}

// D5
TEST_CASE("admission: rows") {
  for (const Row& row : kRows) {
    CAPTURE(row.what);
    AdmissionInput in = everyday();
    row.change(in);
    const auto out = admit(in);
    REQUIRE(out.has_value() == (row.rung != GPULOAN_RUNG_NONE));
    const std::string& reason = out ? out->reason : out.error().text;
    CHECK_MESSAGE(reason.find(row.reason) != std::string::npos, reason);
    if (!out) continue;
    CHECK(out->rung == row.rung);
    CHECK(out->carrier == row.carrier);
    CHECK(out->memory == row.memory);
    CHECK(out->reason.empty() == (*row.reason == '\0'));
  }
}

// ---- Gates --------------------------------------------------------------------------------------------------------

namespace {

constexpr std::uint32_t kMemops = GPULOAN_FLOOR_MEMOPS, kHostRegister = GPULOAN_FLOOR_HOST_REGISTER, kIpcEvents = GPULOAN_FLOOR_IPC_EVENTS;
constexpr std::uint32_t kMemopFloors = kMemops | kHostRegister;

// A side without a device says ready and done by its CPU.
bool memop_can(const SideFloors& side) { return !side.has_device || (side.floors & kMemopFloors) == kMemopFloors; }
bool event_can(const SideFloors& side) { return side.has_device && (side.floors & GPULOAN_FLOOR_IPC_EVENTS) != 0; }

void check_gate(gpuloan_gate wanted, const SideFloors& exporter, const SideFloors& importer, bool same, bool free) {
  CAPTURE(static_cast<int>(wanted));
  CAPTURE(exporter.has_device);
  CAPTURE(exporter.floors);
  CAPTURE(importer.has_device);
  CAPTURE(importer.floors);
  CAPTURE(same);
  CAPTURE(free);
  const bool memop = memop_can(exporter) && memop_can(importer);
  const bool event = event_can(exporter) && event_can(importer) && same && free;
  const auto out = choose_gate(wanted, exporter, importer, same, free);
  if (wanted != GPULOAN_GATE_AUTO) {
    const bool can = wanted == GPULOAN_GATE_HOST || (wanted == GPULOAN_GATE_MEMOP ? memop : event);
    REQUIRE(out.has_value() == can);
    if (out) {
      CHECK(out->gate == wanted);
      CHECK(out->reason.empty());
    } else {
      CHECK(out.error().status == GPULOAN_ERR_UNSUPPORTED);
      CHECK(out.error().text.find("cannot be had: ") + 16 < out.error().text.size());
    }
    return;
  }
  REQUIRE(out.has_value()); // there is always one
  CHECK(out->gate == (memop ? GPULOAN_GATE_MEMOP : event ? GPULOAN_GATE_EVENT : GPULOAN_GATE_HOST));
  CHECK((out->reason.find("memop: ") != std::string::npos) == !memop);
  CHECK((out->reason.find("event: ") != std::string::npos) == (!memop && !event));
}

} // namespace

TEST_CASE("gate: everything it may be asked") {
  std::vector<SideFloors> sides = {{false, 0}, {false, ~0U}};
  for (const std::uint32_t memops : {0U, kMemops})
    for (const std::uint32_t host : {0U, kHostRegister})
      for (const std::uint32_t events : {0U, kIpcEvents}) sides.push_back({true, memops | host | events | GPULOAN_FLOOR_VMM});
  for (const gpuloan_gate wanted : {GPULOAN_GATE_AUTO, GPULOAN_GATE_MEMOP, GPULOAN_GATE_EVENT, GPULOAN_GATE_HOST})
    for (const SideFloors& exporter : sides)
      for (const SideFloors& importer : sides)
        for (const bool same : {false, true})
          for (const bool free : {false, true}) check_gate(wanted, exporter, importer, same, free);
}

TEST_CASE("gate: rows") {
  const SideFloors no_memops = {true, ~static_cast<std::uint32_t>(GPULOAN_FLOOR_MEMOPS)};
  const SideFloors no_events = {true, ~static_cast<std::uint32_t>(GPULOAN_FLOOR_IPC_EVENTS)};
  const auto text = [](const auto& out) { return out ? out->reason : out.error().text; };
  CHECK(choose_gate(GPULOAN_GATE_AUTO, kFull, kFull, true, true)->gate == GPULOAN_GATE_MEMOP);
  CHECK(choose_gate(GPULOAN_GATE_AUTO, kFull, no_memops, true, true)->gate == GPULOAN_GATE_EVENT);
  CHECK(text(choose_gate(GPULOAN_GATE_AUTO, kFull, no_memops, true, true)).find("importer's device lacks") != std::string::npos);
  CHECK(choose_gate(GPULOAN_GATE_AUTO, no_memops, kFull, false, true)->gate == GPULOAN_GATE_HOST);
  CHECK(text(choose_gate(GPULOAN_GATE_AUTO, no_memops, kFull, false, true)).find("different devices") != std::string::npos);
  CHECK(text(choose_gate(GPULOAN_GATE_EVENT, kFull, kNoDevice, false, true)).find("a side has no device") != std::string::npos);
  CHECK(text(choose_gate(GPULOAN_GATE_EVENT, kFull, no_events, true, true)).find("no interprocess events") != std::string::npos);
  CHECK(text(choose_gate(GPULOAN_GATE_EVENT, kFull, kFull, true, false)).find("in use") != std::string::npos);
  CHECK(choose_gate(GPULOAN_GATE_MEMOP, kFull, kNoDevice, false, true)->gate == GPULOAN_GATE_MEMOP);
}
