// SPDX-License-Identifier: MIT
//
// Empty: gives limited_pinning.cpp the name libcuda.so.1 to depend on where no driver is installed.
extern "C" void gpuloan_needed_libcuda() {}
