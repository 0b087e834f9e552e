// Scores a batch with the LM head spread over MPI processes: each maps the model file and reads only the rows of
// its own vocabulary shard.
//
//     mpirun -n 4 build/release/mpi_score out/batch.safetensors out/model/model.safetensors model.embed_tokens.weight
//
// The batch is what `make run` writes: hidden [N, H], input_ids [N], cu_seqlens [S + 1]. Rank 0 prints the mean
// log-prob and entropy of the scored tokens, and what one call sent.
#include <mpi.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "lmhead/parallel.h"
#include "safetensors.h"

namespace {

using lmhead::DType;

lmhead::ConstMatrix matrix(lmhead::tools::SafetensorsFile& file, const char* name) {
  const lmhead::tools::Tensor* tensor = file.find(name);
  if (tensor == nullptr || tensor->shape.size() != 2) throw std::runtime_error(std::string(name) + ": no such matrix");
  const DType dtype = lmhead::tools::require_dtype(file, *tensor, {"BF16", "F16", "F32"});
  return {file.aligned(*tensor), tensor->shape[0], tensor->shape[1], tensor->shape[1], dtype};
}

std::vector<std::int64_t> integers(lmhead::tools::SafetensorsFile& file, const char* name) {
  const lmhead::tools::Tensor* tensor = file.find(name);
  if (tensor == nullptr) throw std::runtime_error(std::string(name) + ": no such tensor");
  const DType dtype = lmhead::tools::require_dtype(file, *tensor, {"I32", "I64"});
  const void* data = file.aligned(*tensor);
  std::vector<std::int64_t> values(static_cast<std::size_t>(tensor->elements()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] =
        dtype == DType::kInt64 ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  return values;
}

int score(int rank, char** argv) {
  auto group = lmhead::mpi_communicator();
  if (!group.ok()) throw std::runtime_error(group.status().message());
  lmhead::Communicator& tp = **group;
  auto batch = lmhead::tools::SafetensorsFile::open(argv[1]), model = lmhead::tools::SafetensorsFile::open(argv[2]);

  lmhead::Problem problem;
  problem.hidden = matrix(batch, "hidden");
  problem.weight = matrix(model, argv[3]);
  const std::int64_t vocab = problem.weight.rows;
  const lmhead::VocabShard shard = lmhead::vocab_shard(vocab, rank, tp.size());
  problem.weight.data =
      static_cast<const std::byte*>(problem.weight.data) +
      static_cast<std::size_t>(shard.start * problem.weight.row_stride) * lmhead::size_of(problem.weight.dtype);
  problem.weight.rows = shard.size;
  problem.vocab_start = shard.start;
  problem.vocab_size = vocab;
  problem.entropy = lmhead::EntropyMode::kMetric;
  problem.inference_only = true;

  // Each row scores the next id of its own sequence.
  std::vector<std::int64_t> targets = integers(batch, "input_ids");
  const std::vector<std::int64_t> offsets = integers(batch, "cu_seqlens");
  targets.erase(targets.begin());
  targets.push_back(problem.ignore_index);
  for (std::size_t s = 1; s < offsets.size(); ++s)
    targets[static_cast<std::size_t>(offsets[s] - 1)] = problem.ignore_index;
  const std::int64_t n = static_cast<std::int64_t>(targets.size());
  problem.targets = {targets.data(), n, 1, DType::kInt64};

  std::vector<float> logprob(targets.size()), entropy(targets.size());
  lmhead::Execution execution;
  execution.threads = 1;  // the ranks share the cores
  const lmhead::Status status = lmhead::sharded_forward(
      problem, tp, {{logprob.data(), n, 1, DType::kFloat32}, {entropy.data(), n, 1, DType::kFloat32}, {}}, execution);
  if (!status.ok()) throw std::runtime_error(status.message());
  if (rank != 0) return 0;
  double sum = 0, uncertainty = 0;
  std::int64_t scored = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] == problem.ignore_index) continue;
    sum += logprob[i];
    uncertainty += entropy[i];
    ++scored;
  }
  std::printf("%d ranks, %lld tokens: mean logprob %.6f, mean entropy %.6f; %lld all-gather, %lld bytes sent a rank\n",
              tp.size(), static_cast<long long>(scored), sum / static_cast<double>(scored),
              uncertainty / static_cast<double>(scored), static_cast<long long>(tp.traffic().all_gathers),
              static_cast<long long>(tp.traffic().bytes_sent));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (argc != 4) {
    if (rank == 0)
      std::fprintf(stderr, "usage: mpirun -n RANKS mpi_score BATCH.safetensors MODEL.safetensors TENSOR\n");
    MPI_Finalize();
    return 2;
  }
  try {
    score(rank, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_score: rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
