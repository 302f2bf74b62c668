// SPDX-License-Identifier: MIT
#include "plot.hpp"

#include "../output.hpp"

#include <cmath>
#include <cstdio>
#include <span>
#include <string_view>

namespace gpuloan::tool::bench {
namespace {

constexpr double kWidth = 1040, kMargin = 32, kLeft = 330, kRight = 800; // the ratios lie between left and right
constexpr double kRow = 26, kRowWithFloor = 36, kGroup = 46, kTop = 112, kBottom = 76;

constexpr const char* kStyle = R"(<style type="text/css">
text { font-family: "Helvetica Neue", Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; font-size: 13px; fill: #1f2933; }
.page { fill: #ffffff; }
.band { fill: #f3f5f8; }
.title { font-size: 22px; font-weight: bold; }
.case { font-size: 15px; font-weight: bold; }
.soft { fill: #5f6b7a; }
.small { font-size: 11px; }
.warn { fill: #b4500b; font-weight: bold; }
.value { font-weight: bold; }
.grid { stroke: #dde2e9; stroke-width: 1; }
.one { stroke: #5f6b7a; stroke-width: 1.5; stroke-dasharray: 4 3; }
.good { fill: #1570b8; stroke: #1570b8; }
.bad { fill: #cf5a0e; stroke: #cf5a0e; }
.even { fill: #5f6b7a; stroke: #5f6b7a; }
rect.bar { fill-opacity: 0.22; stroke: none; }
.whisker { stroke-width: 2; }
@media (prefers-color-scheme: dark) {
text { fill: #e6eaf0; }
.page { fill: #14181f; }
.band { fill: #1c222b; }
.soft { fill: #9aa7b8; }
.warn { fill: #ffa25e; }
.grid { stroke: #313a46; }
.one { stroke: #9aa7b8; }
.good { fill: #5db3f5; stroke: #5db3f5; }
.bad { fill: #ff9a52; stroke: #ff9a52; }
.even { fill: #9aa7b8; stroke: #9aa7b8; }
}
</style>
)";

std::string number(double value, int digits = 1) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char letter : text) {
    switch (letter) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
    }
  }
  return out;
}

std::string time_text(double us) {
  if (us < 1000) return number(us, us < 100 ? 2 : 1) + " us";
  if (us < 1e6) return number(us / 1e3, 2) + " ms";
  return number(us / 1e6, 2) + " s";
}

std::string amount_text(const Comparison& row, double value) {
  return row.sizes ? size_text(static_cast<std::uint64_t>(value)) : time_text(value);
}

bool more_is_better(const Comparison& row) { return row.rate || row.sizes; }
std::string label(const Comparison& row) { return !row.what.empty() ? row.what : row.sizes ? "to " + size_text(row.bytes) : size_text(row.bytes); }

class Drawing {
 public:
  void text(double x, double y, const std::string& classes, const char* anchor, std::string_view words) {
    add("<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" class=\"" + classes + "\" text-anchor=\"" + anchor + "\">" + escaped(words) + "</text>\n");
  }
  void line(const std::string& classes, double x1, double y1, double x2, double y2) {
    add("<line class=\"" + classes + "\" x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) + "\" y2=\"" + number(y2) + "\"/>\n");
  }
  void box(const std::string& classes, double x, double y, double width, double height) {
    add("<rect class=\"" + classes + "\" x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) + "\" height=\"" + number(height) + "\"/>\n");
  }
  void dot(const std::string& classes, double x, double y) {
    add("<circle class=\"" + classes + "\" cx=\"" + number(x) + "\" cy=\"" + number(y) + "\" r=\"5\"/>\n");
  }
  void add(std::string_view piece) { out_ += piece; }
  [[nodiscard]] std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// A logarithmic scale that holds all quartiles, and 1.
class Scale {
 public:
  explicit Scale(const std::vector<Comparison>& all) {
    for (const Comparison& row : all) {
      const Spread ratio = ratio_of(row);
      for (const double value : {ratio.low, ratio.high}) {
        if (!(value > 0) || !std::isfinite(value)) continue;
        low_ = std::min(low_, value);
        high_ = std::max(high_, value);
      }
    }
    const double room = std::pow(high_ / low_, 0.06);
    low_ /= room;
    high_ *= room;
  }
  [[nodiscard]] double at(double ratio) const {
    const double clamped = ratio > 0 ? std::clamp(ratio, low_, high_) : low_;
    return kLeft + (kRight - kLeft) * std::log(clamped / low_) / std::log(high_ / low_);
  }
  [[nodiscard]] std::vector<double> ticks() const {
    static constexpr double kFine[] = {1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9}, kMiddle[] = {1, 1.5, 2, 3, 5, 7}, kCoarse[] = {1, 2, 5};
    const bool fine = high_ / low_ < 3;
    const std::span<const double> steps = fine ? std::span<const double>(kFine) : high_ / low_ < 40 ? std::span<const double>(kMiddle) : std::span<const double>(kCoarse);
    std::vector<double> out;
    for (double decade = 1e-6; decade < 1e7; decade *= 10) {
      for (const double step : steps) {
        const double tick = decade * step;
        if (tick >= low_ && tick <= high_ && (out.empty() || at(tick) - at(out.back()) > 34)) out.push_back(tick);
      }
    }
    return out;
  }

 private:
  double low_ = 0.8, high_ = 1.25;
};

struct Group {
  std::span<const Comparison> rows;
  bool one_floor = true; // else each row names its own
  [[nodiscard]] double row_height() const { return one_floor ? kRow : kRowWithFloor; }
  [[nodiscard]] double height() const { return kGroup + row_height() * static_cast<double>(rows.size()); }
};

std::vector<Group> groups_of(const std::vector<Comparison>& all) {
  std::vector<Group> out;
  for (auto first = all.begin(); first != all.end();) {
    const std::string_view name = first->name;
    const auto last = std::find_if(first, all.end(), [&](const Comparison& row) { return row.name != name; });
    const std::string_view floor = first->floor;
    const bool one = std::all_of(first, last, [&](const Comparison& row) { return row.floor == floor; });
    out.push_back({std::span(first, last), one});
    first = last;
  }
  return out;
}

void draw_row(Drawing& to, const Scale& scale, const Comparison& row, bool own_floor, double y) {
  const Spread ratio = ratio_of(row), floor = spread_of(row.floor_us), library = spread_of(row.library_us);
  const bool even = ratio.low <= 1 && ratio.high >= 1, good = more_is_better(row) == (ratio.middle > 1);
  const std::string tone = even ? "even" : good ? "good" : "bad";
  const std::string amounts = amount_text(row, library.middle) + " / " + amount_text(row, floor.middle);
  to.add("<g class=\"row\">\n<title>" + escaped(std::string(row.name) + ", " + label(row) + ": " + number(ratio.middle, 3) + ", quartiles " +
                                               number(ratio.low, 3) + " to " + number(ratio.high, 3) + "; " + amounts + " (" + row.floor + ")") + "</title>\n");
  to.text(kLeft - 20, y + (own_floor ? -2 : 5), "label", "end", label(row));
  if (own_floor) to.text(kLeft - 20, y + 12, "soft small", "end", std::string("over ") + row.floor);
  const double one = scale.at(1), middle = scale.at(ratio.middle), low = scale.at(ratio.low), high = scale.at(ratio.high);
  to.box(tone + " bar", std::min(one, middle), y - 6, std::abs(middle - one), 12);
  to.line(tone + " whisker", low, y, high, y);
  to.line(tone + " whisker", low, y - 4, low, y + 4);
  to.line(tone + " whisker", high, y - 4, high, y + 4);
  to.dot(tone, middle, y);
  // On the side where the bar is not, unless the picture ends there.
  const double right = std::max({high, middle + 5, one}), left = std::min({low, middle - 5, one});
  if (right + 52 < kRight || left - 52 < kLeft) to.text(right + 9, y + 5, "value", "start", number(ratio.middle, ratio.middle < 10 ? 2 : 1));
  else to.text(left - 9, y + 5, "value", "end", number(ratio.middle, ratio.middle < 10 ? 2 : 1));
  to.text(kWidth - kMargin, y + 5, "soft", "end", amounts);
  to.add("</g>\n");
}

void draw_axis(Drawing& to, const Scale& scale, double top, double bottom) {
  for (const double tick : scale.ticks()) {
    const double x = scale.at(tick);
    to.line(tick == 1 ? "one" : "grid", x, top, x, bottom);
    char text[32];
    std::snprintf(text, sizeof text, "%g", tick);
    to.text(x, top - 8, "soft small", "middle", text);
    to.text(x, bottom + 16, "soft small", "middle", text);
  }
}

void draw_legend(Drawing& to, double bottom) {
  to.text(kMargin, bottom + 44, "soft small", "start",
          "A dot is the median of the ratios of neighbouring blocks, the line shows its quartiles; the scale is logarithmic and 1 is the floor.");
  to.text(kMargin, bottom + 60, "soft small", "start", "Blue: better than the floor. Orange: the floor is better. Grey: the quartiles hold both.");
}

// Without the worker's process, which would dwarf the rest: the steps of the total one behind the other, the others from the start.
double startup_height(const Startup& startup) { return kGroup + kRow * static_cast<double>(startup.steps.size() - 1) + 20; } // and a margin

void draw_startup(Drawing& to, const Startup& startup, double y) {
  double sum = 0, longest = 1;
  for (std::size_t index = 1; index < startup.steps.size(); ++index) {
    const StartStep& step = startup.steps[index];
    const double middle = spread_of(step.us).middle;
    if (step.part) sum += middle;
    longest = std::max({longest, sum, middle});
  }
  const StartStep& process = startup.steps.front();
  to.text(kMargin, y + 22, "case", "start", "startup");
  to.text(kMargin, y + 38, "soft small", "start",
          "to the first loan of a new worker; its process took " + time_text(spread_of(process.us).middle) + " before; medians, on a linear scale of time");
  double line = y + kGroup + kRow / 2 - 4, at = 0;
  for (std::size_t index = 1; index < startup.steps.size(); ++index, line += kRow) {
    const StartStep& step = startup.steps[index];
    const double middle = spread_of(step.us).middle, from = step.part ? at : 0;
    const auto place = [&](double us) { return kLeft + (kRight - kLeft) * us / longest; };
    to.add(std::string("<g class=\"step\">\n<title>") + escaped(std::string(step.name) + ": " + time_text(middle) + ", " + step.about) + "</title>\n");
    to.text(kLeft - 20, line + 5, "label", "end", step.name);
    to.box(step.part ? "good" : "even", place(from), line - 6, std::max(place(from + middle) - place(from), 1.0), 12);
    to.text(kWidth - kMargin, line + 5, "soft", "end", time_text(middle));
    to.add("</g>\n");
    if (step.part) at += middle;
  }
}

} // namespace

std::string plot_svg(const PlotHeading& heading, const std::vector<Comparison>& all, const std::optional<Startup>& startup) {
  const std::vector<Group> groups = groups_of(all);
  double bottom = kTop;
  for (const Group& group : groups) bottom += group.height();
  const double height = bottom + kBottom + (startup ? startup_height(*startup) : 0);
  const Scale scale(all);
  Drawing to;
  to.add("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\"" + number(kWidth, 0) +
         "\" height=\"" + number(height, 0) + "\" viewBox=\"0 0 " + number(kWidth, 0) + " " + number(height, 0) + "\">\n");
  to.add("<title>gpuloan beside the bare driver</title>\n");
  to.add(kStyle);
  to.box("page", 0, 0, kWidth, height);
  to.text(kMargin, 42, "title", "start", "gpuloan beside bare code that does the same");
  to.text(kMargin, 64, "soft", "start", heading.device + "  |  " + heading.driver + "  |  " + heading.date + "  |  gpuloan " + gpuloan_version_text());
  if (heading.simulated) to.text(kMargin, 84, "warn", "start", "SIMULATED driver: times of this machine's CPUs, not of a GPU");
  double y = kTop;
  for (std::size_t index = 0; index < groups.size(); ++index) {
    if (index % 2 == 0) to.box("band", 0, y, kWidth, groups[index].height());
    y += groups[index].height();
  }
  if (!all.empty()) {
    to.text(kWidth - kMargin, kTop - 8, "soft small", "end", "gpuloan / floor, medians");
    draw_axis(to, scale, kTop, bottom);
  }
  y = kTop;
  for (const Group& group : groups) {
    const Comparison& first = group.rows.front();
    to.text(kMargin, y + 22, "case", "start", first.name);
    std::string about = group.one_floor ? std::string("over ") + first.floor : "";
    if (more_is_better(first)) about += std::string(about.empty() ? "" : "; ") + (first.sizes ? "sizes" : "rates") + ", more is better";
    if (!about.empty()) to.text(kMargin, y + 38, "soft small", "start", about);
    double line = y + kGroup + group.row_height() / 2 - 4;
    for (const Comparison& row : group.rows) {
      draw_row(to, scale, row, !group.one_floor, line);
      line += group.row_height();
    }
    y += group.height();
  }
  if (startup) draw_startup(to, *startup, all.empty() ? kTop : bottom + kBottom);
  if (!all.empty()) draw_legend(to, bottom);
  to.add("</svg>\n");
  return to.take();
}

} // namespace gpuloan::tool::bench
