# The tools of a first run, as targets of llama.cpp's own build: export-graphs, for `kernelgen model`, and the
# simulator's libnrt. One configure and one build then take a model from its file to tokens:
#
#     cmake -S llama.cpp -B build -DGGML_NEURON_TOOLS=ON … && cmake --build build --target llama-simple export-graphs neuron_simulator
#
# CMake includes this file at ggml's project() call, and not at the end of its CMakeLists.txt, which can't add folders.
# export-graphs links to llama.cpp's targets by name; CMake finds them when it generates.

option(GGML_NEURON_TOOLS "Have the targets export-graphs and neuron_simulator" OFF)

function(ggml_neuron_add_tools)
    set(backend "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..")
    set(GGML_NEURON_LLAMA_DIR "${CMAKE_CURRENT_SOURCE_DIR}/..")
    set(GGML_NEURON_IN_LLAMA_BUILD ON)
    add_subdirectory("${backend}/exporter" "${CMAKE_BINARY_DIR}/export-graphs" EXCLUDE_FROM_ALL)
    # In its own folder: llama.cpp's programs search bin/ for libraries, and must not find the simulator in place of the
    # real libnrt.
    set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/neuron-simulator")
    add_subdirectory("${backend}/simulator" "${CMAKE_BINARY_DIR}/simulator" EXCLUDE_FROM_ALL)
endfunction()

if(GGML_NEURON_TOOLS)
    ggml_neuron_add_tools()
endif()
