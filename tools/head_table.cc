#include "head_table.h"

#include <sstream>

#include "commands.h"
#include "shape_tables.h"  // written by CMake from shapes/

namespace lmhead::tools {
namespace {

Head find_head(const std::string& name) {
  std::istringstream table(kHeadTable);
  std::string known;
  for (std::string line; std::getline(table, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream row(line);
    std::string row_name;
    Head head{};
    int tied = 0;
    double softcap = 0;
    row >> row_name >> head.h >> head.v >> tied >> softcap >> head.logit_scale;
    if (softcap > 0) head.softcap = softcap;
    if (row_name == name) return head;
    known += (known.empty() ? "" : ", ") + row_name;
  }
  throw bad_input("--head: expected one of " + known + ", got " + name);
}

}  // namespace

Head head_or_sizes(const std::string& name, std::int64_t hidden, std::int64_t vocab) {
  if (name.empty() ? hidden == 0 || vocab == 0 : hidden != 0 || vocab != 0)
    throw bad_input("--head: expected a name, or --hidden and --vocab, and not both");
  return name.empty() ? Head{hidden, vocab, {}, 1.0} : find_head(name);
}

}  // namespace lmhead::tools
