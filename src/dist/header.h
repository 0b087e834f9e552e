// The header that ranks exchange before a checked call: what must agree, and who failed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/implementation.h"
#include "lmhead/communicator.h"

namespace lmhead {

/// What a header says about a call beside the problem.
struct CallFacts {
  const char* name;        ///< "sharded_forward", ...
  std::int64_t extra = 0;  ///< a value that must agree; its meaning depends on the call
};

using Header = std::array<std::byte, 512>;

/// This rank's header. `local` is what it found when it checked its own arguments; `problem` may be null when
/// that is an error. Row values are hashed where they are in host memory.
Header make_header(const CallFacts& facts, const ResolvedProblem* problem, const Status& local, Device device);

/// The verdict on all ranks' headers in rank order, of the same kind on every rank: Ok, this rank's own error
/// `local`, another's (kCommunication, "rank 1 ..."), or the first field in which two ranks differ.
/// `shards`: each rank holds the next shard of one vocabulary.
Status header_verdict(std::span<const Header> headers, const Status& local, bool shards);

/// Both, with the exchange between them.
Status agree(Communicator& group, const CallFacts& facts, const ResolvedProblem* problem, const Status& local,
             bool shards);

}  // namespace lmhead
