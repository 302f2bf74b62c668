// SPDX-License-Identifier: MIT
//
// The table behind decode(): a record that carries anything its type does not list ends the connection. Texts and
// metadata share the limit of the tail; lists of devices have room for kMaxDevices.
#include <channel/rules.hpp>

#include <array>

namespace gpuloan::channel {
namespace {

constexpr std::uint16_t kDevicesMax = kMaxDevices * sizeof(DeviceEntry);
constexpr std::uint16_t kForeignHandle = 64;
constexpr std::uint16_t kText = kTailMax;
constexpr std::uint16_t kMetadata = kTailMax;

// In the order of Type, which starts at 1.
constexpr std::array<TypeRule, kTypeMax> kRules = {{
    {Type::Hello, "HELLO", 0, kDevicesMax},
    {Type::Welcome, "WELCOME", 0, kDevicesMax},
    {Type::Refused, "REFUSED", 0, kText},
    {Type::Bye, "BYE", 0, kText},
    {Type::Pages, "PAGES", 1, 0},
    {Type::PagesMapped, "PAGES_MAPPED", 0, 0},
    {Type::PagesSealed, "PAGES_SEALED", 0, 0},
    {Type::PagesChecked, "PAGES_CHECKED", 0, 0},
    {Type::Chunk, "CHUNK", 1, 0},
    {Type::Recall, "RECALL", 0, 0},
    {Type::Unmapped, "UNMAPPED", 0, 0},
    {Type::Ring, "RING", 1, 0},
    {Type::EventHandle, "EVENT_HANDLE", 0, 0},
    {Type::Export, "EXPORT", 0, kMetadata},
    {Type::Ready, "READY", 0, 0},
    {Type::Done, "DONE", 0, 0},
    {Type::Ack, "ACK", 0, kText},
    {Type::Cancel, "CANCEL", 0, kText},
    {Type::Finish, "FINISH", 0, 0},
    {Type::Request, "REQUEST", 0, kMetadata},
    {Type::Denied, "DENIED", 0, kText},
    {Type::RingFilled, "RING_FILLED", 0, 0},
    {Type::RingDrained, "RING_DRAINED", 0, 0},
    {Type::Tether, "TETHER", 1, 0},
    {Type::Foreign, "FOREIGN", 0, kForeignHandle},
    {Type::Piece, "PIECE", 1, 0},
    {Type::PiecesTaken, "PIECES_TAKEN", 0, 0},
    {Type::Pool, "POOL", 1, 0},
}};

constexpr bool in_order() {
  for (std::size_t i = 0; i < kRules.size(); ++i) {
    if (static_cast<std::size_t>(kRules[i].type) != i + 1) return false;
  }
  return true;
}
static_assert(in_order());

} // namespace

const TypeRule* rule_of(std::uint16_t type) noexcept {
  return type >= 1 && type <= kTypeMax ? &kRules[type - 1U] : nullptr;
}

const char* type_name(Type type) noexcept {
  const TypeRule* rule = rule_of(static_cast<std::uint16_t>(type));
  return rule != nullptr ? rule->name : "unknown";
}

} // namespace gpuloan::channel
