# Adds ggml-neuron to the build of an unchanged llama.cpp (or ggml), with the last of these options:
#
#     cmake -S llama.cpp -B build -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DCMAKE_PROJECT_ggml_INCLUDE=<this file>
#
# With -DGGML_NEURON_MANIFESTS="a.yaml;b.yaml" the build also compiles the kernels of these manifests into the
# backend. With -DGGML_NEURON_TOOLS=ON the build has two more targets: export-graphs, into bin/, and neuron_simulator,
# into neuron-simulator/.
#
# CMake includes this file at ggml's project() call. That is too early for the backend: ggml's functions and targets do
# not exist yet. So the backend is deferred to the end of ggml's CMakeLists.txt.

include(${CMAKE_CURRENT_LIST_DIR}/ggml-neuron-kernels.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/ggml-neuron-tools.cmake)

cmake_language(EVAL CODE "cmake_language(DEFER CALL include [[${CMAKE_CURRENT_LIST_DIR}/ggml-neuron-tree.cmake]])")
