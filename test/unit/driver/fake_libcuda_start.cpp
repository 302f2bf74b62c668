// SPDX-License-Identifier: MIT
//
// The functions of the fake libcuda that do something; see fake_libcuda.cpp.
#include <driver/types.hpp>

using namespace gpuloan::cuda;

int fake_setting(const char* name, int otherwise);

#ifdef FAKE_BY_VERSION
#define FAKE_EXPORT __attribute__((visibility("hidden")))
#else
#define FAKE_EXPORT __attribute__((visibility("default")))
#endif

extern "C" {

FAKE_EXPORT CuResult cuInit(unsigned flags);
FAKE_EXPORT CuResult cuDriverGetVersion(int* version);
FAKE_EXPORT CuResult cuGetErrorName(CuResult code, const char** name);
FAKE_EXPORT CuResult cuGetErrorString(CuResult code, const char** text);

CuResult cuInit(unsigned) { return fake_setting("FAKE_INIT", fake_setting("FAKE_CODE", Success)); }

CuResult cuDriverGetVersion(int* version) {
  if (const int code = fake_setting("FAKE_CODE", Success); code != Success) return code;
  *version = fake_setting("FAKE_VERSION", 13000);
  return Success;
}

CuResult cuGetErrorName(CuResult, const char** name) {
  if (const int code = fake_setting("FAKE_CODE", Success); code != Success) return code;
  *name = "NAMED_BY_THE_DRIVER";
  return Success;
}

CuResult cuGetErrorString(CuResult, const char** text) {
  if (const int code = fake_setting("FAKE_CODE", Success); code != Success) return code;
  *text = "words of the driver";
  return Success;
}

} // extern "C"
