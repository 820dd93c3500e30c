# Included by ggml. Optimizes ggml with the flags of CMake's Release, for any flags of the rest of llama.cpp.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
