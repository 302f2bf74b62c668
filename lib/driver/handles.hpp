// SPDX-License-Identifier: MIT
//
// Typed owners of driver objects: one class, one resource, move-only. Each keeps its Gpu alive and enters its context for
// the calls it makes; destructors do nothing once calls_allowed() is false. A raw Stream, Event, DevicePtr or MemHandle
// in a signature is borrowed for the call.
#pragma once

#include <base/unique_fd.hpp>
#include <driver/gpu.hpp>

#include <span>
#include <vector>

namespace gpuloan::driver {

class OwnedStream {
 public:
  OwnedStream() noexcept = default;
  [[nodiscard]] static Result<OwnedStream> create(std::shared_ptr<Gpu> gpu); // non-blocking
  OwnedStream(OwnedStream&& other) noexcept;
  OwnedStream& operator=(OwnedStream&& other) noexcept;
  ~OwnedStream();
  [[nodiscard]] Stream get() const noexcept { return stream_; }
  [[nodiscard]] explicit operator bool() const noexcept { return stream_ != nullptr; }
  [[nodiscard]] Result<bool> query() const; // as Driver::over(), of all that is in it
  // Sleeps until all that is in it is over, or gives the error that ended it. Only for work that nothing but this process can hold up.
  [[nodiscard]] Result<void> synchronize() const;

 private:
  std::shared_ptr<Gpu> gpu_;
  Stream stream_ = nullptr;
};

class OwnedEvent {
 public:
  OwnedEvent() noexcept = default;
  // flags: EventFlags; timing is always disabled.
  [[nodiscard]] static Result<OwnedEvent> create(std::shared_ptr<Gpu> gpu, unsigned flags);
  [[nodiscard]] static Result<OwnedEvent> open_ipc(std::shared_ptr<Gpu> gpu, const IpcEventHandle& handle);
  OwnedEvent(OwnedEvent&& other) noexcept;
  OwnedEvent& operator=(OwnedEvent&& other) noexcept;
  ~OwnedEvent();
  [[nodiscard]] Event get() const noexcept { return event_; }
  [[nodiscard]] explicit operator bool() const noexcept { return event_ != nullptr; }
  [[nodiscard]] bool blocking() const noexcept { return blocking_; } // made with EventBlockingSync: the driver sleeps for it
  [[nodiscard]] Result<IpcEventHandle> ipc_handle() const;
  [[nodiscard]] Result<void> record(Stream stream) const;
  // As Driver::over(), of everything recorded; true also when nothing was ever recorded (S11).
  [[nodiscard]] Result<bool> query() const;
  // Sleeps until everything recorded is complete, or gives the error that ended it. Only for work that nothing but this process can hold up.
  [[nodiscard]] Result<void> synchronize() const;

 private:
  std::shared_ptr<Gpu> gpu_;
  Event event_ = nullptr;
  bool blocking_ = false;
};

// Physical memory made by cuMemCreate or imported; released, not freed: it lives until its last mapping is gone (V3).
class VmmHandle {
 public:
  VmmHandle() noexcept = default;
  // `bytes` is a multiple of the granularity. DEVICE_MEMORY names the size and what is free.
  [[nodiscard]] static Result<VmmHandle> create(std::shared_ptr<Gpu> gpu, std::size_t bytes);
  [[nodiscard]] static Result<VmmHandle> import_fd(std::shared_ptr<Gpu> gpu, int fd, std::size_t bytes);
  // A handle of our own to the memory mapped at `address`, whoever made it; `bytes` of it are mapped there. INVALID for
  // memory that was not made through VMM (V6).
  [[nodiscard]] static Result<VmmHandle> retain(std::shared_ptr<Gpu> gpu, DevicePtr address, std::size_t bytes);
  VmmHandle(VmmHandle&& other) noexcept;
  VmmHandle& operator=(VmmHandle&& other) noexcept;
  ~VmmHandle();
  [[nodiscard]] MemHandle get() const noexcept { return handle_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] explicit operator bool() const noexcept { return gpu_ != nullptr; }
  [[nodiscard]] Result<UniqueFd> export_fd() const; // CLOEXEC is set at once
  [[nodiscard]] Result<int> handle_types() const;   // HandleType bits that it was made with

 private:
  std::shared_ptr<Gpu> gpu_;
  MemHandle handle_ = 0;
  std::size_t bytes_ = 0;
};

// A reserved address range with one handle mapped whole into it (V10), accessible as given for its whole life.
class VmmMapping {
 public:
  VmmMapping() noexcept = default;
  [[nodiscard]] static Result<VmmMapping> map(std::shared_ptr<Gpu> gpu, const VmmHandle& handle, AccessFlags access);
  VmmMapping(VmmMapping&& other) noexcept;
  VmmMapping& operator=(VmmMapping&& other) noexcept;
  ~VmmMapping(); // unmaps and frees the addresses; does not wait for running work (R22)
  [[nodiscard]] DevicePtr pointer() const noexcept { return pointer_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] explicit operator bool() const noexcept { return pointer_ != 0; }

 private:
  std::shared_ptr<Gpu> gpu_;
  DevicePtr pointer_ = 0;
  std::size_t bytes_ = 0;
};

// A reserved address range with several handles mapped one behind the other, each whole (V10).
class VmmRange {
 public:
  VmmRange() noexcept = default;
  [[nodiscard]] static Result<VmmRange> map(std::shared_ptr<Gpu> gpu, std::span<const VmmHandle> handles, AccessFlags access);
  VmmRange(VmmRange&& other) noexcept;
  VmmRange& operator=(VmmRange&& other) noexcept;
  ~VmmRange(); // as VmmMapping
  [[nodiscard]] DevicePtr pointer() const noexcept { return pointer_; }
  [[nodiscard]] explicit operator bool() const noexcept { return pointer_ != 0; }

 private:
  std::shared_ptr<Gpu> gpu_;
  DevicePtr pointer_ = 0;
  std::size_t bytes_ = 0;
  std::vector<std::size_t> pieces_; // mapped so far, by size
};

// Memory of another process that cuMemAlloc made, opened whole by its legacy handle; `handle` names the block's base.
class IpcMapping {
 public:
  IpcMapping() noexcept = default;
  // The handle of the block that `pointer` lies in; the same for every pointer into it.
  [[nodiscard]] static Result<IpcMemHandle> handle_of(Gpu& gpu, DevicePtr pointer);
  [[nodiscard]] static Result<IpcMapping> open(std::shared_ptr<Gpu> gpu, const IpcMemHandle& handle);
  IpcMapping(IpcMapping&& other) noexcept;
  IpcMapping& operator=(IpcMapping&& other) noexcept;
  ~IpcMapping(); // waits for all work of the context, as cuMemFree does (measured)
  [[nodiscard]] DevicePtr pointer() const noexcept { return pointer_; } // of the block's base
  [[nodiscard]] explicit operator bool() const noexcept { return pointer_ != 0; }

 private:
  std::shared_ptr<Gpu> gpu_;
  DevicePtr pointer_ = 0;
};

// The exporter's part of the pool rung. The pool has to be exported once before any pointer of it is (P1); a descriptor may
// be made and closed for each peer. `base` is an allocation's first byte (P2); the cost grows with its size (P4).
[[nodiscard]] Result<UniqueFd> export_pool(Gpu& gpu, Pool pool);
[[nodiscard]] Result<PoolPointer> export_pool_pointer(Gpu& gpu, DevicePtr base);

// Another process's pool; ends after all pointers of it.
class ImportedPool {
 public:
  ImportedPool() noexcept = default;
  [[nodiscard]] static Result<ImportedPool> open(std::shared_ptr<Gpu> gpu, int fd);
  ImportedPool(ImportedPool&& other) noexcept;
  ImportedPool& operator=(ImportedPool&& other) noexcept;
  ~ImportedPool();
  [[nodiscard]] Pool get() const noexcept { return pool_; }
  [[nodiscard]] explicit operator bool() const noexcept { return pool_ != nullptr; }

 private:
  std::shared_ptr<Gpu> gpu_;
  Pool pool_ = nullptr;
};

// One allocation of another process's pool. All mappings of it in this process are one, whoever opened them (P6); it is freed with the
// last. `owner` is what has `pool`, and lives until then.
class PoolMapping {
 public:
  PoolMapping() noexcept = default;
  [[nodiscard]] static Result<PoolMapping> open(std::shared_ptr<Gpu> gpu, Pool pool, PoolPointer shared, std::shared_ptr<const void> owner);
  PoolMapping(PoolMapping&& other) noexcept = default;
  PoolMapping& operator=(PoolMapping&& other) noexcept;
  ~PoolMapping();
  [[nodiscard]] DevicePtr pointer() const noexcept;
  [[nodiscard]] explicit operator bool() const noexcept { return import_ != nullptr; }

 private:
  struct Import;
  struct Imports;
  std::shared_ptr<Import> import_;
};

// Host memory registered with the device; the memory itself belongs to somebody else and must outlive this.
class HostRegistration {
 public:
  HostRegistration() noexcept = default;
  [[nodiscard]] static Result<HostRegistration> create(std::shared_ptr<Gpu> gpu, std::span<std::byte> memory);
  // Empty where it is refused: the memory is used unpinned, and Gpu::pin_refusal() says why.
  [[nodiscard]] static HostRegistration try_create(std::shared_ptr<Gpu> gpu, std::span<std::byte> memory);
  HostRegistration(HostRegistration&& other) noexcept;
  HostRegistration& operator=(HostRegistration&& other) noexcept;
  ~HostRegistration();
  [[nodiscard]] DevicePtr device_pointer() const noexcept { return device_; }
  [[nodiscard]] explicit operator bool() const noexcept { return host_ != nullptr; }

 private:
  [[nodiscard]] static Result<HostRegistration> pin(std::shared_ptr<Gpu> gpu, std::span<std::byte> memory);
  std::shared_ptr<Gpu> gpu_;
  void* host_ = nullptr;
  DevicePtr device_ = 0;
};

} // namespace gpuloan::driver
