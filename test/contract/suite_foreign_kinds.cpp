// SPDX-License-Identifier: MIT
//
// The table of pointer kinds: for each rung allowed alone and for all of them, with and without the wish for zero-copy, one
// fixed rung or one fixed refusal; and whatever is accepted carries a loan of each direction.
#include "suite_foreign.hpp"

namespace loan_test {
namespace {

constexpr std::uint64_t kSizes[] = {1, 15, 16, 17, kChunk - 1, kChunk, kChunk + 1};

struct Row {
  Made made;
  // For the rungs vmm, pool, ipc, host, all by default, all: under the policy `best`, then `require zero-copy`. v, p, i, h:
  // the rung that carries it; s: vmm with a copy on the device; n: NO_RUNG; x: INVALID.
  const char* cells;
  const char* called; // in the sentences about it
};
// H1 to H5, H7, M1
constexpr Row kTable[] = {
    {Made::Alloc, "sn nn ii hn ii ii", "cuMemAlloc memory"},
    {Made::PoolShareable, "sn pp nn hn sn pp", "memory of a shareable pool"},
    {Made::PoolPrivate, "sn nn nn hn sn sn", "memory of a pool that cannot be shared"},
    {Made::VmmOne, "vv nn nn hn vv vv", "legacy handle"},
    {Made::VmmMany, "vv nn nn hn vv vv", "legacy handle"},
    {Made::Torch, "vv nn nn hn vv vv", "legacy handle"},
    {Made::VmmPrivate, "sn nn nn hn sn sn", "VMM memory made without handles"},
    {Made::Managed, "sn nn nn hn sn sn", "managed memory"},
    {Made::HostAlloc, "sn nn nn hn sn sn", "host memory"},
    {Made::HostRegistered, "sn nn nn hn sn sn", "host memory"},
    {Made::Opened, "xx xx xx xx xx xx", "only the process that allocated it may lend it"},
    {Made::Unknown, "xx xx xx xx xx xx", "memory that the driver does not know"},
};

constexpr std::uint32_t kDefault = GPULOAN_RUNG_VMM | GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST;
constexpr std::uint32_t kAll = kDefault | GPULOAN_RUNG_POOL;
constexpr std::uint32_t kRungSets[] = {GPULOAN_RUNG_VMM, GPULOAN_RUNG_POOL, GPULOAN_RUNG_IPC, GPULOAN_RUNG_HOST, kDefault, kAll};

const Row& row_of(Made made) {
  for (const Row& row : kTable) {
    if (row.made == made) return row;
  }
  fail("the kind is not in the table");
}

// Of a range that starts inside a chunk and touches 72 of them: more than there is credit for (64).
Shape shape_of(Made made) {
  if (made == Made::VmmMany) return {.bytes = 71 * kChunk + 4321, .before = 777'777, .after = 100'000};
  return {.bytes = 3 * kMiB + 13, .before = 65'536 + 8, .after = 5000};
}

// How a loan has to travel, by the letter of the table.
struct Way {
  gpuloan_rung rung;
  bool copied;
};
Way way_of(char cell) {
  if (cell == 'i') return {GPULOAN_RUNG_IPC, false};
  if (cell == 'p') return {GPULOAN_RUNG_POOL, false};
  if (cell == 'h') return {GPULOAN_RUNG_HOST, true};
  return {GPULOAN_RUNG_VMM, cell == 's'};
}

struct Scene {
  explicit Scene(const Bench& to)
      : bench(to), exporter(to, [](auto& options) { options.rungs = kAll; }), worker(to), peer(exporter.attach(worker)) {}
  const Bench& bench;
  Exporter exporter;
  Worker worker;
  gpuloan_peer* peer;
};

void expect_report(const Scene& scene, const Foreign& memory, const Lent& lent, const Way& way, Where where = Where::current()) {
  const gpuloan_loan_report report = lent.report(where);
  expect_equal(report.rung, way.rung, "report.rung", where);
  expect_equal(report.gate, scene.bench.cell.gate, "report.gate", where);
  expect_equal(report.bytes, memory.bytes(), "report.bytes", where);
  expect_equal(report.copied_bytes, way.copied ? memory.bytes() : 0, "report.copied_bytes", where);
  if (way.copied) expect(report.exposed_bytes < kChunk, "more is exposed than the rest of a copy's chunk", where);
  else expect_equal(report.exposed_bytes, memory.exposed_bytes(), "report.exposed_bytes", where);
  expect_equal(report.memory_state, GPULOAN_MEMORY_RELEASED, "report.memory_state", where);
  if (way.rung != GPULOAN_RUNG_HOST && report.bytes > 0) expect_equal(report.canary, GPULOAN_CANARY_VERIFIED, "report.canary", where);
  expect_steps(report, where);
}

// A read loan and a write loan of the same bytes, and what lies beside them stays as it was.
void carry(Scene& scene, const Foreign& memory, LendArgs args, char cell) {
  memory.fill(11, 12, 13);
  args.access = GPULOAN_ACCESS_READ;
  const Lent read = lend(scene.bench, scene.peer, memory.pointer(), memory.bytes(), args);
  Borrowed reader = scene.worker.offered(read);
  expect_equal(reader.acquire().bytes, memory.bytes(), "view.bytes");
  reader.check(12);
  reader.done();
  read.ended();
  expect_report(scene, memory, read, way_of(cell));
  args.access = GPULOAN_ACCESS_WRITE;
  const Lent write = lend(scene.bench, scene.peer, memory.pointer(), memory.bytes(), args);
  Borrowed writer = scene.worker.offered(write);
  expect_equal(writer.acquire().bytes, memory.bytes(), "view.bytes");
  writer.fill(14);
  writer.done();
  write.ended();
  expect_report(scene, memory, write, way_of(cell));
  memory.check(11, 14, 13);
}

void refuse(Scene& scene, const Foreign& memory, LendArgs args, char cell, const char* called) {
  Released released;
  gpuloan_loan* none = nullptr;
  for (const gpuloan_access access : {GPULOAN_ACCESS_READ, GPULOAN_ACCESS_WRITE}) {
    args.access = access;
    const gpuloan_status status = try_lend(scene.bench, scene.peer, memory.pointer(), memory.bytes(), with_release(args, released), &none);
    expect_status(status, cell == 'x' ? GPULOAN_ERR_INVALID : GPULOAN_ERR_NO_RUNG, "gpuloan_lend");
    expect(none == nullptr, "an output was written by a call that failed");
    const std::string text = gpuloan_error_text();
    if (cell == 'x') expect_contains(text, called, "the text of INVALID");
    for (const char* part : {"vmm: ", "pool: ", "ipc: ", "host: "}) {
      if (cell == 'n') expect_contains(text, part, "the text of NO_RUNG");
    }
  }
  released.expect_none("a release function of a loan that was refused");
}

void table_cell(Scene& scene, const Foreign& memory, const Row& row, char cell, const LendArgs& args) {
  if (cell == 'x' || cell == 'n') return refuse(scene, memory, args, cell, row.called);
  carry(scene, memory, args, cell);
  if (args.rungs != kDefault || cell == 'v') return;
  // Why it was not the best rung.
  const Lent lent = lend(scene.bench, scene.peer, memory.pointer(), memory.bytes(), args);
  expect_contains(lent.report().rung_reason, row.called, "rung_reason");
  expect_contains(lent.report().rung_reason, "vmm: ", "rung_reason");
  if (cell == 's') expect_contains(lent.report().rung_reason, "ipc: ", "rung_reason");
  scene.worker.offered(lent).give_back();
  lent.ended(GPULOAN_ERR_RETURNED);
}

// The device has what the table takes for granted.
void need_floors(const Bench& bench, const Row& row) {
  auto device = init<gpuloan_device_info>();
  expect_ok(gpuloan_device_probe(bench.cell.driver.c_str(), 0, &device), "gpuloan_device_probe");
  std::uint32_t floors = GPULOAN_FLOOR_HOST_REGISTER;
  if (row.made == Made::PoolShareable) floors |= GPULOAN_FLOOR_POOLS;
  if (row.made == Made::Alloc) floors |= GPULOAN_FLOOR_IPC_MEMORY;
  if (row.cells[0] == 'v') floors |= GPULOAN_FLOOR_VMM | GPULOAN_FLOOR_FOREIGN_VMM;
  if ((device.missing & floors) != 0) throw Skip{device.floor_reason};
}

void run_table(const Bench& bench, Made made) {
  const Row& row = row_of(made);
  need_floors(bench, row);
  Foreign memory(bench, made, shape_of(made)); // it outlives its loans, also where a check fails
  Scene scene(bench);
  const char* cell = row.cells;
  for (const std::uint32_t rungs : kRungSets) {
    for (const gpuloan_policy policy : {GPULOAN_POLICY_BEST, GPULOAN_POLICY_REQUIRE_ZERO_COPY}) {
      try {
        table_cell(scene, memory, row, *cell++, {.policy = policy, .rungs = rungs});
      } catch (const Failure& failure) {
        throw Failure{failure.text + " [rungs " + std::to_string(rungs) + ", policy " + std::to_string(policy) + "]"};
      }
    }
    ++cell; // the space
  }
  expect_equal(scene.exporter.stats().loans_out, 0U, "loans out");
  scene.worker.close();
  scene.exporter.destroy();
  memory.free();
}

} // namespace

template <Made made>
void kind_table(const Bench& bench) {
  run_table(bench, made);
}
template void kind_table<Made::Alloc>(const Bench& bench);
template void kind_table<Made::PoolShareable>(const Bench& bench);
template void kind_table<Made::PoolPrivate>(const Bench& bench);
template void kind_table<Made::VmmOne>(const Bench& bench);
template void kind_table<Made::VmmMany>(const Bench& bench);
template void kind_table<Made::Torch>(const Bench& bench);
template void kind_table<Made::VmmPrivate>(const Bench& bench);
template void kind_table<Made::Managed>(const Bench& bench);
template void kind_table<Made::HostAlloc>(const Bench& bench);
template void kind_table<Made::HostRegistered>(const Bench& bench);
template void kind_table<Made::Opened>(const Bench& bench);
template void kind_table<Made::Unknown>(const Bench& bench);

// ---- Sizes and ranges ---------------------------------------------------------------------------------------------

// H5, D9, D13. Each size once across the seam of two chunks and once up to the end of one.
void sizes_and_seams(const Bench& bench) {
  Scene scene(bench);
  for (const Made made : {Made::Alloc, Made::VmmMany}) {
    const char cell = made == Made::Alloc ? 'i' : 'v';
    for (const std::uint64_t bytes : kSizes) {
      for (const std::uint64_t before : {kChunk - bytes / 2, 2 * kChunk - bytes}) {
        Foreign memory(bench, made, {.bytes = bytes, .before = before, .after = kChunk + 7});
        carry(scene, memory, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY, .rungs = kDefault}, cell);
        memory.free();
      }
    }
    Foreign memory(bench, made, {.bytes = 0, .before = kChunk});
    carry(scene, memory, {.rungs = static_cast<std::uint32_t>(way_of(cell).rung)}, cell);
  }
  scene.worker.close();
}

namespace {

void expect_invalid(const Scene& scene, std::uint64_t pointer, std::uint64_t bytes, std::string_view text, Where where = Where::current()) {
  gpuloan_loan* none = nullptr;
  expect_status(try_lend(scene.bench, scene.peer, pointer, bytes, {}, &none), GPULOAN_ERR_INVALID, "gpuloan_lend", where);
  expect_contains(gpuloan_error_text(), text, "the text of INVALID", where);
}

} // namespace

// I3, and the edges of what one loan may span.
void ranges_refused(const Bench& bench) {
  Scene scene(bench);
  for (const Made made : {Made::Alloc, Made::PoolPrivate, Made::Managed, Made::HostAlloc}) {
    Foreign memory(bench, made, {.bytes = kChunk});
    const char* text = "is no range of one device allocation";
    expect_invalid(scene, memory.pointer(), memory.bytes() + 1, text);
    expect_invalid(scene, memory.pointer() + 1, memory.bytes(), text);
    expect_invalid(scene, memory.pointer(), UINT64_MAX - memory.pointer(), text);
    expect_invalid(scene, memory.pointer(), UINT64_MAX, "wraps around");
    memory.free();
  }
  Foreign memory(bench, Made::VmmMany, {.bytes = 4 * kChunk});
  {
    const Gap gap(bench, memory.pointer() + 2 * kChunk);
    expect_invalid(scene, memory.pointer(), 4 * kChunk, "has a gap in its mapping");
    expect_invalid(scene, memory.pointer() + kChunk, kChunk + 1, "has a gap in its mapping");
    const Lent lent = lend(bench, scene.peer, memory.pointer() + 3 * kChunk + 1, kChunk - 1, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY});
    expect_equal(lent.report().rung, GPULOAN_RUNG_VMM, "report.rung behind the gap");
    scene.worker.offered(lent).give_back();
    lent.ended(GPULOAN_ERR_RETURNED);
  }
  memory.free();
  scene.worker.close();
}

// ---- MPS ----------------------------------------------------------------------------------------------------------

const char* under_mps_skip(const Bench& bench) { return under_mps(bench) ? "under MPS such memory is copied" : nullptr; }
const char* no_mps_skip(const Bench& bench) { return under_mps(bench) ? nullptr : "this is not under MPS"; }

// There nothing proves that a dead client's work has ended, so nothing is lent that could not be retired.
void under_mps_copied(const Bench& bench) {
  Scene scene(bench);
  for (const Made made : {Made::Alloc, Made::VmmOne, Made::VmmMany}) {
    Foreign memory(bench, made, {.bytes = kMiB + 1, .before = 100});
    carry(scene, memory, {}, 's');
    carry(scene, memory, {.rungs = GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST}, 'h');
    refuse(scene, memory, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}, 'n', "");
    expect_contains(gpuloan_error_text(), "MPS", "the text of NO_RUNG");
    const std::uint32_t best = made == Made::Alloc ? GPULOAN_RUNG_IPC : GPULOAN_RUNG_VMM;
    for (const std::uint32_t rungs : {kDefault, best | GPULOAN_RUNG_HOST}) {
      const Lent lent = lend(bench, scene.peer, memory.pointer(), memory.bytes(), {.rungs = rungs});
      expect_contains(lent.report().rung_reason, "MPS", "rung_reason");
      scene.worker.offered(lent).give_back();
      lent.ended(GPULOAN_ERR_RETURNED);
    }
    memory.free();
  }
  const Region region(scene.peer, kMiB);
  const Lent lent = lend(bench, scene.peer, region, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}); // the arena can be retired
  expect_equal(lent.report().rung, GPULOAN_RUNG_VMM, "report.rung of a region");
  scene.worker.offered(lent).give_back();
  lent.ended(GPULOAN_ERR_RETURNED);
  scene.worker.close();
}

} // namespace loan_test
