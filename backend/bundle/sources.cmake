# The list of the library's sources for every build: by itself, for its tests, and as part of ggml-neuron.

set(NEURON_KERNELS_SOURCES
    bundle.cpp
    error.cpp
    gguf.cpp
    graph_key.cpp
    key.cpp
    mapping.cpp
    pack.cpp
    sha256.cpp
)
list(TRANSFORM NEURON_KERNELS_SOURCES PREPEND "${CMAKE_CURRENT_LIST_DIR}/src/")
