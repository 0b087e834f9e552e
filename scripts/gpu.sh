#!/bin/bash
# GPU tests, compute-sanitizer and benchmark: scripts/gpu.sh [--prebuilt DIR] [tests|sanitize|bench|all]
#
# Without --prebuilt it configures and builds first (build/gpu, or $BUILD_DIR); on a machine without a GPU it
# stops there and says which files to take to one. --prebuilt DIR builds nothing and runs the programs in DIR,
# which may be a copied build folder. Each suite takes less than ten minutes. Logs and a summary go to
# $RESULTS (build/gpu-results), measurements as JSON lines to benchmarks/results/ with --prebuilt too.
set -u -o pipefail
cd "$(dirname "$0")/.."
BUILD=${BUILD_DIR:-build/gpu}
RESULTS=${RESULTS:-build/gpu-results}
PREBUILT=
if [ "${1:-}" = --prebuilt ]; then
  PREBUILT=${2:?--prebuilt: expected a folder}
  BUILD=$PREBUILT
  shift 2
fi
SUITE=${1:-all}
case $SUITE in tests | sanitize | bench | all) ;; *)
  echo "scripts/gpu.sh: expected tests, sanitize, bench or all, got $SUITE" >&2
  exit 2
  ;;
esac

# Programs that run every backend as a parameter.
TESTS="$(sed -n 's/^ *lmhead_backend_test(\([a-z_]*\))/\1/p' tests/CMakeLists.txt | tr '\n' ' ')cuda_test packed_test vocab_parallel_test communicator_test"

if [ -z "$PREBUILT" ]; then
  targets="$TESTS cuda_plan_test gpu_bench"
  cmake -S . -B "$BUILD" -DCMAKE_BUILD_TYPE=Release -DLMHEAD_CUDA=ON -DLMHEAD_TESTS=ON -DLMHEAD_BENCHMARKS=ON || exit 1
  # shellcheck disable=SC2086
  cmake --build "$BUILD" -j "${JOBS:-$(nproc)}" --target $targets || exit 1
fi
if ! nvidia-smi -L > /dev/null 2>&1; then
  if [ -n "$PREBUILT" ]; then
    echo "no NVIDIA GPU on this machine (nvidia-smi -L)" >&2
    exit 1
  fi
  echo "built, but this machine has no GPU. On one, with $BUILD copied there: scripts/gpu.sh --prebuilt $BUILD $SUITE"
  exit 0
fi

mkdir -p "$RESULTS" benchmarks/results
: > "$RESULTS/summary"
export LMHEAD_SHAPES_DIR=$PWD/shapes
FAILED=0
DEVICE=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
echo "$DEVICE, driver and clocks: $(nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.mem --format=csv,noheader -i 0)" |
  tee -a "$RESULTS/summary"

# record NAME SECONDS COMMAND...: runs with a limit, keeps the log, adds a line to the summary.
record() {
  local name=$1 limit=$2 start=$SECONDS status=ok
  shift 2
  timeout "$limit" "$@" > "$RESULTS/$name.log" 2>&1
  local code=$?
  [ $code -eq 0 ] || { status="FAILED ($code)"; FAILED=1; }
  printf '%-28s %-14s %4d s\n' "$name" "$status" $((SECONDS - start)) | tee -a "$RESULTS/summary"
  [ $code -eq 0 ] || grep -E 'Failure|^\[  FAILED  \]|ERROR SUMMARY|expected .* got|error' -A3 "$RESULTS/$name.log" | head -20
}

run_tests() {
  for test in $TESTS; do
    record "$test" 110 "$BUILD/tests/$test" --gtest_brief=1 --gtest_filter='*cuda*:*sm90*'
  done
}

# Every kernel of sm90 and cuda_portable, with and without a head's options, an entropy gradient and a cache, runs in
# these; few and small, for tools that slow kernels 10 to 100 times. PROGRAM=FILTER.
SANITIZED='cuda_test=*BitsRepeat* cache_test=*Cache.MetricMode*:*Cache.RowsBeyond* backends_test=*EntropyModes/sm90:*EntropyModes/cuda_portable'

run_sanitize() {
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | head -1)
  if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer is missing" | tee -a "$RESULTS/summary"
    FAILED=1
    return
  fi
  set -f  # the filters are patterns of their own
  for tool in memcheck synccheck initcheck racecheck; do
    # racecheck reports hazards inside cuBLAS's own Hopper kernels (nvjet_*), and filtering kernels by name made it
    # crash; so it checks everything, and only hazards in our kernels count.
    [ $tool = racecheck ] && code= || code='--error-exitcode 7'
    for entry in $SANITIZED; do
      local name=$tool-${entry%%=*}
      # shellcheck disable=SC2086
      record "$name" 60 "$sanitizer" --tool $tool $code \
        "$BUILD/tests/${entry%%=*}" --gtest_brief=1 --gtest_filter="${entry#*=}"
      if grep 'Race reported.*lmhead' "$RESULTS/$name.log" | head -5 | grep .; then
        echo "$name: hazards in our kernels" | tee -a "$RESULTS/summary"
        FAILED=1
      fi
      # Nothing is clean that did not run.
      if ! grep -q 'PASSED.* [1-9][0-9]* test' "$RESULTS/$name.log"; then
        echo "$name: no test ran" | tee -a "$RESULTS/summary"
        FAILED=1
      fi
    done
  done
  set +f
}

run_bench() {
  if [ ! -x "$BUILD/benchmarks/gpu_bench" ]; then
    echo "gpu_bench is missing in $BUILD/benchmarks" | tee -a "$RESULTS/summary"
    FAILED=1
    return
  fi
  local out
  out=benchmarks/results/$(echo "$DEVICE" | tr 'A-Z ' 'a-z-').jsonl
  record bench 540 "$BUILD/benchmarks/gpu_bench" --commit "$(git rev-parse --short HEAD 2> /dev/null || echo unknown)" \
    --out "$out" --case 16384,4096,131072 --case 8192,2048,151936 --case 16384,1024,131072 --case 8192,4096,32768 \
    --op forward --op forward_backward --entropy grad --entropy off --backend sm90 --backend cuda_portable \
    --reps 15 --seconds 4
  cat "$RESULTS/bench.log"
  echo "measurements: $out" | tee -a "$RESULTS/summary"
}

case $SUITE in
  tests) run_tests ;;
  sanitize) run_sanitize ;;
  bench) run_bench ;;
  all)
    run_tests
    run_sanitize
    run_bench
    ;;
esac
echo
cat "$RESULTS/summary"
exit $FAILED
