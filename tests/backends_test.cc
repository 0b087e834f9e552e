// Every backend against fp64: data with teeth, shapes, dtypes and every option of a problem.
#include "testing.h"

namespace lmhead {
namespace {

using testing::Case;
using testing::Data;

class Backends : public testing::BackendTest {};

TEST_P(Backends, DataWithTeeth) {
  for (const Data data : testing::kAllData) {
    expect_exact({.n = 37, .h = 64, .v = 1025, .data = data});
    expect_exact({.n = 19, .h = 96, .v = 2048, .data = data, .hidden = DType::kFloat32, .weight = DType::kFloat32});
  }
}

LMHEAD_TEST_EVERY_BACKEND(Backends);

}  // namespace
}  // namespace lmhead
