// SPDX-License-Identifier: MIT
//
// A shared library that is no driver; see fake_libcuda.cpp.
extern "C" __attribute__((visibility("default"))) int gpuloan_fake_nothing;
int gpuloan_fake_nothing = 0;
