// SPDX-License-Identifier: MIT
#include "connect.hpp"

#include <cstring>
#include <sys/stat.h>
#include <thread>

namespace gpuloan::tool {
namespace {

constexpr std::uint32_t kRefusalGraceMs = 500; // in which a refusal may still turn out to be the end of an old lender

class Connector {
 public:
  Connector(Context& context, const MeetOptions& meet, const Deadline& deadline)
      : context_(context), path_(meet.socket), deadline_(deadline), source_(meet.key, meet.socket, deadline) {}

  Peer run() {
    for (;;) {
      check_interrupted();
      const std::optional<gpuloan_key> key = source_.read();
      if (key && !refused_before(*key)) {
        if (Peer peer = try_connect(*key); peer) return peer;
      }
      if (grace_ && grace_->passed()) throw Failure(code_, refusal_);
      if (deadline_.passed()) give_up(key.has_value());
      std::this_thread::sleep_for(Milliseconds(10));
    }
  }

 private:
  [[nodiscard]] bool refused_before(const gpuloan_key& key) const {
    return refused_ && std::memcmp(key.bytes, refused_->bytes, sizeof key.bytes) == 0;
  }

  // Empty: try again.
  Peer try_connect(const gpuloan_key& key) {
    try {
      return context_.connect(path_.c_str(), key, deadline_.left());
    } catch (const StatusError& error) {
      const std::string text = "cannot connect to '" + path_ + "': " + error.what();
      switch (error.status()) {
        case GPULOAN_ERR_CONNECT: grace_.reset(); break; // whoever refused is gone
        case GPULOAN_ERR_PEER_LOST: refuse(ExitPeerLost, text); break;
        case GPULOAN_ERR_KEY:
          refuse(ExitKeyRefused, text + "; the key came from " + source_.name());
          if (!source_.is_file()) throw Failure(code_, refusal_);
          refused_ = key;
          break;
        case GPULOAN_ERR_INVALID: throw Failure(ExitPathUnusable, text);
        default: throw Failure(exit_code(error.status()), text);
      }
      return {};
    }
  }

  void refuse(int code, const std::string& text) {
    code_ = code;
    refusal_ = text;
    if (!grace_) grace_.emplace(kRefusalGraceMs);
  }

  [[noreturn]] void give_up(bool has_key) const {
    if (grace_) throw Failure(code_, refusal_);
    struct stat info = {};
    if (!has_key && ::stat(path_.c_str(), &info) == 0 && S_ISSOCK(info.st_mode)) {
      throw Failure(ExitKeyRefused, "there is no key: " + source_.name() + " did not appear within " +
                                        deadline_.text() + "; pass --key-file, --key-fd or GPULOAN_KEY");
    }
    throw Failure(ExitNoListener, "nobody listens at '" + path_ + "' within " + deadline_.text() +
                                      "; start 'gpuloan lend --socket " + path_ +
                                      "' on the other side or raise --timeout");
  }

  Context& context_;
  const std::string& path_;
  const Deadline& deadline_;
  KeySource source_;
  std::optional<gpuloan_key> refused_;
  std::optional<Deadline> grace_; // runs while the last answer was a refusal
  int code_ = ExitInternal;
  std::string refusal_;
};

} // namespace

Peer connect_to_lender(Context& context, const MeetOptions& meet, const Deadline& deadline) {
  return Connector(context, meet, deadline).run();
}

Peer adopt_inherited(Context& context, int fd, const Deadline& deadline) {
  try {
    return context.adopt(fd, deadline.left());
  } catch (const StatusError& error) {
    throw Failure(error.status() == GPULOAN_ERR_INVALID ? ExitPathUnusable : exit_code(error.status()),
                  "cannot use the inherited FD " + std::to_string(fd) + ": " + error.what());
  }
}

} // namespace gpuloan::tool
