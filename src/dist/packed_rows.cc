#include "dist/packed_rows.h"

namespace lmhead {

Result<PackedRows> packed_rows(const PackedLayout& layout, std::int64_t cp_rank) {
  Result<std::vector<std::int64_t>> local = layout.local_rows(cp_rank);
  if (!local.ok()) return local.status();
  const std::vector<std::int64_t> source = layout.source_rows(), target = layout.target_rows();
  PackedRows rows;
  rows.source.reserve(local->size());
  rows.target.reserve(local->size());
  for (const std::int64_t global : *local) {
    rows.source.push_back(source[static_cast<std::size_t>(global)]);
    const std::int64_t next = target[static_cast<std::size_t>(global)];
    rows.target.push_back(next < 0 ? -1 : source[static_cast<std::size_t>(next)]);
  }
  const std::vector<std::int64_t> gathered = layout.gathered_rows();
  for (const std::int64_t global : layout.global_rows())
    rows.gathered.push_back(gathered[static_cast<std::size_t>(global)]);
  return rows;
}

}  // namespace lmhead
