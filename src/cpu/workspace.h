// Scratch memory of the CPU calls: its budget, and how it is cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "lmhead/status.h"
#include "lmhead/types.h"

namespace lmhead {

inline constexpr std::size_t kDefaultBudget = std::size_t{64} << 20;

/// Cuts workspace into 64-byte aligned parts; with base null it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    used_ = (used_ + 63) / 64 * 64;
    std::byte* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += static_cast<std::size_t>(count) * sizeof(T);
    return reinterpret_cast<T*>(at);
  }
  std::byte* take_bytes(std::size_t bytes) { return take<std::byte>(static_cast<std::int64_t>(bytes)); }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// The caller's workspace, or one of our own for the length of a call. `bytes` counts kSlack for alignment.
class Workspace {
 public:
  static constexpr std::size_t kSlack = 64;
  Workspace(const Execution& execution, std::size_t bytes) {
    void* base = execution.workspace;
    if (base == nullptr) {
      own_.reset(static_cast<std::byte*>(::operator new(bytes)));
      base = own_.get();
    }
    std::size_t space = bytes;
    aligned_ = std::align(kSlack, bytes - kSlack, base, space);
  }
  void* base() const { return aligned_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p); }
  };
  std::unique_ptr<std::byte, Free> own_;
  void* aligned_ = nullptr;
};

inline std::size_t budget_of(const Execution& e) {
  return e.workspace_budget > 0 ? e.workspace_budget : kDefaultBudget;
}
inline Status budget_too_small(std::size_t needed, const Execution& e) {
  return {StatusCode::kInvalidArgument, "workspace_budget: expected at least " + std::to_string(needed) +
                                            " bytes for these shapes, got " + std::to_string(budget_of(e))};
}

}  // namespace lmhead
