// SPDX-License-Identifier: MIT
#include "bare_pool.hpp"

#include <cstring>
#include <fcntl.h>

namespace gpuloan::tool::bench {

static_assert(sizeof(cuda::PoolPointer) <= sizeof Message::text);

BarePoolCalls::BarePoolCalls(const Cuda& cuda) {
#define GPULOAN_BENCH_FIND(symbol, member, parameters) cuda.find(#symbol, member);
  GPULOAN_BENCH_POOL_CALLS(GPULOAN_BENCH_FIND)
#undef GPULOAN_BENCH_FIND
}

BarePool::BarePool(Cuda& cuda, int device, std::uint64_t bytes) : cuda_(cuda), calls_(cuda), bytes_(bytes) {
  cuda::PoolProps props = {};
  props.type = cuda::AllocationPinned;
  props.handle_types = cuda::HandlePosixFd;
  props.location = {cuda::LocationDevice, device};
  try {
    cuda_.check("cuMemPoolCreate", calls_.create(&pool_, &props));
    cuda_.check("cuMemAllocFromPoolAsync", calls_.allocate(&pointer_, bytes, pool_, cuda_.stream()));
    cuda_.synchronize();
  } catch (...) {
    end();
    throw;
  }
}

void BarePool::end() noexcept {
  if (pointer_ != 0) static_cast<void>(calls_.free(pointer_));
  if (pool_ != nullptr) static_cast<void>(calls_.destroy(pool_));
}

void BarePool::share(Channel& channel) const {
  int raw = -1;
  cuda_.check("cuMemPoolExportToShareableHandle", calls_.export_pool(&raw, pool_, cuda::HandlePosixFd, 0));
  const Fd fd(raw);
  if (::fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) throw Failure(ExitSystem, "fcntl(F_SETFD) of the pool's descriptor failed");
  cuda::PoolPointer shared = {};
  cuda_.check("cuMemPoolExportPointer", calls_.export_pointer(&shared, pointer_));
  Message message{.op = Op::Pool, .bytes = bytes_};
  std::memcpy(message.text, shared.reserved, sizeof shared.reserved);
  channel.send(message, fd.get());
  static_cast<void>(channel.expect(Op::Pool));
}

BarePoolImport::BarePoolImport(const Cuda& cuda, int device, const Message& message, const Fd& fd) : cuda_(cuda), calls_(cuda) {
  std::memcpy(shared_.reserved, message.text, sizeof shared_.reserved);
  cuda_.check("cuMemPoolImportFromShareableHandle",
              calls_.import_pool(&pool_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get())), cuda::HandlePosixFd, 0));
  const cuda::AccessDesc access = {{cuda::LocationDevice, device}, cuda::AccessReadWrite};
  if (const cuda::CuResult code = calls_.set_access(pool_, &access, 1); code != cuda::Success) {
    static_cast<void>(calls_.destroy(pool_));
    cuda_.check("cuMemPoolSetAccess", code);
  }
}

BarePoolImport::~BarePoolImport() { static_cast<void>(calls_.destroy(pool_)); }

cuda::DevicePtr BarePoolImport::open() {
  cuda::DevicePtr pointer = 0;
  cuda_.check("cuMemPoolImportPointer", calls_.import_pointer(&pointer, pool_, &shared_));
  return pointer;
}

void BarePoolImport::close(cuda::DevicePtr pointer) { cuda_.check("cuMemFree", calls_.free(pointer)); }

} // namespace gpuloan::tool::bench
