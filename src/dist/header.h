// The header that ranks exchange before a checked call: what must agree, and who failed.
#pragma once

#include <cstdint>

#include "core/implementation.h"
#include "lmhead/communicator.h"

namespace lmhead {

/// What a header says about a call beside the problem.
struct CallFacts {
  const char* name;        ///< "sharded_forward", ...
  std::int64_t extra = 0;  ///< a value that must agree; its meaning depends on the call
};

/// Exchanges headers over `group`. `local` is what this rank found when it checked its own arguments;
/// `problem` may be null when that is an error. Returns the same verdict on every rank: Ok, this rank's own
/// error, another's (kCommunication, "rank 1: ..."), or the first field in which two ranks differ.
/// `shards`: each rank holds the next shard of one vocabulary.
Status agree(Communicator& group, const CallFacts& facts, const ResolvedProblem* problem, const Status& local,
             bool shards);

}  // namespace lmhead
