// SPDX-License-Identifier: MIT
//
// A run as a picture: one row for each comparison, grouped by case, its ratio as a dot on a logarithmic scale with the quartiles as
// whiskers; then the steps of the start-up, one after the other on a scale of time. SVG 1.1 without anything from elsewhere; colours follow the reader's light or dark setting.
#pragma once

#include "startup.hpp"

namespace gpuloan::tool::bench {

struct PlotHeading {
  std::string device, driver, date;
  bool simulated = false;
};

[[nodiscard]] std::string plot_svg(const PlotHeading& heading, const std::vector<Comparison>& all, const std::optional<Startup>& startup);

} // namespace gpuloan::tool::bench
