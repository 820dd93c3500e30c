# Within llama.cpp, when all of its targets are there: compile the backend's files as a few.

cmake_language(DEFER CALL set_target_properties ggml-neuron PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
