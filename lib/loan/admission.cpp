// SPDX-License-Identifier: MIT
#include <loan/admission.hpp>

#include <memory/import_limit.hpp>

namespace gpuloan::loan {
namespace {

constexpr char kExclusive[] =
    "the device is in exclusive-process mode, so the importer gets no CUDA context on it: set the default mode (nvidia-smi -c 0), or use MPS";

// What every rung without a copy needs of the two sides.
std::string refuse_sharing(const AdmissionInput& in) {
  if (in.wanted == GPULOAN_MEMORY_HOST && in.importer.has_device) return "the importer wants host memory";
  if (!in.importer.has_device) return "the importer has no device";
  if (in.exclusive) return kExclusive;
  if (!in.same_device && !in.peer_access) return in.apart;
  return "";
}

std::string refuse_proof(const RungProof& proof) {
  if (proof.canary == GPULOAN_CANARY_DEMOTED) return std::string("its canary failed with this peer") + (*proof.text == '\0' ? "" : ": ") + proof.text;
  return proof.unanswered ? "its canary is still unanswered by this peer" : "";
}

// Memory that cannot be retired has to be kept until nobody of a lost peer is left.
std::string refuse_keeping(const AdmissionInput& in) {
  return *in.unprovable == '\0' ? "" : std::string("memory lent this way could never be released if the peer is lost: ") + in.unprovable;
}

bool has(const SideFloors& side, gpuloan_floor floor) { return (side.floors & static_cast<std::uint32_t>(floor)) != 0; }

// Why vmm cannot carry the loan; "" when it can.
std::string refuse_vmm(const AdmissionInput& in) {
  if ((in.rungs & GPULOAN_RUNG_VMM) == 0) return "not among the allowed rungs";
  if (in.origin == Origin::ArenaHost) return "the region is host memory";
  if (in.origin == Origin::OtherArena && in.access == GPULOAN_ACCESS_WRITE) return "the region was made for another peer, which may still write it";
  if (in.origin == Origin::OtherArena && !in.alone) return "the region shares its chunk with others of the peer it was made for";
  const bool ours = in.origin == Origin::ArenaDevice || in.origin == Origin::Nothing;
  if (!ours && in.kind != memory::PointerKind::VmmShareable) {
    return std::string("this is ") + memory::pointer_kind_name(in.kind) + ", not VMM memory with handles (gpuloan_region_create makes some)";
  }
  if (auto why = refuse_sharing(in); !why.empty()) return why;
  if (!has(in.exporter, GPULOAN_FLOOR_VMM)) return "this device has no VMM memory with POSIX FD handles";
  if (!has(in.importer, GPULOAN_FLOOR_VMM)) return "the importer's driver has no VMM memory with POSIX FD handles";
  if (in.origin == Origin::Nothing) return ""; // no byte is mapped, so there is nothing to prove
  if (!ours) {
    if (!has(in.exporter, GPULOAN_FLOOR_FOREIGN_VMM)) return "this driver cannot export VMM memory that others made";
    if (auto why = refuse_keeping(in); !why.empty()) return why;
  }
  return refuse_proof(ours ? in.vmm : in.foreign_vmm);
}

std::string refuse_room(const AdmissionInput& in) {
  if (in.bytes <= in.free_bytes) return "";
  return "a copy needs " + std::to_string(in.bytes) + " bytes of the device beside the original, " + std::to_string(in.free_bytes) + " are free";
}

// Why no copy on the device into a chunk of this peer's.
std::string refuse_stage(const AdmissionInput& in) {
  if ((in.rungs & GPULOAN_RUNG_VMM) == 0) return "not among the allowed rungs";
  if (in.policy == GPULOAN_POLICY_REQUIRE_ZERO_COPY) return "the policy requires zero-copy";
  if (in.origin != Origin::Foreign && in.origin != Origin::OtherArena) return "the memory is the peer's own";
  if (auto why = refuse_sharing(in); !why.empty()) return why;
  if (!has(in.exporter, GPULOAN_FLOOR_VMM) || !has(in.importer, GPULOAN_FLOOR_VMM)) return "a side has no VMM memory with POSIX FD handles";
  if (auto why = refuse_proof({in.vmm.canary, in.vmm.unanswered, ""}); !why.empty()) return why; // vmm's own reason says how
  return refuse_room(in);
}

std::string refuse_pool(const AdmissionInput& in) {
  if ((in.rungs & GPULOAN_RUNG_POOL) == 0) return "not among the allowed rungs (it is experimental and off by default)";
  const bool shareable = in.origin == Origin::Foreign && in.kind == memory::PointerKind::PoolShareable;
  if (!shareable && in.origin != Origin::Nothing) return "only memory of a pool made with POSIX FD handles can go this way";
  if (auto why = refuse_sharing(in); !why.empty()) return why;
  if (!in.same_device) return "the importer works on another device, and a pool is imported on its own device alone";
  if (!has(in.exporter, GPULOAN_FLOOR_POOLS)) return "this device has no pools with POSIX FD handles";
  if (!has(in.importer, GPULOAN_FLOOR_POOLS)) return "the importer's device has no pools with POSIX FD handles";
  if (in.origin == Origin::Nothing) return "";
  if (in.import_limit == 0) return std::string("no memory of a pool can be imported by another process (") + in.import_limit_source + ")";
  if (!memory::importable(in.allocation_base, in.allocation_bytes, in.import_limit)) {
    return "the allocation has " + std::to_string(in.allocation_bytes) + " bytes and touches " +
           std::to_string(memory::import_pieces(in.allocation_base, in.allocation_bytes)) + " pieces of 32 MiB, and importing more than " + std::to_string(in.import_limit) +
           " at once kills the importer (" + in.import_limit_source + ")";
  }
  if (auto why = refuse_keeping(in); !why.empty()) return why;
  return refuse_proof(in.pool);
}

std::string refuse_ipc(const AdmissionInput& in) {
  if ((in.rungs & GPULOAN_RUNG_IPC) == 0) return "not among the allowed rungs";
  const bool alloc = in.origin == Origin::Foreign && in.kind == memory::PointerKind::Alloc;
  if (!alloc && in.origin != Origin::Nothing) return "only cuMemAlloc memory has a legacy handle";
  if (auto why = refuse_sharing(in); !why.empty()) return why;
  if (!has(in.exporter, GPULOAN_FLOOR_IPC_MEMORY)) return "this driver has no legacy memory handles";
  if (!has(in.importer, GPULOAN_FLOOR_IPC_MEMORY)) return "the importer's driver has no legacy memory handles";
  if (in.origin == Origin::Nothing) return "";
  if (in.same_process) return "exporter and importer are one process, which cannot open its own legacy handles";
  if (auto why = refuse_keeping(in); !why.empty()) return why;
  return refuse_proof(in.ipc);
}

std::string refuse_host(const AdmissionInput& in, Carrier carrier) {
  const bool direct = carrier == Carrier::Direct;
  if ((in.rungs & GPULOAN_RUNG_HOST) == 0) return "not among the allowed rungs";
  if (!direct && in.policy == GPULOAN_POLICY_REQUIRE_ZERO_COPY) return "it copies, and the policy requires zero-copy";
  if (carrier == Carrier::Ring && in.exclusive) return kExclusive;
  if (carrier == Carrier::Ring && in.same_device) return refuse_room(in); // the importer works on a buffer of its own
  return "";
}

} // namespace

Result<Admission> admit(const AdmissionInput& in) {
  if (in.host == GPULOAN_CANARY_DEMOTED) {
    return fail(GPULOAN_ERR_NO_RUNG, "the peer is refused: its canary of the host rung failed, and there is nothing below that (its peer information says how)");
  }
  const std::string vmm = refuse_vmm(in);
  if (vmm.empty()) return Admission{GPULOAN_RUNG_VMM, Carrier::Direct, GPULOAN_MEMORY_DEVICE, ""};
  std::string reason = "vmm: " + vmm;
  const std::string pool = refuse_pool(in);
  if (pool.empty()) return Admission{GPULOAN_RUNG_POOL, Carrier::Direct, GPULOAN_MEMORY_DEVICE, reason};
  reason += "; pool: " + pool;
  const std::string ipc = refuse_ipc(in);
  if (ipc.empty()) return Admission{GPULOAN_RUNG_IPC, Carrier::Direct, GPULOAN_MEMORY_DEVICE, reason};
  reason += "; ipc: " + ipc;
  const std::string stage = refuse_stage(in);
  if (stage.empty()) return Admission{GPULOAN_RUNG_VMM, Carrier::Stage, GPULOAN_MEMORY_DEVICE, reason};

  Admission host{GPULOAN_RUNG_HOST, Carrier::Ring, GPULOAN_MEMORY_DEVICE, reason + "; device copy: " + stage};
  const bool sees_host = in.wanted == GPULOAN_MEMORY_HOST || !in.importer.has_device || in.origin == Origin::ArenaHost;
  if (sees_host) {
    host.memory = GPULOAN_MEMORY_HOST;
    host.carrier = Carrier::Segment;
  }
  if (in.origin == Origin::ArenaHost || in.origin == Origin::Nothing) host.carrier = Carrier::Direct;
  const std::string refused = refuse_host(in, host.carrier);
  if (refused.empty()) return host;
  return fail(GPULOAN_ERR_NO_RUNG, "no allowed rung can carry this loan: " + host.reason + "; host: " + refused);
}

Result<GateChoice> choose_gate(gpuloan_gate wanted, const SideFloors& exporter, const SideFloors& importer, bool same_device, bool event_free) {
  // A side without a device says ready or done by the CPU, which every gate lets pass.
  const auto lacks = [](const SideFloors& side, std::uint32_t floors) { return side.has_device && (side.floors & floors) != floors; };
  constexpr std::uint32_t kMemop = GPULOAN_FLOOR_MEMOPS | GPULOAN_FLOOR_HOST_REGISTER;

  std::string memop;
  if (lacks(exporter, kMemop)) memop = "this device lacks 64-bit stream memory operations or host registration";
  else if (lacks(importer, kMemop)) memop = "the importer's device lacks 64-bit stream memory operations or host registration";

  std::string event;
  if (!exporter.has_device || !importer.has_device) event = "a side has no device";
  else if (!same_device) event = "the sides work on different devices";
  else if (lacks(exporter, GPULOAN_FLOOR_IPC_EVENTS)) event = "this device has no interprocess events";
  else if (lacks(importer, GPULOAN_FLOOR_IPC_EVENTS)) event = "the importer's device has no interprocess events";
  else if (!event_free) event = "all interprocess events of this peer are in use";

  switch (wanted) {
    case GPULOAN_GATE_MEMOP:
      if (memop.empty()) return GateChoice{GPULOAN_GATE_MEMOP, ""};
      return fail(GPULOAN_ERR_UNSUPPORTED, "the memop gate cannot be had: " + memop);
    case GPULOAN_GATE_EVENT:
      if (event.empty()) return GateChoice{GPULOAN_GATE_EVENT, ""};
      return fail(GPULOAN_ERR_UNSUPPORTED, "the event gate cannot be had: " + event);
    case GPULOAN_GATE_HOST:
      return GateChoice{GPULOAN_GATE_HOST, ""};
    default:
      break;
  }
  if (memop.empty()) return GateChoice{GPULOAN_GATE_MEMOP, ""};
  if (event.empty()) return GateChoice{GPULOAN_GATE_EVENT, "memop: " + memop};
  return GateChoice{GPULOAN_GATE_HOST, "memop: " + memop + "; event: " + event};
}

} // namespace gpuloan::loan
