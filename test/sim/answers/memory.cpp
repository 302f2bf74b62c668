// SPDX-License-Identifier: MIT
//
// Questions about device memory.
#include "answers.hpp"

#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace answers {
namespace {

CuResult import(int fd, MemHandle* handle) {
  return cuda.cuMemImportFromShareableHandle(handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                             HandlePosixFd);
}

void say_pointer(const char* prefix, DevicePtr pointer) {
  Context context = reinterpret_cast<Context>(&prefix);
  Context current = nullptr;
  unsigned type = 99;
  unsigned long long id = 99;
  unsigned managed = 0x63636363; // how much of it is written?
  int ordinal = 99;
  DevicePtr begin = 99;
  std::size_t size = 99;
  const int attributes[] = {PointerContext,       PointerMemoryType, PointerBufferId, PointerIsManaged,
                            PointerDeviceOrdinal, PointerRangeStart, PointerRangeSize};
  void* data[] = {&context, &type, &id, &managed, &ordinal, &begin, &size};
  cuda.cuCtxGetCurrent(&current);
  char question[64];
  const auto put = [&](const char* what, long long answer) {
    std::strcpy(question, prefix);
    say(std::strcat(question, what), answer);
  };
  put("", cuda.cuPointerGetAttributes(7, attributes, data, pointer));
  put(".context", context == nullptr ? 0 : context == current ? 1 : 2);
  put(".type", type);
  put(".id-is-0", id == 0);
  put(".managed", managed);
  put(".ordinal", ordinal);
  put(".start-written", begin != 99);
  put(".offset", begin == 99 ? 0 : static_cast<long long>(pointer - begin));
  put(".size", static_cast<long long>(size));
}

} // namespace

void ask_vmm() {
  start();
  AllocationProp wish = prop();
  MemHandle handle = 0;
  say("create.odd-size", cuda.cuMemCreate(&handle, 2 * kMiB + 4096, &wish, 0));
  say("create.size-0", cuda.cuMemCreate(&handle, 0, &wish, 0));
  say("create.too-large", cuda.cuMemCreate(&handle, std::size_t{1} << 44, &wish, 0));
  say("create.flags", cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 1));
  wish.location.id = 99;
  say("create.device-99", cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 0));
  wish = prop();
  wish.type = 0;
  say("create.type-0", cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 0));
  wish = prop();
  wish.requested_handle_types = 2;
  say("create.win32", cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 0));
  DevicePtr address = 0;
  say("reserve.odd-size", cuda.cuMemAddressReserve(&address, kMiB, 0, 0, 0));
  say("reserve.size-0", cuda.cuMemAddressReserve(&address, 0, 0, 0, 0));
  say("reserve.alignment-3", cuda.cuMemAddressReserve(&address, 2 * kMiB, 3, 0, 0));
  say("reserve.alignment-64M", cuda.cuMemAddressReserve(&address, 2 * kMiB, 64 * kMiB, 0, 0));
  say("reserve.aligned", address % (64 * kMiB) == 0);
  say("free-address.wrong-size", cuda.cuMemAddressFree(address, 4 * kMiB));
  say("free-address.part", cuda.cuMemAddressFree(address + 4096, 4096));
  say("free-address", cuda.cuMemAddressFree(address, 2 * kMiB));
  say("free-address.twice", cuda.cuMemAddressFree(address, 2 * kMiB));

  handle = create(4 * kMiB);
  need(cuda.cuMemAddressReserve(&address, 8 * kMiB, 0, 0, 0), "cuMemAddressReserve");
  say("map.part", cuda.cuMemMap(address, 2 * kMiB, 0, handle, 0));
  say("map.part-at-offset", cuda.cuMemMap(address, 2 * kMiB, 2 * kMiB, handle, 0));
  say("map.too-much", cuda.cuMemMap(address, 6 * kMiB, 0, handle, 0));
  say("map.behind-reservation", cuda.cuMemMap(address + 8 * kMiB, 4 * kMiB, 0, handle, 0));
  say("map.bad-handle", cuda.cuMemMap(address, 4 * kMiB, 0, 0, 0));
  say("map", cuda.cuMemMap(address, 4 * kMiB, 0, handle, 0));
  say("map.over", cuda.cuMemMap(address, 4 * kMiB, 0, handle, 0));
  say("access.part", give(address, 2 * kMiB, AccessReadWrite));
  say("access.too-much", give(address, 8 * kMiB, AccessReadWrite));
  say("access.unmapped", give(address + 4 * kMiB, 4 * kMiB, AccessReadWrite));
  say("access.flags-2", give(address, 4 * kMiB, 2));
  say("access", give(address, 4 * kMiB, AccessReadWrite));
  say("free-address.mapped", cuda.cuMemAddressFree(address, 8 * kMiB));
  say("unmap.part", cuda.cuMemUnmap(address, 2 * kMiB));
  say("unmap.too-much", cuda.cuMemUnmap(address, 8 * kMiB));
  say("unmap.nothing", cuda.cuMemUnmap(address + 4 * kMiB, 4 * kMiB));
  say("unmap.odd-size", cuda.cuMemUnmap(address + 4 * kMiB, kMiB));
  say("unmap.nowhere", cuda.cuMemUnmap(0x1000000000, 4 * kMiB));
  say("unmap", cuda.cuMemUnmap(address, 4 * kMiB));
  say("unmap.twice", cuda.cuMemUnmap(address, 4 * kMiB));
  say("free-address.unmapped", cuda.cuMemAddressFree(address, 8 * kMiB));
  say("release", cuda.cuMemRelease(handle));
  say("release.0", cuda.cuMemRelease(0));
}

void ask_export() {
  start();
  AllocationProp wish = prop();
  wish.requested_handle_types = HandleNone;
  MemHandle closed = 0;
  need(cuda.cuMemCreate(&closed, 2 * kMiB, &wish, 0), "cuMemCreate");
  int fd = -1;
  say("not-exportable", cuda.cuMemExportToShareableHandle(&fd, closed, HandlePosixFd, 0));
  const MemHandle handle = create();
  say("type-2", cuda.cuMemExportToShareableHandle(&fd, handle, 2, 0));
  need(cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0), "export");
  MemHandle imported = 0;
  say("import.same-process", import(fd, &imported));
  MemHandle again = 0;
  say("import.twice", import(fd, &again));
  int second = -1;
  say("export-imported", cuda.cuMemExportToShareableHandle(&second, imported, HandlePosixFd, 0));
  const DevicePtr one = map(handle, AccessReadWrite);
  const DevicePtr two = map(imported, AccessRead);
  unsigned value = 0;
  need(cuda.cuMemsetD32Async(one, 7, 1, nullptr), "fill");
  need(cuda.cuMemcpyDtoHAsync(&value, two, 4, nullptr), "copy");
  need(cuda.cuStreamSynchronize(nullptr), "sync");
  say("alias-sees", value);
  const int foreign = ::memfd_create("foreign", 0);
  say("import.memfd", import(foreign, &again));
  say("import.closed", import(1000, &again));
  say("import.minus-1", import(-1, &again));
  // The descriptor alone keeps the memory.
  const MemHandle lone = create();
  const DevicePtr alone = map(lone, AccessReadWrite);
  need(cuda.cuMemsetD32Async(alone, 9, 1, nullptr), "fill");
  need(cuda.cuStreamSynchronize(nullptr), "sync");
  need(cuda.cuMemExportToShareableHandle(&fd, lone, HandlePosixFd, 0), "export");
  need(cuda.cuMemUnmap(alone, 2 * kMiB), "unmap");
  need(cuda.cuMemRelease(lone), "release");
  say("import.after-release", import(fd, &again));
  const DevicePtr back = map(again, AccessReadWrite);
  need(cuda.cuMemcpyDtoHAsync(&value, back, 4, nullptr), "copy");
  need(cuda.cuStreamSynchronize(nullptr), "sync");
  say("import.after-release.sees", value);
}

void ask_pointers() {
  start();
  DevicePtr plain = 0;
  need(cuda.cuMemAlloc(&plain, 1000), "cuMemAlloc");
  say_pointer("plain", plain + 100);
  say_pointer("vmm", map(create(), AccessReadWrite) + 100);
  say_pointer("vmm-no-access", map(create(), AccessNone) + 100);
  DevicePtr reserved = 0;
  need(cuda.cuMemAddressReserve(&reserved, 2 * kMiB, 0, 0, 0), "cuMemAddressReserve");
  say_pointer("reserved", reserved);
  const std::uint64_t* page = words();
  say_pointer("registered", at(page) + 100);
  int local = 0;
  say_pointer("unknown", at(&local));
  say_pointer("null", 0);
  // A buffer id is asked for alone, too.
  DevicePtr second = 0;
  need(cuda.cuMemAlloc(&second, 1000), "cuMemAlloc");
  unsigned long long id = 99;
  unsigned long long other_id = 99;
  const int attribute = PointerBufferId;
  void* out = &id;
  say("id.alone", cuda.cuPointerGetAttributes(1, &attribute, &out, plain));
  out = &other_id;
  say("id.second", cuda.cuPointerGetAttributes(1, &attribute, &out, second));
  say("id.alone.is-0", id == 0);
  say("id.larger", other_id > id);
  DevicePtr base = 0;
  std::size_t bytes = 0;
  say("range", cuda.cuMemGetAddressRange(&base, &bytes, plain + 999));
  say("range.size", static_cast<long long>(bytes));
  say("range.behind", cuda.cuMemGetAddressRange(&base, &bytes, plain + 1000));
  say("range.host", cuda.cuMemGetAddressRange(&base, &bytes, at(&local)));
  say("range.registered", cuda.cuMemGetAddressRange(&base, &bytes, at(page)));
}

void ask_copies() {
  start();
  DevicePtr device = 0;
  DevicePtr reserved = 0;
  need(cuda.cuMemAlloc(&device, 4096), "cuMemAlloc");
  need(cuda.cuMemAddressReserve(&reserved, 2 * kMiB, 0, 0, 0), "cuMemAddressReserve");
  static unsigned host[4];
  say("dtod.host-source", cuda.cuMemcpyDtoDAsync(device, at(host), 4, nullptr));
  say("htod.beyond", cuda.cuMemcpyHtoDAsync(device + 4094, host, 4, nullptr));
  say("htod.reserved", cuda.cuMemcpyHtoDAsync(reserved, host, 4, nullptr));
  say("htod.null", cuda.cuMemcpyHtoDAsync(device, nullptr, 4, nullptr));
  say("dtoh.bad-device", cuda.cuMemcpyDtoHAsync(host, 0x1000, 4, nullptr));
  say("any.host-to-host", cuda.cuMemcpyAsync(at(host), at(host + 1), 4, nullptr));
  say("d8.reserved", cuda.cuMemsetD8Async(reserved, 0, 4, nullptr));
  say("d8.host", cuda.cuMemsetD8Async(at(host), 0, 4, nullptr));
  say("d8.beyond", cuda.cuMemsetD8Async(device, 0, 4097, nullptr));
  say("d8.null", cuda.cuMemsetD8Async(0, 0, 4, nullptr));
  say("d32.misaligned", cuda.cuMemsetD32Async(device + 2, 0, 1, nullptr));
  say("d32.zero-words", cuda.cuMemsetD32Async(device, 0, 0, nullptr));
  say("dtod.zero-bytes-of-nothing", cuda.cuMemcpyDtoDAsync(device, 0x1000, 0, nullptr));
  const std::uint64_t* page = words();
  say("d8.registered", cuda.cuMemsetD8Async(at(page), 1, 8, nullptr));
  say("dtod.registered", cuda.cuMemcpyDtoDAsync(device, at(page), 8, nullptr));
  say("sync", cuda.cuCtxSynchronize());
  need(cuda.cuMemFree(device), "cuMemFree");
  say("d8.freed", cuda.cuMemsetD8Async(device, 0, 4, nullptr));
  say("sync-again", cuda.cuCtxSynchronize());
}

void ask_read_only() {
  start();
  const DevicePtr address = map(create(), AccessRead);
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 64), "cuMemAlloc");
  static unsigned host[4];
  std::uint64_t* page = words();
  say("fill", cuda.cuMemsetD8Async(address, 1, 4, nullptr));
  say("dtod.to", cuda.cuMemcpyDtoDAsync(address, device, 4, nullptr));
  say("dtod.from", cuda.cuMemcpyDtoDAsync(device, address, 4, nullptr));
  say("htod.to", cuda.cuMemcpyHtoDAsync(address, host, 4, nullptr));
  say("htod.registered.to", cuda.cuMemcpyHtoDAsync(address, page, 4, nullptr));
  say("any.to", cuda.cuMemcpyAsync(address, device, 4, nullptr));
  say("wait-value", cuda.cuStreamWaitValue64(nullptr, address, 0, 0));
  say("sync", cuda.cuCtxSynchronize());
  // Access that was there when the work was queued.
  const DevicePtr other = map(create(), AccessReadWrite);
  const Stream stuck = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  need(cuda.cuMemsetD8Async(other, 1, 4, stuck), "fill");
  say("revoke", give(other, 2 * kMiB, AccessRead));
  store(page, 1);
  say("revoke.sync", cuda.cuCtxSynchronize());
}

void ask_read_only_word() {
  start();
  const DevicePtr address = map(create(), AccessRead);
  say("write", cuda.cuStreamWriteValue64(nullptr, address, 4, 0));
  say("sync", cuda.cuCtxSynchronize());
}

void ask_no_access() {
  start();
  const DevicePtr address = map(create(), AccessNone);
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 64), "cuMemAlloc");
  static unsigned host[4];
  say("fill", cuda.cuMemsetD8Async(address, 1, 4, nullptr));
  say("dtod.from", cuda.cuMemcpyDtoDAsync(device, address, 4, nullptr));
  say("dtoh.from", cuda.cuMemcpyDtoHAsync(host, address, 4, nullptr));
  say("write-value", cuda.cuStreamWriteValue64(nullptr, address, 4, 0));
  say("sync", cuda.cuCtxSynchronize());
}

void ask_plain() {
  start();
  DevicePtr device = 0;
  say("size-0", cuda.cuMemAlloc(&device, 0));
  need(cuda.cuMemAlloc(&device, 1000), "cuMemAlloc");
  say("aligned-512", device % 512 == 0);
  say("free.inside", cuda.cuMemFree(device + 512));
  say("free", cuda.cuMemFree(device));
  say("free.twice", cuda.cuMemFree(device));
  say("free.0", cuda.cuMemFree(0));
  say("free.vmm", cuda.cuMemFree(map(create(), AccessReadWrite)));
  say("too-large", cuda.cuMemAlloc(&device, std::size_t{1} << 44));
}

void ask_unmap_under_work() {
  start();
  std::uint64_t* page = words();
  const DevicePtr address = map(create(), AccessReadWrite);
  const Stream stuck = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  need(cuda.cuMemsetD8Async(address, 1, 2 * kMiB, stuck), "fill");
  say("unmap", cuda.cuMemUnmap(address, 2 * kMiB));
  store(page, 1);
  say("sync", cuda.cuStreamSynchronize(stuck));
  say("context", cuda.cuCtxSynchronize());
}

} // namespace answers
