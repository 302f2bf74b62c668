// SPDX-License-Identifier: MIT
#include "sha256.hpp"

#include "exit_codes.hpp"

#include <openssl/evp.h>

namespace gpuloan::tool {
namespace {

void need(int ok, const char* call) {
  if (ok != 1)
    throw Failure(ExitInternal, std::string(call) + " of libcrypto failed; is SHA-256 disabled on this machine?");
}

} // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const noexcept { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  need(context_ != nullptr ? 1 : 0, "EVP_MD_CTX_new");
  need(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr), "EVP_DigestInit_ex");
}

void Sha256::update(std::span<const std::byte> bytes) {
  need(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()), "EVP_DigestUpdate");
}

std::string Sha256::finish() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  need(EVP_DigestFinal_ex(context_.get(), digest, &length), "EVP_DigestFinal_ex");
  std::string text;
  for (unsigned index = 0; index < length; ++index) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[digest[index] >> 4U];
    text += kDigits[digest[index] & 0xFU];
  }
  return text;
}

} // namespace gpuloan::tool
