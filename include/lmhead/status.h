// Status, Result<T>: how the library reports errors. Nothing here prints, exits or throws.
#pragma once

#include <cassert>
#include <string>
#include <utility>
#include <variant>

namespace lmhead {

/// What went wrong. The Python package maps each code to the exception named beside it.
enum class StatusCode {
  kOk = 0,           ///< no error
  kInvalidArgument,  ///< a value or a shape breaks the contract (ValueError)
  kTypeMismatch,     ///< a dtype breaks the contract (TypeError)
  kUnsupported,      ///< a valid request that the chosen backend cannot run (NotImplementedError)
  kOutOfMemory,      ///< an allocation failed; never retried on a bigger path (MemoryError)
  kCommunication,    ///< another rank failed, disagrees or is gone (RuntimeError)
  kInternal,         ///< a library or driver call below us failed (RuntimeError)
};

/// Name of a code, such as "invalid argument".
const char* to_string(StatusCode code);

/// An error code and a one-line message. Messages follow one pattern:
/// `argument: expected WHAT, got WHAT`, such as `weight: expected [V, 4096], got [151936, 4095]`.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  /// The message, empty when ok.
  const std::string& message() const { return message_; }
  /// "invalid argument: targets: expected ..." or "ok".
  std::string to_string() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// A value or the Status that says why there is none (C++20 has no std::expected).
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : data_(std::move(value)) {}        // NOLINT(google-explicit-constructor)
  Result(Status status) : data_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!std::get<Status>(data_).ok() && "a Result without a value needs an error");
  }

  bool ok() const { return std::holds_alternative<T>(data_); }
  explicit operator bool() const { return ok(); }
  /// The error, or an ok Status when there is a value.
  Status status() const { return ok() ? Status() : std::get<Status>(data_); }
  /// The value. Precondition: ok(). A temporary gives its value away, never a reference or a pointer into itself, so
  /// `auto&& v = *call();` is safe; `call()->member` does not compile, `(*call()).member` does.
  T& value() & { return std::get<T>(data_); }
  const T& value() const& { return std::get<T>(data_); }
  T value() && { return std::get<T>(std::move(data_)); }
  void value() const&& = delete;
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(*this).value(); }
  void operator*() const&& = delete;
  T* operator->() & { return &value(); }
  const T* operator->() const& { return &value(); }
  void operator->() && = delete;
  void operator->() const&& = delete;

 private:
  std::variant<T, Status> data_;
};

}  // namespace lmhead
