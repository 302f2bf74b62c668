// SPDX-License-Identifier: MIT
//
// Context: the host rung's rings, as far as both ends do the same. What an end has moved is told to the other one; what follows for a loan
// is in pump(), each side's own.
#include <loan/context.hpp>

namespace gpuloan::loan {

Result<void> Context::move_rings(Peer& peer, memory::RingSource::Progress& source, memory::RingSink::Progress& sink) {
  Result<void> moved = peer.rings.pump(source, sink);
  if (source.filled.size() + sink.drained.size() > 0) request_tick(); // the next pieces follow soon
  for (const memory::Piece& piece : source.filled) {
    channel::Record record = channel::make_record(channel::Type::RingFilled);
    record.ring_filled = {piece.loan, piece.offset, piece.bytes, piece.turn, piece.slot, {}};
    send(peer, record);
  }
  for (const std::uint32_t slot : sink.drained) {
    channel::Record record = channel::make_record(channel::Type::RingDrained);
    record.ring_drained.slot = slot;
    send(peer, record);
  }
  return moved;
}

Result<void> Context::on_ring_moved(Peer& peer, const channel::Record& record, bool refused) {
  const bool filled = record.header.type == static_cast<std::uint16_t>(channel::Type::RingFilled);
  if (filled ? !peer.rings.in : !peer.rings.out) {
    if (refused) return {};
    return fail(GPULOAN_ERR_PROTOCOL, filled ? "RING_FILLED without a ring" : "RING_DRAINED without a ring");
  }
  if (filled) {
    const channel::RingFilled& wire = record.ring_filled;
    GPULOAN_TRY(peer.rings.in->filled({wire.loan, wire.offset, wire.bytes, wire.turn, wire.slot}));
  } else {
    peer.rings.out->drained(record.ring_drained.slot);
  }
  request_tick();
  return {};
}

} // namespace gpuloan::loan
