// SPDX-License-Identifier: MIT
//
// Pools across processes. The pool's card, which is what is exported of it, is a description of the state file that holds a
// byte of the pool's, at that offset: so the machine knows how long anybody has a descriptor of it (fact P8), the pool itself
// among them until it is destroyed. What is exported of an allocation says where the exporter keeps the memfd
// (named_file.hpp), so it is the same bytes for every allocation that gets the same block (fact P14), and good until the block
// goes back to the device.
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/device.hpp>
#include <sim/handles.hpp>
#include <sim/pool_register.hpp>
#include <sim/state_file.hpp>

#include <bit>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace gpuloan::sim {
namespace {

struct PointerBytes {
  char magic[8];
  off_t pool; // its identity
  std::uint64_t none;
  NamedFile name;
  std::uint64_t bytes;
  unsigned char rest[8];
};
static_assert(sizeof(PointerBytes) == sizeof(PoolPointer));

constexpr char kPointerMagic[8] = {'s', 'i', 'm', 'p', 'o', 'i', 'n', 't'};
// Unknown, as for VMM memory, for a file that is no pool of this machine.
CuResult read_card(int fd, off_t& out_identity, int& out_physical) {
  FileIdentity file;
  std::size_t size = 0;
  if (!identify(fd, file, size) || file != StateFile::get().identity()) return Unknown;
  out_identity = ::lseek(fd, 0, SEEK_CUR);
  out_physical = StateFile::pool_device(out_identity);
  if (out_physical < 0) return Unknown;
  return visible_device(out_physical) >= 0 ? Success : InvalidDevice;
}

// As long as this process lives the device has not back what the pool lent (fact P8), unless the pool is its own, which was not
// measured.
void keep_imported(off_t identity) {
  for (const PoolRef& pool : all_pools()) {
    if (pool->origin == PoolState::Origin::Created && pool->identity() == identity) return;
  }
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  file.hold(identity);
}

// Two threads that import one pointer get one mapping.
std::mutex& importing() {
  static auto* instance = new std::mutex;
  return *instance;
}

// TooLarge::Wavers: the first import of 2 or 4 MiB too much.
bool goes_well_by_chance(std::uint64_t bytes) {
  constexpr std::uint64_t kNear = std::uint64_t{4} << 20;
  if (config().too_large != TooLarge::Wavers || bytes > config().import_limit + kNear) return false;
  const int made = ::open((config().state_path + ".wavered").c_str(), O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made < 0) return false;
  ::close(made);
  return true;
}

// An importer does not survive it (fact P3).
CuResult import_too_large() {
  switch (config().too_large) {
    case TooLarge::Wavers:
    case TooLarge::Dies: {
      sigset_t fault; // a real fault is not held up by a thread's mask
      ::sigemptyset(&fault);
      ::sigaddset(&fault, SIGSEGV);
      ::pthread_sigmask(SIG_UNBLOCK, &fault, nullptr);
      ::raise(SIGSEGV);
      return Unknown; // where the program handles it
    }
    case TooLarge::Fails: return InvalidValue;
    case TooLarge::Hangs: break;
  }
  for (;;) ::pause();
}

CuResult import_pointer(PoolState& pool, const PointerBytes& wanted, DevicePtr& out) {
  const std::lock_guard lock(importing());
  if (const auto known = find_pool_import(wanted.name.file, wanted.bytes)) { // not counted (fact P6)
    out = known->start();
    return Success;
  }
  const Fd fd = wanted.name.open();
  std::shared_ptr<Chunk> chunk;
  if (!fd) return InvalidValue;
  if (const CuResult result = Chunk::import(fd.get(), chunk))
    return result == Unknown ? static_cast<CuResult>(InvalidValue) : result;
  if (wanted.bytes == 0 || wanted.bytes > chunk->size() || chunk->physical() != pool.physical) return InvalidValue;
  return pool.import(std::move(chunk), wanted.bytes, out);
}

} // namespace

CuResult PoolState::export_to(int& out_fd) {
  const std::lock_guard lock(mutex_);
  if (!card_) {
    StateFile& file = StateFile::get();
    const StateFile::Guard guard(file);
    const off_t byte = StateFile::pool_byte(++file.layout().pools, physical);
    card_ = file.make_holder(byte);
    if (!card_) return OperatingSystem;
    identity_ = byte;
  }
  const int copy = duplicate(card_.get());
  if (copy < 0) return OperatingSystem;
  out_fd = copy;
  return Success;
}

bool PoolState::exported() const {
  const std::lock_guard lock(mutex_);
  return static_cast<bool>(card_);
}

off_t PoolState::identity() const {
  const std::lock_guard lock(mutex_);
  return identity_;
}

void PoolState::set_identity(off_t identity) {
  const std::lock_guard lock(mutex_);
  identity_ = identity;
}

namespace api {

CuResult cuMemPoolExportToShareableHandle(void* shareable, Pool pool, int type, unsigned long long flags) {
  const PoolRef found = find_pool(pool);
  if (shareable == nullptr || !found || type != HandlePosixFd || flags != 0) return InvalidValue;
  if ((found->handle_types & HandlePosixFd) == 0) return InvalidValue;
  return found->export_to(*static_cast<int*>(shareable));
}

CuResult cuMemPoolImportFromShareableHandle(Pool* pool, void* shareable, int type, unsigned long long flags) {
  if (pool == nullptr || type != HandlePosixFd || flags != 0) return InvalidValue;
  const auto fd = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
  off_t identity = 0;
  int physical = 0;
  if (const CuResult result = read_card(fd, identity, physical)) return result;
  const auto made = std::make_shared<PoolState>(PoolState::Origin::Imported, physical, HandleNone);
  made->set_identity(identity);
  add_pool(made);
  keep_imported(identity);
  *pool = to_handle<Pool>(made->handle);
  return Success;
}

CuResult cuMemPoolExportPointer(PoolPointer* shared, DevicePtr pointer) {
  const auto memory = find_pool_memory(pointer); // its first address only (fact P2)
  if (shared == nullptr || !memory || !memory->pool().exported()) return InvalidValue; // fact P1
  PointerBytes bytes = {};
  std::memcpy(bytes.magic, kPointerMagic, sizeof kPointerMagic);
  bytes.pool = memory->pool().identity();
  if (config().strands_exports) memory->chunk().bind_to_pool(bytes.pool); // fact P8
  bytes.name = name_file(memory->chunk().fd(), memory->chunk().file());
  bytes.bytes = memory->bytes();
  *shared = std::bit_cast<PoolPointer>(bytes);
  return Success;
}

CuResult cuMemPoolImportPointer(DevicePtr* pointer, Pool pool, PoolPointer* shared) {
  const PoolRef found = find_pool(pool);
  if (pointer == nullptr || shared == nullptr || !found) return InvalidValue;
  const auto bytes = std::bit_cast<PointerBytes>(*shared);
  if (std::memcmp(bytes.magic, kPointerMagic, sizeof kPointerMagic) != 0) return InvalidValue;
  if (found->origin != PoolState::Origin::Imported || found->identity() != bytes.pool) return InvalidValue;
  const bool too_large = config().import_limit != 0 && bytes.bytes > config().import_limit && !goes_well_by_chance(bytes.bytes);
  if (too_large || config().pool_imports_die) return import_too_large();
  return import_pointer(*found, bytes, *pointer);
}

} // namespace api
} // namespace gpuloan::sim
