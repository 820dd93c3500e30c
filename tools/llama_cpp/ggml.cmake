# Within ggml: optimize as CMake's Release does by itself, whatever the rest of llama.cpp is compiled with.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
