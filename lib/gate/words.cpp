// SPDX-License-Identifier: MIT
#include <gate/words.hpp>

namespace gpuloan::gate {

Result<Words> Words::create(std::uint32_t slots) {
  const std::size_t bytes = std::size_t{slots} * sizeof(Slot);
  auto fd = create_memfd("gpuloan-words", bytes);
  if (!fd) return forward(std::move(fd.error()));
  auto mapping = Mapping::map_shared(fd->get(), bytes);
  if (!mapping) return forward(std::move(mapping.error()));
  Words words;
  words.fd_ = std::move(*fd);
  words.mapping_ = std::make_shared<const Mapping>(std::move(*mapping));
  words.slots_ = slots;
  return words;
}

Result<Words> Words::adopt(UniqueFd fd, std::uint64_t bytes, std::uint32_t slots) {
  if (slots == 0 || bytes != std::uint64_t{slots} * sizeof(Slot)) {
    return fail(GPULOAN_ERR_PROTOCOL, "control pages of " + std::to_string(bytes) + " bytes do not hold " +
                                          std::to_string(slots) + " slots");
  }
  auto mapping = Mapping::map_shared(fd.get(), bytes);
  if (!mapping) return forward(std::move(mapping.error()));
  Words words;
  words.fd_ = std::move(fd);
  words.mapping_ = std::make_shared<const Mapping>(std::move(*mapping));
  words.slots_ = slots;
  return words;
}

Result<void> Words::seal() {
  GPULOAN_TRY(seal_shared(fd_.get()));
  fd_.reset();
  return {};
}

Result<void> Words::check_seal() {
  GPULOAN_TRY(check_sealed(fd_.get(), mapping_->size()));
  fd_.reset();
  return {};
}

Result<void> Words::register_with(const std::shared_ptr<driver::Gpu>& gpu) {
  if (registration_) return {};
  auto registration = driver::HostRegistration::create(gpu, mapping_->bytes());
  if (!registration) return forward(std::move(registration.error()));
  registration_ = std::move(*registration);
  return {};
}

} // namespace gpuloan::gate
