# Adds ggml-neuron to the build of an unchanged llama.cpp (or ggml), with one option more:
#
#     cmake -S llama.cpp -B build -DGGML_BACKEND_DL=ON -DCMAKE_PROJECT_ggml_INCLUDE=<this file>
#
# CMake includes it when ggml's project() is called, which is too early: ggml's functions and targets are not there yet. So
# the rest is put off until the end of ggml's CMakeLists.txt.

cmake_language(EVAL CODE "cmake_language(DEFER CALL include [[${CMAKE_CURRENT_LIST_DIR}/ggml-neuron-tree.cmake]])")
