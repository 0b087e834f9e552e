# Tests over several ranks: threads everywhere, MPI where the build has it.
lmhead_test(communicator_test dist communicator_test.cc)
lmhead_test(vocab_parallel_test dist vocab_parallel_test.cc sharded_run.cc)
target_link_libraries(vocab_parallel_test PRIVATE lmhead_testing)
