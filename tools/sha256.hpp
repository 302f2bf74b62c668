// SPDX-License-Identifier: MIT
//
// SHA-256 of bytes that come in pieces.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

struct evp_md_ctx_st;

namespace gpuloan::tool {

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  // 64 hexadecimal digits; ends the object's use.
  [[nodiscard]] std::string finish();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const noexcept;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

} // namespace gpuloan::tool
