// SPDX-License-Identifier: MIT
//
// The main() of a test program that has none of its own.
#include <doctest/doctest.h>

int main(int count, char** words) { return doctest::Context(count, words).run(); }
