// SPDX-License-Identifier: MIT
//
// The gate that every exported function passes: fault on demand, initialised or not, feature present or not, a usable
// current context where one is needed, no capture that forbids the call. No exception leaves it.
//
// A call that names a stream, an event or an allocation needs no current context (measured on a real driver): it works
// in the context of what it names, and fails with that one.
#pragma once

#include <sim/faults.hpp>
#include <sim/rows.hpp>

#include <new>
#include <system_error>

namespace gpuloan::sim {

enum class Need {
  Nothing,
  Init,
  Context, // a current context that has not failed
};

// What a stream capture that is going on says about the call.
enum class Capture {
  Safe,
  Unsafe,    // forbidden by some captures to some threads
  Forbidden, // by every capture in the current context
};

[[nodiscard]] CuResult admit(Row row, Need need, Capture capture);

template <typename Body>
[[nodiscard]] CuResult enter(Row row, Need need, Capture capture, Body&& body) noexcept {
  try {
    if (const auto fault = count_call(row)) return *fault; // first, so that any call can be made to fail
    if (const CuResult result = admit(row, need, capture)) return result;
    return body();
  } catch (const std::bad_alloc&) {
    return OutOfMemory;
  } catch (const std::system_error&) { // no thread to be had
    return OutOfMemory;
  } catch (...) {
    return Unknown;
  }
}

} // namespace gpuloan::sim
